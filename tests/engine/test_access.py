"""Keys, certificates and the bounds of a port: what a stranger gets from the registry, and what that costs (docs/security.md)."""

import contextlib
import socket
import ssl
import subprocess
import threading

import httpx
import pytest
from test_bootstrap_http import clients, prefill, until

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap import httpd
from pdjax.engine.bootstrap.access import check_certificate, registry_token, verifying
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.httpd import Door
from pdjax.engine.bootstrap.server import HTTPBootstrapServer

__all__ = ["clients"]
TOKEN = registry_token(b"of the test")
ENDPOINTS = [
    ("PUT", "/route"),
    ("POST", "/heartbeat"),
    ("DELETE", "/route"),
    ("GET", "/route?role=prefill"),
    ("GET", "/list?role=prefill"),
    ("GET", "/nowhere"),
]


@pytest.fixture
def start():
    started = []

    def start(**more):
        server = HTTPBootstrapServer(port=0, **more)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_a_registry_with_a_secret_answers_401_without_its_token(start, method, path):
    server = start(token=TOKEN)
    refused = [
        {},
        bearer("wrong"),
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "0"),
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")],
    ]
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for headers in refused:
            answer = http.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == 401 and TOKEN not in answer.text
        assert http.request(method, path, headers=bearer(TOKEN), content=b"{}").status_code != 401
        health = http.get("/health")
    assert health.status_code == 200 and health.json()["counters"]["unauthorized"] == len(refused)


def test_without_a_secret_the_registry_is_open(start):
    with httpx.Client(base_url=start().url, trust_env=False) as http:
        assert http.get("/list", params={"role": "prefill"}).status_code == 200


def test_the_token_tells_nothing_of_the_secret_and_no_secret_has_none():
    assert registry_token(b"") == "" and registry_token(b"a") != registry_token(b"b")
    assert b"of the test".hex() not in TOKEN and len(TOKEN) == 64


def test_an_instance_with_the_secret_is_listed_and_one_without_is_told_why(start, clients, caplog):
    server = start(token=TOKEN)
    client, sink = clients(*server.address, token=TOKEN, heartbeat_interval_s=0.05)
    client.announce(prefill())
    until(lambda: client.counters["heartbeat"], "a heartbeat")
    client.lookup(1, "127.0.0.1", None)
    assert [e.instance_id for e in sink.wait(1)[0].entries] == ["p0"]
    stranger, heard = clients(*server.address, heartbeat_interval_s=0.05)
    stranger.announce(prefill("p9"))
    until(lambda: stranger.counters["refused_401"] >= 3, "the refusals")
    assert "--disaggregation-secret-file" in stranger.membership.error and not stranger.membership.registered
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line == stranger.membership.error, "one line, however often it tries"
    stranger.lookup(2, "127.0.0.1", None)
    assert heard.wait(1)[0].entries == () and "401" in heard.done[0].error
    assert len(server.registry) == 1


def test_the_token_goes_to_no_registry_that_a_client_names(clients):
    """Without a configured registry D asks the injected host, which is any client's text."""
    seen = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        stream, _ = listener.accept()
        with stream:
            seen.append(stream.recv(65536))
            stream.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"instances":[]}')

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    client, sink = clients(None, 8998, token=TOKEN)
    client.lookup(1, "127.0.0.1", listener.getsockname()[1])
    sink.wait(1)
    thread.join(10)
    listener.close()
    assert b"GET /route" in seen[0] and b"authorization" not in seen[0].lower()


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=pdjax"
    )
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


def test_a_registry_over_tls_is_used_by_who_believes_its_certificate(start, clients, certificate):
    server = start(door=Door(*certificate), token=TOKEN)
    assert server.url.startswith("https://")
    client, sink = clients(*server.address, token=TOKEN, ca_file=certificate[0], heartbeat_interval_s=0.05)
    client.announce(prefill())
    until(lambda: client.membership.registered, "registered over TLS")
    client.lookup(1, "127.0.0.1", None)
    assert sink.wait(1)[0].entries
    with httpx.Client(base_url=server.url, trust_env=False) as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.get("/health")
        with pytest.raises(httpx.HTTPError):
            stranger.get(server.url.replace("https", "http") + "/health")
    assert client.counters["registry_silent"] == 0


def test_a_registry_with_another_certificate_is_not_believed(start, clients, certificate, tmp_path):
    other = tmp_path / "other.pem"
    other.write_bytes(ssl.DER_cert_to_PEM_cert(b"\x30\x00").encode())
    with pytest.raises(ConfigError, match="ssl-ca-file"):
        verifying(str(other))
    server = start(door=Door(*certificate))
    client, _ = clients("localhost", server.port, ca_file=certificate[0], heartbeat_interval_s=0.05)
    client.announce(prefill())
    until(lambda: client.membership.error, "the refusal")
    assert "CERTIFICATE_VERIFY_FAILED" in client.membership.error, "the certificate is for 127.0.0.1 only"
    assert len(server.registry) == 0


def test_files_that_are_no_certificate_are_an_operators_mistake(certificate, tmp_path):
    cert, key = certificate
    (tmp_path / "no.pem").write_text("none")
    check_certificate("", "")
    check_certificate(cert, key)
    for pair in ((cert, ""), ("", key), (key, cert), (cert, str(tmp_path / "no.pem")), ("/nowhere", key)):
        with pytest.raises(ConfigError) as told:
            check_certificate(*pair)
        assert "--ssl-" in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(ConfigError, match="ssl-ca-file"):
        HttpRegistryClient("127.0.0.1", 1, ca_file="/nowhere")


def test_a_key_with_a_password_is_refused_and_asks_nobody(certificate, tmp_path):
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "ec", "-in", certificate[1], "-aes128", "-passout", "pass:geheim", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises(ConfigError, match="unencrypted"):
        check_certificate(certificate[0], locked)


# ---------------------------------------------------------------- bounds of a port


def answers(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as http:
        return http.get("/health").status_code


def test_a_connection_beyond_the_limit_is_refused_and_counted_and_leaves_room_when_others_go(start):
    server = start(door=Door(max_connections=2))
    held = [socket.create_connection(server.address) for _ in range(2)]
    for stream in held:  # both are there once they are answered
        stream.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert stream.recv(12) == b"HTTP/1.1 200"
    assert answers(server) == 503
    assert server.registry.counters["connections_refused"] == 1
    for stream in held:
        stream.close()
    until(lambda: answers(server) == 200, "an answer after the others have gone")


@pytest.mark.parametrize("said", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET "])
def test_who_does_not_say_what_it_wants_is_closed(start, said):
    """The last one has been answered once and drips its next request."""
    server = start(door=Door(head_timeout_s=0.2))
    with socket.create_connection(server.address, timeout=30) as stream:
        stream.sendall(said)
        until(lambda: server.registry.counters["slow_heads"], "the end of the patience")
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(65536):  # ends: TimeoutError is no reset
                pass
    assert answers(server) == 200


def test_a_connection_that_waits_between_two_requests_is_kept(start):
    server = start(door=Door(head_timeout_s=0.2))
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        http.get("/health")
        threading.Event().wait(0.6)
        assert http.get("/health").status_code == 200
    assert server.registry.counters["slow_heads"] == 0


def test_a_body_that_does_not_come_is_400(start, monkeypatch):
    monkeypatch.setattr(httpd.read_json, "__defaults__", (0.2,))
    server = start()
    with socket.create_connection(server.address, timeout=30) as stream:
        stream.sendall(b"PUT /route HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        told = stream.recv(65536)
    assert told.startswith(b"HTTP/1.1 400") and b"within 0.2 s" in told
    assert answers(server) == 200
