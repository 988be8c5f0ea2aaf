"""pdjax doctor: each thing that keeps a pair from working is a row that says what to do, and nothing else fails."""

import contextlib
import dataclasses
import json
import re
import resource
import socket
import sys
from pathlib import Path

import httpx
import pytest

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint, KVArgs
from pdjax.core.settings import PDSettings
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.serve import cli, doctor_local, doctor_peers
from pdjax.serve.args import ServeArgs
from pdjax.serve.doctor import examine

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from stranger import Stranger, answer

PRINT = Fingerprint(1, "m", "w", "float32", 16, 2, 1, 64, "paged", "single", 4 << 20, 1, "0.10.2")
FEW = PDSettings(max_peers=2)


def rows(findings):
    return {one.check: one for one in findings}


@pytest.fixture
def registry():
    server = HTTPBootstrapServer("127.0.0.1", 0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def register(registry, role, name, url="http://127.0.0.1:9", zmq_port=9, **changes):
    fields = {name: getattr(PRINT, name) for name in PRINT.__struct_fields__}
    kv = KVArgs([], 16, Fingerprint(**{**fields, **changes}), name, url)
    payload = registration(kv, role, 5, zmq_addr=f"127.0.0.1:{zmq_port}", transfer_addr="127.0.0.1")
    with httpx.Client(trust_env=False) as http:
        assert http.put(f"{registry.url}/route", json=payload).status_code == 200


def args_for(registry, role="decode", **changes):
    wanted = {"bootstrap_host": "127.0.0.1", "bootstrap_port": registry.port, "port": 0, **changes}
    return ServeArgs("tiny", disaggregation_mode=role, **wanted)


def asked(registry, role="decode", **changes):
    args = args_for(registry, role, **changes)
    args.check()
    return rows(doctor_peers.registry(args, model_known=False))


# ---------------------------------------------------------------- this machine


def test_versions_are_those_that_the_package_pins(monkeypatch):
    found = rows(doctor_local.versions())
    assert found["jax"].status == found["jaxlib"].status == found["python"].status == "ok"
    assert doctor_local.pinned().keys() >= {"jax", "jaxlib"}
    monkeypatch.setattr(doctor_local, "version", lambda name: "0.0.1")
    found = rows(doctor_local.versions())
    assert found["jaxlib"].status == "fail" and "pip install 'jaxlib==" in found["jaxlib"].advice
    monkeypatch.setattr(doctor_local, "version", lambda name: None)
    assert rows(doctor_local.versions())["sglang-router"].status == "warn"


def test_a_taken_port_and_an_address_of_another_machine(listening):
    found = rows(doctor_local.ports(ServeArgs("m", port=listening)))
    assert found["HTTP port"].status == "fail" and "--port" in found["HTTP port"].advice
    found = rows(doctor_local.ports(ServeArgs("m", host="192.0.2.1", port=30000)))
    assert found["HTTP port"].status == "fail" and "192.0.2.1" in found["HTTP port"].found
    assert rows(doctor_local.ports(ServeArgs("m", port=0)))["HTTP port"].status == "ok"


def test_a_port_that_this_very_server_has_is_no_fault(serve):
    url = serve("decode").url
    args = ServeArgs("m", disaggregation_mode="decode", port=int(url.rsplit(":", 1)[1]))
    (found,) = doctor_local.ports(args)
    assert found.status == "ok" and "runs already" in found.found
    other = ServeArgs("m", disaggregation_mode="prefill", with_bootstrap=True, port=args.port)
    assert rows(doctor_local.ports(other))["HTTP port"].status == "fail"


def free_range(count):
    """The first of count ports in a row that nobody has."""
    for base in range(20000, 60000, 97):
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return base
    raise AssertionError("no free range")


def test_the_fixed_range_is_tried_port_by_port():
    base = free_range(5)

    def look(**more):
        args = ServeArgs("m", disaggregation_mode="prefill", settings=FEW, port=0, **more)
        return rows(doctor_local.ports(args))["transfer ports"]

    assert look(port_base=base).found == f"{base} to {base + 4} are free; D must reach them"
    with socket.create_server(("127.0.0.1", base + 3)):
        found = look(port_base=base)
        assert found.status == "warn" and f"{base + 3} are taken" in found.found
    with socket.create_server(("127.0.0.1", base)):
        assert look(port_base=base).status == "fail"
    assert look().status == "warn" and "--disaggregation-port-base" in look().advice


@pytest.mark.parametrize(
    ("host", "registry_host", "status"),
    [
        ("127.0.0.1", "192.0.2.7", "fail"),
        ("127.0.0.1", "127.0.0.2", "warn"),
        ("127.0.0.1", "", "warn"),
        ("192.0.2.1", "192.0.2.7", "ok"),
        ("localhost", "192.0.2.7", "fail"),
    ],
)
def test_a_loopback_address_is_no_address_for_a_peer_elsewhere(host, registry_host, status):
    args = ServeArgs("m", disaggregation_mode="decode", host=host, bootstrap_host=registry_host)
    found = rows(doctor_local.addresses(args, {}))["advertised address"]
    assert found.status == status
    assert ("--host" in found.advice) == (status != "ok")


def test_a_proxy_that_the_router_would_take_is_told():
    args = ServeArgs("m", host="10.0.0.2")
    assert rows(doctor_local.addresses(args, {"HTTP_PROXY": "http://p:1"}))["proxy"].status == "warn"
    direct = {"HTTP_PROXY": "http://p:1", "NO_PROXY": "127.0.0.1,10.0.0.2"}
    assert "proxy" not in rows(doctor_local.addresses(args, direct))


def test_a_secret_that_others_can_read_is_told(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    args = ServeArgs("m", disaggregation_mode="decode", secret_file=str(secret))
    found = rows(doctor_local.addresses(args, {}))["disaggregation-secret-file"]
    assert found.status == "warn" and found.advice == f"chmod 600 {secret}"
    secret.chmod(0o600)
    assert "disaggregation-secret-file" not in rows(doctor_local.addresses(args, {}))


def test_few_file_descriptors_are_told(monkeypatch):
    args = ServeArgs("m", disaggregation_mode="decode")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    (found,) = doctor_local.limits(args)
    assert found.status == "warn" and "1024" in found.found and "ulimit -Hn" in found.advice
    (of_p,) = doctor_local.limits(dataclasses.replace(args, disaggregation_mode="prefill"))
    needs = [int(re.search(r"ulimit -Hn (\d+)", told.advice)[1]) for told in (found, of_p)]
    assert needs[1] == needs[0] + PDSettings().max_channel_connections
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 65536))  # serve raises the first
    assert next(iter(doctor_local.limits(args))).status == "ok"


