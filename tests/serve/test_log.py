"""The server's log: one line an event whatever a client sends, in both formats, and never a prompt."""

import io
import json
import logging

import pytest

from pdjax.sched.request import Finish, Output
from pdjax.serve.log import ServerLog, take_over

SECRET = "the client's own words"


@pytest.fixture
def root():
    """Python's loggers as they were before."""
    before = logging.root.handlers[:], logging.root.level, logging.getLogger("pdjax").level
    yield
    logging.root.handlers[:], level, ours = before
    logging.root.setLevel(level)
    logging.getLogger("pdjax").setLevel(ours)


def test_an_undeclared_log_field_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        ServerLog().event("accepted", prompt="secret")


def test_a_log_line_is_one_json_object(capsys):
    ServerLog().event("ready", url="http://x", message="two\nlines", peer=None)
    (line,) = capsys.readouterr().err.splitlines()
    body = json.loads(line)
    assert body["message"] == "two\nlines" and "peer" not in body
    assert (body["event"], body["level"]) == ("ready", "info")


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), io.StringIO()])
def test_a_log_that_nobody_takes_costs_no_request(serve, stream):
    """A full disk, or a pipe whose reader is gone: the lines are lost and counted."""
    if not isinstance(stream, Full):
        stream.close()
    server = serve(log_text=stream)
    assert server.post("/generate", {"text": "x"}).status_code == 200
    told = server.http.get("/server_info").json()["internal_states"][0]["http"]
    assert told["finished"] == 1 and told["log_lines_lost"] == 2
    assert 'pd_counter_total{name="log_lines_lost",part="http"} 2.0' in server.http.get("/metrics").text


def test_a_line_of_text_is_one_line_whatever_a_client_sends():
    stream = io.StringIO()
    log = ServerLog(stream, form="text")
    log.event("finished", rid='x\n2026 INFO forged room=7 "', room=5, times={"pull_s": 0.5}, seconds=1.25)
    (line,) = stream.getvalue().splitlines()
    when, level, event, *_ = line.split()
    assert when.endswith("Z") and (level, event) == ("INFO", "finished")
    assert line.endswith("room=5 times.pull_s=0.5 seconds=1.25")
    assert '\\n2026 INFO forged room=7 \\"' in line


@pytest.mark.parametrize("text", ["", "a b", "a=b", 'q"', "\x1b[31m", "\u2028"])
def test_a_value_that_could_mislead_is_quoted(text):
    stream = io.StringIO()
    ServerLog(stream, form="text").event("failed", rid=text)
    (_, told) = stream.getvalue().rstrip("\n").split("rid=")
    assert json.loads(told) == text


def test_the_level_leaves_out_what_is_below_it():
    stream = io.StringIO()
    log = ServerLog(stream, level="warning")
    log.event("finished", room=1)
    log.event("failed", room=2)
    assert [json.loads(line)["room"] for line in stream.getvalue().splitlines()] == [2]


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_loggers_of_python_write_into_it_with_their_traceback(root, form):
    stream = io.StringIO()
    logging.disable(logging.NOTSET)  # whatever earlier tests have left behind
    for name in ("pdjax", "pdjax.engine", "library"):
        logger = logging.getLogger(name)
        logger.disabled, logger.propagate, logger.level = False, True, logging.NOTSET
    take_over(ServerLog(stream, form=form))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("pdjax.engine").exception("a turn failed")
    logging.getLogger("pdjax.engine").debug("not at info")
    logging.getLogger("library").info("not of others")
    logging.getLogger("library").warning("but this")
    ours = ("a turn failed", "not at info", "not of others", "but this")
    first, second = (line for line in stream.getvalue().splitlines() if any(text in line for text in ours))
    assert "RuntimeError: boom" in first and "a turn failed" in first and "pdjax.engine" in first
    assert "but this" in second
    if form == "json":
        assert json.loads(first)["level"] == "error" and json.loads(second)["logger"] == "library"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_no_line_of_a_request_holds_its_prompt_or_its_output(serve, level):
    server = serve("prefill", script=lambda request: [Output((104, 105), finish=Finish("length"))])
    server.desk.log = ServerLog(server.log_text, level=level)
    body = {"text": SECRET, "rid": "r1", "bootstrap_host": "h", "bootstrap_room": 77}
    assert server.post("/generate", body).status_code == 200
    assert server.post("/generate", {**body, "bootstrap_room": "x"}).status_code == 400
    text = server.log_text.getvalue()
    assert SECRET not in text and str(list(SECRET.encode()))[1:-1] not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["accepted", "finished"]
    assert all(line["room"] == 77 and line["rid"] == "r1" for line in lines), "one key for both sides"
