"""What a client, an operator or a peer does wrong: a clear error, the others unharmed, everything free afterwards."""

import concurrent.futures
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GOOD = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
ROOM = iter(range(10_000, 20_000))


def legs(fleet, body, p="prefill-0", d="decode-0"):
    """The same body to both sides at once, as a router posts it."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda where: fleet.post(where, "/generate", body), (p, d)))


def with_room(fleet, room, **changes):
    return {
        **GOOD,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": fleet.bootstrap_port,
        "bootstrap_room": room,
        **changes,
    }


def assert_serves(fleet):
    p, d = legs(fleet, with_room(fleet, next(ROOM)))
    assert (p.status_code, d.status_code) == (200, 200), (p.text, d.text)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_ids": []},
        {"input_ids": [5] * 512},
        {"input_ids": [5, 10_000_000]},
        {"input_ids": [5, -1]},
        {"input_ids": "text"},
        {"sampling_params": {"max_new_tokens": 0}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"temperature": "hot"}},
        {"bootstrap_room": 1 << 63},
        {"bootstrap_room": -1},
        {"bootstrap_room": 7.0},
        {"bootstrap_room": "7"},
        {"bootstrap_room": True},
        {"bootstrap_room": None},
        {"bootstrap_host": 5},
        {"bootstrap_port": 70_000},
    ],
)
def test_bad_input_is_400_on_both_legs(fleet, changes):
    before = [fleet.state(n)["accepted"] for n in ("prefill-0", "decode-0")]
    for answer in legs(fleet, {**with_room(fleet, next(ROOM)), **changes}):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert [fleet.state(n)["accepted"] for n in ("prefill-0", "decode-0")] == before
    assert_serves(fleet)


@pytest.mark.parametrize("router", ["rust", "mini"])
def test_bad_input_through_the_routers(fleet, router):
    answer = fleet.post(router, "/generate", {**GOOD, "input_ids": [5] * 600})
    assert answer.status_code == 400, answer.text


def test_a_duplicate_live_room_is_400_and_the_first_goes_on(fleet):
    room = next(ROOM)
    body = with_room(
        fleet, room, sampling_params={"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    )
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(fleet.post, "decode-0", "/generate", body)
        fleet.await_any("decode-0", "bootstrapping")
        assert fleet.post("decode-0", "/generate", body).status_code == 400
        assert fleet.post("prefill-0", "/generate", body).status_code == 200
        assert fleet.post("prefill-0", "/generate", body).status_code == 400
        assert first.result().status_code == 200
    assert len(first.result().json()["output_ids"]) == 300
    assert all(a.status_code == 400 for a in legs(fleet, body)), (
        "a room that has just ended is not used again"
    )


@pytest.mark.parametrize("room", [0, (1 << 53) + 1, (1 << 63) - 1])
def test_the_ends_of_the_room_range_serve(fleet, room):
    p, d = legs(fleet, with_room(fleet, room))
    assert (p.status_code, d.status_code) == (200, 200), (p.text, d.text)


def test_an_unknown_model_is_404_and_default_is_served(fleet):
    body = {"prompt": "x", "max_tokens": 2, "model": "nobody"}
    assert fleet.post("plain-0", "/v1/completions", body).status_code == 404
    assert fleet.post("rust", "/v1/completions", {**body, "model": "default"}).status_code == 200


def serve(*options, timeout=120):
    command = [sys.executable, "-m", "pdjax.serve.cli", "serve", "--port", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "nowhere/at-all"], "nowhere/at-all"),
        (["--model", "tiny", "--disaggregation-mode", "prefill"], "registry"),
        (["--model", "tiny", "--disaggregation-mode", "decode", "--disaggregation-lease", "2"], "lease"),
        (["--model", "tiny", "--disaggregation-mode", "sideways"], "sideways"),
    ],
)
def test_an_operators_mistake_is_one_line_and_exit_code_2(options, named):
    ended = serve(*options)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr and named in ended.stderr, ended.stderr


def test_a_taken_port_is_one_line_and_exit_code_2(fleet):
    port = fleet.url("plain-0").rsplit(":", 1)[1]
    ended = serve("--model", "tiny", "--port", port)
    assert ended.returncode == 2 and port in ended.stderr and "Traceback" not in ended.stderr


def test_a_client_that_leaves_frees_both_sides(fleet):
    body = with_room(
        fleet,
        next(ROOM),
        sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
        stream=True,
    )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        p = pool.submit(fleet.post, "prefill-0", "/generate", body)
        with fleet.http.stream("POST", f"{fleet.url('decode-0')}/generate", json=body) as answer:
            next(answer.iter_lines())
        p.result()
    fleet.await_free(within_s=10)
    assert_serves(fleet)


def test_abort_request_ends_it_on_both_sides(fleet):
    body = with_room(
        fleet,
        next(ROOM),
        rid="to-abort",
        sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        d = pool.submit(fleet.post, "decode-0", "/generate", body)
        fleet.await_any("decode-0", "bootstrapping")
        for node in ("prefill-0", "decode-0"):
            assert fleet.post(node, "/abort_request", {"rid": "to-abort"}).status_code == 200
        ended = d.result()
    assert "abort" in ended.text
    fleet.await_free(within_s=10)


def test_a_broken_gguf_file_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 16)
    ended = serve("--model", str(tmp_path / "m.gguf"))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "cannot be read as GGUF" in ended.stderr
