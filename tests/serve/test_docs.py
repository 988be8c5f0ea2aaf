"""docs/operations.md names every flag with its default, and no flag that does not exist."""

import dataclasses
import pathlib
import re

from pdjax.core.settings import PDSettings
from pdjax.serve.args import BootstrapArgs, ServeArgs, UpArgs
from pdjax.serve.options import CONFIG_HELP, variable

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "operations.md"
COMMANDS = (ServeArgs, PDSettings, BootstrapArgs, UpArgs)


def flags():
    yield "config", "empty", CONFIG_HELP
    for spec in (field for cls in COMMANDS for field in dataclasses.fields(cls)):
        if spec.metadata.get("flag"):
            default = "required" if spec.default is dataclasses.MISSING else spec.default
            shown = f"{default:g}" if isinstance(default, float) else str(default) or "empty"
            yield spec.metadata["flag"], shown, spec.metadata["doc"]


def test_every_flag_is_in_the_page_with_its_default_and_meaning():
    text = PAGE.read_text()
    for flag, default, doc in flags():
        assert f"| `--{flag}` | {default} | {doc} |" in text, flag


def test_the_page_lists_no_other_flag():
    listed = set(re.findall(r"^\| `--([a-z0-9-]+)` \|", PAGE.read_text(), re.M))
    assert listed == {flag for flag, _, _ in flags()}


def test_the_page_says_how_a_variable_is_named():
    assert f"`{variable('disaggregation-lease')}`" in PAGE.read_text()
