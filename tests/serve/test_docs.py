"""docs/operations.md names every flag with its default, and no flag that does not exist; docs/api.md every field."""

import dataclasses
import pathlib
import re

import pytest

from pdjax.core.outlook import RoomView
from pdjax.core.settings import PDSettings
from pdjax.core.vocabulary import CONDITIONS
from pdjax.core.wire import MAX_TOP_LOGPROBS
from pdjax.serve.args import BootstrapArgs, ServeArgs, UpArgs
from pdjax.serve.limits import HttpLimits
from pdjax.serve.logprobs import read_wanted
from pdjax.serve.options import CONFIG_HELP, variable
from pdjax.serve.params import NEUTRAL_GENERATE, NEUTRAL_OPENAI
from pdjax.serve.sampling_fields import OPENAI, SGLANG, read_sampling

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


# ---------------------------------------------------------------- docs/api.md

API = (PAGE.parent / "api.md").read_text()


class Recorder(dict):
    """A body that remembers which fields were looked for."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return default


def test_the_api_page_has_every_limit_with_its_value():
    listed = dict(re.findall(r"^\| `(max_\w+)` \| (\d+) \|", API, re.M))
    limits = {spec.name: str(spec.default) for spec in dataclasses.fields(HttpLimits)}
    assert listed == {**limits, "max_top_logprobs": str(MAX_TOP_LOGPROBS)}


@pytest.mark.parametrize("dialect", [SGLANG, OPENAI])
def test_the_api_page_names_every_field_that_is_read(dialect):
    body = Recorder()
    read_sampling(body, dialect, HttpLimits(), default_max=None, vocab_size=9)
    read_wanted(body, 1)
    assert len(body.asked) > 20
    for field in {*body.asked, *NEUTRAL_GENERATE, *NEUTRAL_OPENAI}:
        assert f"`{field}`" in API, field


def test_the_page_explains_what_debug_rooms_shows():
    """Every field of a room but its identity, by name."""
    text = PAGE.read_text()
    named = {field.name for field in dataclasses.fields(RoomView)}
    plain = {"room", "role", "attempt", "peer_epoch", "reason", "detail"}
    for name in [*sorted(named - plain), "says", "scheduler", "early", "limbo", "notices", "tombstones"]:
        assert f"`{name}`" in text, name
    for name in sorted(set(re.findall(r"`needs` has (?:only )?`(\w+)`", text))):
        assert name in CONDITIONS, f"{name} is no condition of the table"