# ---------------------------------------------------------------- registry and peers


def test_a_registry_that_is_not_there_or_is_something_else(registry, serve):
    gone = asked(registry, bootstrap_port=closed_port())["registry"]
    assert gone.status == "fail" and "pdjax bootstrap" in gone.advice
    other = asked(registry, bootstrap_port=int(serve().url.rsplit(":", 1)[1]))["registry"]
    assert other.status == "fail"
    alone = asked(registry)
    assert alone["registry"].status == "ok" and alone["peers"].status == "warn"
    assert asked(registry, bootstrap_host="")["registry"].status == "warn"


def test_a_reachable_p_is_ok_in_every_row(registry, serve, listening):
    server = serve("prefill")
    last = closed_port()
    base_info = server.engine.info()
    server.engine.info = lambda: {**base_info, "transfer_ports": [last - 4, last]}
    register(registry, "prefill", "p0", server.url, listening)
    register(registry, "decode", "d0")
    found = asked(registry)
    assert found["prefill p0"].status == "ok" and "ready: True" in found["prefill p0"].found
    assert found["side channel of p0"].status == "ok"
    assert found["transfer ports of p0"].found == f"127.0.0.1:{last - 4} to {last}: packets arrive"
    assert found["fingerprint of d0 with p0"].status == "ok"
    assert all(one.status == "ok" for one in found.values())


