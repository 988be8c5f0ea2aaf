"""facts/router §0, what both routers ask for and send: endpoints, bodies, rooms. Rows of docs/routers.md."""

import socket

import pytest
from router_rows import BOTH, CHAT, PROMPT, at_once, body, ok

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOM_MAX = (1 << 63) - 1
ROUTED = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def test_0_1_endpoints(fleet):
    for node in ("prefill-0", "decode-0"):
        for path in ("/health", "/health_generate", "/v1/models", "/get_load", "/metrics"):
            assert fleet.http.get(f"{fleet.url(node)}{path}").status_code == 200, (node, path)
        for name in ("server_info", "model_info"):
            old, new = (fleet.http.get(f"{fleet.url(node)}/{prefix}{name}").json() for prefix in ("", "get_"))
            assert old.keys() == new.keys() and old["model_path"] == new["model_path"]
        for path in ("/flush_cache?timeout=30", "/abort_request", "/continue_generation"):
            answer = fleet.http.post(f"{fleet.url(node)}{path}", json={"rid": "nobody"})
            assert answer.status_code == 200, (node, path, answer.text)
    for router in BOTH:
        assert fleet.http.get(f"{fleet.url(router)}/get_model_info").json()["is_generation"] is True
        assert fleet.http.post(f"{fleet.url(router)}/flush_cache").status_code == 200
        assert fleet.http.get(f"{fleet.url(router)}/v1/models").json()["data"]
    loads = fleet.http.get(f"{fleet.url('rust')}/get_loads").json()["workers"]
    assert len(loads) == 4 and all(one["load"] >= 0 for one in loads), loads
    for path in ("/health_generate", "/get_server_info", "/model_info"):
        assert fleet.http.get(f"{fleet.url('mini')}{path}").status_code == 200, path


def test_0_1_http2_probe(fleet):
    """rust sends it at each registration, so by now every worker has had some; here is one more of our own."""
    for node in ("prefill-0", "decode-0"):
        host, port = fleet.url(node).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            assert raw.recv(4096).startswith(b"HTTP/1.1 40")
        assert fleet.http.get(f"{fleet.url(node)}/health").status_code == 200
    # mini prints a traceback of its own when a worker fails
    ours = [line for line in fleet.output if line.startswith(("[prefill-", "[decode-"))]
    assert ours and not [line for line in ours if "Traceback" in line]


