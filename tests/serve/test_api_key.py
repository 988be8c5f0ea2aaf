"""The API key: who has none learns that a server lives and whether it is ready, and nothing else; and where keys never stand."""

import dataclasses
import json
import socket

import httpx
import pytest
from serve_fakes import text_outputs
from served import Served

from pdjax.core.errors import ConfigError
from pdjax.serve.args import BootstrapArgs, ServeArgs
from pdjax.serve.health import PeerAccess
from pdjax.serve.local import Plan

KEY = "key-of-the-test"
WITH = {"authorization": f"Bearer {KEY}"}
BODY = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
ASKED = [
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("POST", "/drain"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
    ("GET", "/v1/models"),
    ("GET", "/get_load"),
    ("GET", "/metrics"),
    ("GET", "/debug/rooms"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.fixture(scope="module")
def locked():
    server = Served(key=KEY, script=lambda request: text_outputs("hello", "length"))
    yield server
    server.close()


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_without_the_key_everything_but_health_is_one_401(locked, method, path):
    before, accepted = locked.desk.counters["unauthorized"], locked.desk.counters["accepted"]
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": f"Basic {KEY}"}):
        answer = locked.http.request(method, path, json=BODY, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert error["code"] == 401 and error["reason"] == "unauthorized" and "Bearer" in error["message"]
    assert locked.desk.counters["unauthorized"] == before + 3
    assert locked.desk.counters["accepted"] == accepted and not locked.engine.draining


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/readiness"])
def test_routers_and_probes_need_no_key(locked, path):
    assert locked.http.get(path).status_code == 200


def test_with_the_key_it_serves_also_a_stream(locked):
    assert locked.http.post("/generate", json=BODY, headers=WITH).json()["text"] == "hello"
    streamed = locked.http.post(
        "/generate", json=BODY | {"stream": True}, headers={"Authorization": f"bearer {KEY}"}
    )
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")


def test_a_body_is_not_read_before_the_key(locked):
    """30 MB are announced and never sent: the answer comes all the same."""
    url = httpx.URL(locked.url)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=30) as stream:
        stream.sendall(head)
        assert stream.recv(65536).startswith(b"HTTP/1.1 401")


def test_the_key_stands_in_no_answer_and_no_log(locked):
    pages = [
        locked.http.get(path, headers=WITH).text for path in ("/server_info", "/metrics", "/debug/rooms")
    ]
    locked.http.post("/generate", json=BODY, headers=WITH)
    for text in (*pages, locked.log_text.getvalue(), repr(PeerAccess(KEY))):
        assert KEY not in text
    assert '"unauthorized"' in pages[0]


def files(tmp_path):
    for name in ("key", "secret"):
        (tmp_path / name).write_text(f"{name}-of-the-test\n")
    return {"api_key_file": str(tmp_path / "key"), "secret_file": str(tmp_path / "secret")}


def test_arguments_hold_paths_and_never_what_stands_there(tmp_path):
    args = ServeArgs("m", **files(tmp_path))
    assert args.api_key() == "key-of-the-test" and len(args.token()) == 64
    text = json.dumps(dataclasses.asdict(args), default=str) + repr(args)
    for held in ("key-of-the-test", "secret-of-the-test", args.token(), args.secret().hex()):
        assert held not in text
    assert BootstrapArgs(secret_file=args.secret_file).token() == args.token()
    assert args.secret().hex()[:64] != args.token(), "one that was overheard must not sign frames"


@pytest.mark.parametrize("content", ["two words", "ключ", "a\nb", ""])
def test_a_key_that_no_header_can_hold_is_an_operators_mistake(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        ServeArgs("m", api_key_file=str(tmp_path / "key")).check()


def pd(**more):
    return ServeArgs("m", disaggregation_mode="decode", bootstrap_host="10.0.0.1", **more)


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
def test_a_public_address_of_the_transfer_ports_must_be_asked_for(host):
    with pytest.raises(ConfigError, match="--disaggregation-public-transfer"):
        pd(host=host).check()
    pd(host=host, public_transfer=True).check()
    ServeArgs("m", host=host).check()  # an ordinary server has none


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.2", "::ffff:10.0.0.2", "fd00::1", "::1"])
def test_a_private_address_need_not(host):
    pd(host=host).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "::0", "0", "0x0", "0.0", "[::]", "::ffff:0.0.0.0"])
def test_no_wildcard_serves_the_transfer_even_if_asked_for(host):
    with pytest.raises(ConfigError, match="this machine's own address"):
        pd(host=host, public_transfer=True).check()


@pytest.mark.parametrize("host", ["localhost", "127.1", "prefill-0.example"])
def test_the_transfer_listens_on_no_name(host):
    with pytest.raises(ConfigError, match="must be a numeric IPv4 or IPv6 address"):
        pd(host=host).check()
    ServeArgs("m", host=host).check()


def test_without_an_argument_every_port_is_of_this_machine_only():
    assert {ServeArgs("m").host, BootstrapArgs().host, Plan("m").host} == {"127.0.0.1"}


def test_a_key_is_sent_to_no_server_that_anybody_could_have_listed(tmp_path):
    both = files(tmp_path)
    pd(**both).check()
    with pytest.raises(ConfigError, match="--api-key-file without --disaggregation-secret-file"):
        pd(api_key_file=both["api_key_file"]).check()
    ServeArgs("m", api_key_file=both["api_key_file"]).check()


def test_one_machine_with_a_key_takes_the_router_that_passes_it_on(tmp_path):
    extra = ("--api-key-file", str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="--router mini"):
        Plan("m", router="mini", extra=extra).check()
    Plan("m", router="rust", extra=extra).check()
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        Plan("m", extra=("--ssl-certfile=c.pem",)).check()