def test_a_side_channel_where_nobody_listens_and_a_filtered_port(registry, serve, monkeypatch):
    server = serve("prefill")
    base_info = server.engine.info()
    server.engine.info = lambda: {
        **base_info,
        "transfer_ports": [1, 5],
        "counters": {"bad_frame_checksum": 3},
    }
    register(registry, "prefill", "p0", server.url, closed_port())
    found = asked(registry)
    assert (
        found["side channel of p0"].status == "fail" and "nobody listens" in found["side channel of p0"].found
    )
    assert found["secret of p0"].status == "warn" and "3 frames" in found["secret of p0"].found
    monkeypatch.setattr(doctor_peers, "_dial", lambda host, port: "timed out")
    found = asked(registry)
    assert found["transfer ports of p0"].status == "fail"
    assert found["transfer ports of p0"].advice == "open TCP 1 to 5 from D to 127.0.0.1"


def test_ports_that_the_kernel_chooses_cannot_be_tried(registry, serve, listening):
    register(registry, "prefill", "p0", serve("prefill").url, listening)
    found = asked(registry)["transfer ports of p0"]
    assert found.status == "warn" and "--disaggregation-port-base" in found.advice


def test_p_does_not_need_to_reach_ds_http(registry):
    register(registry, "decode", "d0", f"http://127.0.0.1:{closed_port()}")
    found = asked(registry, "prefill")
    assert found["decode d0"].status == "warn" and "side channel of d0" not in found


def test_a_dialled_port_is_open_or_closed(listening):
    assert doctor_peers._dial("127.0.0.1", listening) == "open"
    assert doctor_peers._dial("127.0.0.1", closed_port()) == "closed"


def test_fingerprints_are_compared_field_by_field(registry):
    register(registry, "prefill", "p0", page_size=32, weights="other")
    register(registry, "decode", "d0")
    found = asked(registry)["fingerprint of d0 with p0"]
    assert found.status == "fail"
    assert found.found == "weights: 'w' on d0, 'other' on p0; page_size: 16 on d0, 32 on p0"
    register(registry, "prefill", "p1")
    found = asked(registry)
    assert found["fingerprint of d0 with p0"].status == "warn", "another one fits"
    assert found["fingerprint of d0 with p1"].status == "ok"


def test_this_server_is_compared_when_it_runs_already(registry, serve):
    url = serve("decode").url
    register(registry, "decode", "mine", url, page_size=8)
    register(registry, "decode", "d1")
    register(registry, "prefill", "p0")
    found = asked(registry, port=int(url.rsplit(":", 1)[1]))
    assert found["fingerprint of mine (running) with p0"].status == "fail"
    assert "fingerprint of d1 with p0" not in found


def test_its_own_fingerprint_is_the_servers_and_needs_no_pools(registry, monkeypatch):
    """The pools of a server that is to run here may be larger than what is free beside one that runs already."""
    from pdjax.serve import loading

    few = args_for(registry, num_pages=16, context_length=64)
    running = loading.fingerprint_of(loading.load(few).runner)
    monkeypatch.setattr(loading, "JaxRunner", None)
    assert loading.own_fingerprint(few) == running
    assert loading.own_fingerprint(args_for(registry, num_pages=1 << 17)) == running
    with pytest.raises(ConfigError, match="does not fit: 15 pages hold 240 tokens"):
        loading.own_fingerprint(args_for(registry, num_pages=16, context_length=512))