def test_0_2_normalised_bodies(shims):
    """rust adds defaults and renames max_tokens; every field that it adds is served, none changes the answer."""
    fleet, p, _ = shims
    requests = {
        "/generate": body(),
        "/v1/completions": {"model": "default", "prompt": "Once", "max_tokens": 4, "temperature": 0},
        "/v1/chat/completions": {**CHAT, "max_tokens": 4},
    }
    for path, request in requests.items():
        plain = ok(fleet.post("plain-0", path, request))
        for router in ("rust-shim", "mini-shim"):
            pd = ok(fleet.post(router, path, request))
            if path == "/generate":
                assert pd["output_ids"] == plain["output_ids"], router
            else:
                assert pd["choices"] == plain["choices"], router
                assert pd["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    rust = {seen.path: seen.body for seen in p.seen[::2]}
    assert rust["/generate"]["model"] is None and rust["/generate"]["sampling_params"]["temperature"] == 0.0
    chat = rust["/v1/chat/completions"]
    assert chat["max_completion_tokens"] == 4 and "max_tokens" not in chat
    for path, request in requests.items():
        added = rust[path].keys() - request.keys() - set(ROUTED)
        assert len(added) >= 5, (path, added)
    assert [seen.body.keys() - requests[seen.path].keys() for seen in p.seen[1::2]] == [set(ROUTED)] * 3


def test_0_3_rooms_scalar_and_list(shims):
    fleet, p, d = shims
    batch = body([PROMPT, PROMPT[:4]])
    for router in ("rust-shim", "mini-shim"):
        for request in (body(), batch):
            fleet.post(router, "/generate", request).raise_for_status()
    for seen in p.seen:
        rooms, many = seen.room, isinstance(seen.body["input_ids"][0], list)
        assert isinstance(rooms, list) is many, seen.body
        for room in rooms if many else [rooms]:
            assert type(room) is int and 0 <= room <= ROOM_MAX
        assert (seen.body["bootstrap_port"], seen.body["bootstrap_host"]) == (
            ([fleet.bootstrap_port] * 2, ["127.0.0.1"] * 2) if many else (fleet.bootstrap_port, "127.0.0.1")
        )
    assert [seen.room for seen in p.seen] == [seen.room for seen in d.seen]


def test_0_3_scalar_room_for_many_prompts(shims):
    """mini's /v1/completions, and n outputs anywhere: room + i on both sides."""
    fleet, p, _ = shims
    request = {"model": "default", "prompt": ["Once", "upon a time"], "max_tokens": 4, "temperature": 0}
    plain = ok(fleet.post("plain-0", "/v1/completions", request))["choices"]
    for router in ("rust-shim", "mini-shim"):
        assert ok(fleet.post(router, "/v1/completions", request))["choices"] == plain, router
        two = ok(fleet.post(router, "/v1/chat/completions", {**CHAT, "max_tokens": 3, "n": 2}))
        assert [choice["index"] for choice in two["choices"]] == [0, 1]
    kinds = [isinstance(seen.room, list) for seen in p.seen]
    assert kinds == [True, True, False, False], "rust names each room, mini one"


def test_0_3_rooms_wrap(fleet):
    """No router draws so high in a test: the legs are posted as mini posts them. Rooms: the last one, 0, 1."""
    request = body(
        [PROMPT, PROMPT[:3], PROMPT[2:]],
        bootstrap_host="127.0.0.1",
        bootstrap_port=fleet.bootstrap_port,
        bootstrap_room=ROOM_MAX,
    )
    p, d = at_once(*(lambda n=n: fleet.post(n, "/generate", request) for n in ("prefill-1", "decode-1")))
    assert p.status_code == 200, p.text
    plain = ok(fleet.post("plain-0", "/generate", body(request["input_ids"])))
    assert [one["output_ids"] for one in ok(d)] == [one["output_ids"] for one in plain]


def test_0_3_null_port(fleet):
    """A router that was told no bootstrap port sends null: D asks the registry that it was configured with."""
    expected = ok(fleet.post("plain-0", "/generate", body()))["output_ids"]
    for router in ("rust-1p1d", "mini-1p1d"):
        assert ok(fleet.post(router, "/generate", body()))["output_ids"] == expected
    workers = fleet.http.get(f"{fleet.url('rust-1p1d')}/workers").json()["workers"]
    assert [one.get("bootstrap_port") for one in workers if one["worker_type"] == "prefill"] == [None]


def test_0_4_equal_bodies_without_role(shims):
    fleet, p, d = shims
    params = {"kv_transfer_params": {"remote": "x"}, "routed_dp_rank": 3, "bootstrap_room": 5}
    for router in ("rust-shim", "mini-shim"):
        fleet.post(router, "/generate", body(**params)).raise_for_status()
    assert [seen.body for seen in p.seen] == [seen.body for seen in d.seen]
    rust, mini = (seen.body for seen in p.seen)
    assert "kv_transfer_params" not in rust and mini["kv_transfer_params"] == {"remote": "x"}
    assert all("disagg_prefill_dp_rank" not in one and one["bootstrap_room"] != 5 for one in (rust, mini))


def test_2_bodies(fleet):
    """Token ids as a completion's prompt, and no model: 422 from rust itself; mini passes them on, and they are served."""
    ids = {"model": "default", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    nameless = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    for request in (ids, nameless):
        assert fleet.post("rust", "/v1/completions", request).status_code == 422
        plain = ok(fleet.post("plain-0", "/v1/completions", request))
        assert ok(fleet.post("mini", "/v1/completions", request))["choices"] == plain["choices"]
    for router in BOTH:
        wrong = {**ids, "prompt": "Once", "model": "nobody"}
        assert fleet.post(router, "/v1/completions", wrong).status_code == 404
        assert fleet.post(router, "/v1/chat/completions", {**CHAT, "max_tokens": 0}).status_code == 400


def test_2_headers(shims):
    """rust passes on authorization and x-request-id, mini nothing; a router's connection is kept or new, both serve."""
    fleet, p, _ = shims
    sent = {"authorization": "Bearer k", "x-request-id": "mine", "x-custom": "c"}
    for router in ("rust-shim", "mini-shim"):
        for _ in range(2):
            fleet.post(router, "/generate", body(), headers=sent).raise_for_status()
    got = [{name: seen.headers.get(name) for name in sent} for seen in p.seen]
    assert got[:2] == [{**sent, "x-custom": None}] * 2
    assert got[2:] == [dict.fromkeys(sent)] * 2
