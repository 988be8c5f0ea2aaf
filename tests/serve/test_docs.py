"""docs/operations.md names every flag with its default and every endpoint, and no other; docs/api.md every field."""

import dataclasses
import pathlib
import re

import pytest

from pdjax.core.outlook import RoomView
from pdjax.core.settings import PDSettings
from pdjax.core.vocabulary import CONDITIONS
from pdjax.core.wire import MAX_TOP_LOGPROBS
from pdjax.engine.bootstrap.httpd import KEEP_ALIVE_S
from pdjax.engine.bootstrap.registry import MAX_ENTRIES
from pdjax.sched.request import Finish, Output
from pdjax.serve import guardian
from pdjax.serve.app import DEBUG_ROOMS
from pdjax.serve.args import BootstrapArgs, DoctorArgs, ServeArgs, ShowArgs, UpArgs
from pdjax.serve.bench import BenchArgs
from pdjax.serve.children import END_WAIT_S
from pdjax.serve.limits import HttpLimits
from pdjax.serve.logprobs import read_wanted
from pdjax.serve.options import CONFIG_HELP, variable
from pdjax.serve.params import NEUTRAL_GENERATE, NEUTRAL_OPENAI
from pdjax.serve.phases import PHASES
from pdjax.serve.request_stats import WINDOW_S
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


OF_THE_ROUTER = {
    "disable-circuit-breaker",
    "health-check-interval-secs",
    "pd-disaggregation",
    "request-timeout-secs",
}
OF_THE_ROUTER |= {"prometheus-host", "prometheus-port"}
OF_SIM = {"complete"}


@pytest.mark.parametrize("page", ["operations", "security", "api"])
def test_a_page_names_no_flag_that_is_not_there(page):
    """Anywhere: in a sentence, a cell, a command line."""
    known = {flag for flag, _, _ in flags()} | OF_THE_ROUTER | OF_SIM
    for cls in (BenchArgs, DoctorArgs, ShowArgs):
        known |= {field.metadata["flag"] for field in dataclasses.fields(cls) if "flag" in field.metadata}
    named = set(
        re.findall(r"(?<![\w-])--(?!no-…)([a-z][a-z0-9-]*[a-z0-9])", (PAGE.parent / f"{page}.md").read_text())
    )
    assert named - known == set()


def test_the_page_says_how_a_variable_is_named():
    assert f"`{variable('disaggregation-lease')}`" in PAGE.read_text()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("operations", f"({DEBUG_ROOMS} rooms unless `?limit=`"),
        ("operations", f"`pdjax up` gives its servers {END_WAIT_S:g} s"),
        ("operations", f"kills what is left after {guardian.END_WAIT_S:g} s"),
        ("operations", f"tokens per second over the last {WINDOW_S} s"),
        ("routers", f"Ours are held open for {KEEP_ALIVE_S} s"),
        ("performance", f"Its limit is {MAX_ENTRIES:,} instances"),
    ],
)
def test_a_number_in_a_sentence_is_the_one_in_the_code(page, said):
    assert said in (PAGE.parent / f"{page}.md").read_text()


def test_the_page_lists_every_endpoint_and_no_other(shared):
    """In the first column of its table, with the method before the first path of a row."""
    (table,) = re.findall(r"^## Endpoints of a server\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    listed = set()
    for cell in re.findall(r"^\| (`.+?`) \|", table, re.M):
        method, paths = re.match(r"`(GET|POST) ", cell)[1], re.findall(r"/[\w/.]+", cell)
        listed |= {(method, path) for path in paths}
    served = {(method, route.path) for route in shared().app.routes for method in route.methods - {"HEAD"}}
    assert listed == served


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


@pytest.mark.parametrize(
    ("path", "body"),
    {
        "/generate": {"text": "x", "return_logprob": True, "top_logprobs_num": 1},
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }.items(),
)
def test_the_api_page_names_what_an_answer_holds(serve, path, body):
    """What sglang and OpenAI have in every answer is theirs to explain, the rest is the page's."""
    common = {"text", "output_ids", "meta_info", "usage"}
    common |= {"id", "object", "created", "model", "choices"}
    one = Output((104,), (-0.5,), (((104, -0.5),),), finish=Finish("length"))
    answer = serve(script=lambda request: [one]).post(path, body).json()
    held = answer.keys() | answer.get("meta_info", {}).keys()
    for field in held - common:
        assert re.search(rf"`(meta_info\.)?{field}`", API), field
    assert "`times`" in API and "`usage`" in API


def test_the_api_page_explains_every_phase():
    rows = re.findall(r"^\| `(\w+)_s` \|", API, re.M)
    assert tuple(rows) == PHASES


def test_the_page_explains_what_debug_rooms_shows():
    """Every field of a room but its identity, by name."""
    text = PAGE.read_text()
    named = {field.name for field in dataclasses.fields(RoomView)}
    plain = {"room", "role", "attempt", "peer_epoch", "reason", "detail"}
    for name in [*sorted(named - plain), "says", "scheduler", "early", "limbo", "notices", "tombstones"]:
        assert f"`{name}`" in text, name
    for name in sorted(set(re.findall(r"`needs` has (?:only )?`(\w+)`", text))):
        assert name in CONDITIONS, f"{name} is no condition of the table"