def test_this_server_is_compared_by_what_it_would_be(registry):
    from pdjax.serve.loading import own_fingerprint

    args = args_for(registry, num_pages=16, context_length=64)
    mine = own_fingerprint(args)
    same = {name: getattr(mine, name) for name in mine.__struct_fields__}
    register(registry, "prefill", "same", **same)
    register(registry, "prefill", "bf16", **{**same, "kv_dtype": "bfloat16"})
    register(registry, "prefill", "tpu", **{**same, "layout": f"{mine.layout} 128 wide"})
    register(registry, "prefill", "other", **{**same, "page_size": 99, "kv_dtype": "bfloat16"})
    found = rows(doctor_peers.registry(args, model_known=True))
    assert found["fingerprint of this server with same"].status == "ok"
    assert found["fingerprint of this server with bf16"].status == "ok", (
        "auto may be bfloat16 where it will run"
    )
    assert found["fingerprint of this server with tpu"].status == "ok", "a TPU fills rows up"
    assert found["fingerprint of this server with other"].found == "page_size: 16 on this server, 99 on other"
    fixed = args_for(registry, num_pages=16, context_length=64, dtype="float32")
    found = rows(doctor_peers.registry(fixed, model_known=True))
    assert "kv_dtype" in found["fingerprint of this server with bf16"].found


def test_a_model_that_serve_would_refuse(registry):
    register(registry, "prefill", "p0")
    args = ServeArgs(
        "/nowhere", disaggregation_mode="decode", bootstrap_host="127.0.0.1", bootstrap_port=registry.port
    )
    assert rows(doctor_peers.registry(args, model_known=True))["model"].status == "fail"


def test_a_router_that_is_not_there_is_no_failure(registry):
    router = f"http://127.0.0.1:{closed_port()}"
    args = ServeArgs("m", router_url=router)
    assert rows(doctor_peers.routers(args))[f"router {router}"].status == "warn"


# ---------------------------------------------------------------- the command


@pytest.fixture
def clean(monkeypatch):
    for name in doctor_local.PROXIES:
        monkeypatch.delenv(name, raising=False)


def test_exit_codes_and_json(clean, capsys, listening):
    assert cli.run(["doctor", "--port", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True and {"check", "status", "found", "advice"} == set(told["checks"][0])
    assert cli.run(["doctor", "--port", str(listening), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [one["check"] for one in told["checks"] if one["status"] == "fail"] == ["HTTP port"]
    assert cli.run(["doctor", "--disaggregation-mode", "prefill"]) == 2
    assert "--with-bootstrap" in capsys.readouterr().err


def test_the_table_keeps_brackets_of_addresses(clean, capsys, monkeypatch):
    monkeypatch.setattr(doctor_local, "versions", lambda: iter([doctor_local.ok("x", "[::1]:80 [red]")]))
    assert cli.run(["doctor", "--port", "0"]) == 0
    assert "[::1]:80 [red]" in capsys.readouterr().out


def test_all_checks_run_for_a_pd_server(registry, clean):
    findings = examine(args_for(registry), model_known=False)
    assert {"jax", "HTTP port", "advertised address", "file descriptors", "registry", "peers"} <= set(
        rows(findings)
    )


BAD_SEAT = (
    b'{"instances":[{"instance_id":"p","epoch":"7","compatible":true,"serving_url":"URL","zmq_addr":"x:9",'
    b'"age_s":1,"fingerprint":{"hash":"h"}}],"internal_states":[{"transfer_ports":[1,2]}]}'
)


@pytest.mark.parametrize(
    "body",
    [b'{"instances":' + b"[" * 200_000, b'{"instances":[{"age_s":1e999}]}', b"\xff", b"[]", BAD_SEAT],
    ids=["deep", "too large", "no text", "a list", "bad seat"],
)
def test_an_answer_that_is_none_is_a_row(body):
    stranger = Stranger()
    try:
        stranger.reply = answer(body.replace(b"URL", stranger.url.encode()))
        found = asked(stranger)
        (routers,) = doctor_peers.routers(ServeArgs("m", router_url=stranger.url))
    finally:
        stranger.close()
    assert "fail" in {one.status for one in found.values()}
    assert routers.status == "warn"
