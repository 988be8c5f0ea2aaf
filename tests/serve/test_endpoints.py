"""Endpoints that routers and operators call, on both roles (facts/router §0.1, §1)."""

import socket

import pytest

from pdjax.sched.request import PhaseTimes
from pdjax.serve.phases import phase_seconds


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_server_info_under_both_names(shared, role):
    for path in ("/server_info", "/get_server_info"):
        body = shared(role).http.get(path).json()
        assert body["disaggregation_mode"] == role
        assert body["served_model_name"] == "fake-model" and body["tp_size"] == body["dp_size"] == 1
        assert body["disaggregation_bootstrap_port"] == 8998
        assert body["internal_states"][0]["free_pages"] == 4 and body["model_type"] == "llama"


def test_model_info_under_both_names(shared):
    for path in ("/model_info", "/get_model_info"):
        body = shared().http.get(path).json()
        assert (
            body["is_generation"] is True
            and body["architectures"] == ["X"]
            and body["weight_version"] == "default"
        )


def test_models(shared):
    (model,) = shared().http.get("/v1/models").json()["data"]
    assert model["id"] == "fake-model" and model["object"] == "model" and model["max_model_len"] == 512


def test_load(shared):
    load = shared().http.get("/get_load").json()
    assert load == [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 30}]


def test_health_tells_a_dead_thread_but_not_a_missing_peer(serve):
    server, path = serve("decode", is_ready=False), "/health"
    assert (server.http.get(path).status_code, server.http.get(path).content) == (200, b"")
    server.engine.dead = "scheduler: boom"
    answer = server.http.get(path)
    assert answer.status_code == 503 and "scheduler" in answer.text


def test_readiness_needs_a_peer_and_live_threads(serve):
    server = serve("decode")
    assert server.http.get("/readiness").status_code == 200
    server.engine.is_ready = False
    assert server.http.get("/readiness").status_code == 503
    server.engine.is_ready, server.engine.dead = True, "driver: boom"
    assert server.http.get("/readiness").status_code == 503


def test_drain_is_asked_for_and_shown(serve):
    server = serve()
    answer = server.http.post("/drain")
    assert answer.json() == {"draining": True, "live": 0} and server.engine.draining
    assert server.http.get("/health").status_code == 200, "alive is not ready"
    readiness = server.http.get("/readiness")
    assert readiness.status_code == 503 and readiness.json()["status"] == "draining"
    assert server.http.get("/server_info").json()["draining"] is True


def test_flush_cache(serve):
    server = serve()
    assert server.http.post("/flush_cache").status_code == 200
    server.engine.can_flush = False
    assert server.http.post("/flush_cache?timeout=2.5").status_code == 400
    assert server.engine.flush_waits == [0, 2.5]
    for wrong in ("-1", "nan", "inf", "soon"):
        answer = server.http.post(f"/flush_cache?timeout={wrong}")
        assert answer.status_code == 400 and "timeout" in answer.text
    server.engine.dead = "scheduler: boom"
    assert server.http.post("/flush_cache").status_code == 503
    assert len(server.engine.flush_waits) == 2


def test_the_http2_probe_of_a_router_gets_an_answer_and_the_server_lives(shared, capfd, caplog):
    server = shared()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert raw.recv(4096).startswith(b"HTTP/1.1 40")
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def test_unknown_paths_and_methods_do_not_reach_the_engine(shared):
    assert shared().http.get("/nothing").status_code == 404
    assert shared().http.get("/generate").status_code == 405


def test_phases_of_a_plain_server():
    times = PhaseTimes(arrived=1.0, scheduled=1.5, prefilled=2.5, first_token=2.5, finished=4.5)
    assert phase_seconds(times) == {"queue_s": 0.5, "prefill_s": 1.0, "first_token_s": 1.5, "decode_s": 2.0}


def test_phases_of_d_take_queue_and_prefill_from_p():
    times = PhaseTimes(
        arrived=1.0,
        ready=3.0,
        scheduled=3.25,
        landed=4.0,
        scattered=4.125,
        first_token=4.125,
        finished=5.125,
        peer_queue_s=0.5,
        peer_prefill_s=1.25,
    )
    assert phase_seconds(times) == {
        "queue_s": 0.5,
        "prefill_s": 1.25,
        "ready_s": 2.0,
        "page_wait_s": 0.25,
        "pull_s": 0.75,
        "scatter_s": 0.125,
        "first_token_s": 3.125,
        "decode_s": 1.0,
    }


# ---------------------------------------------------------------- pause (facts/router §9)


@pytest.mark.parametrize(
    ("body", "aborts"),
    [(None, ["all"]), ({}, ["all"]), ({"mode": "abort"}, ["all"])]
    + [({"mode": mode}, []) for mode in ("in_place", "retract")],
)
def test_pause_and_continue(serve, body, aborts):
    server = serve()
    answer = server.http.post("/pause_generation", json=body)
    assert (answer.status_code, answer.json()) == (200, {"paused": True, "live": 0})
    assert server.http.post("/continue_generation", json=body).json() == {"paused": False, "live": 0}
    assert (server.engine.aborted, server.engine.pauses) == (aborts, [True, False])


@pytest.mark.parametrize("body", [{"mode": "later"}, {"mode": None}, {"mode": ["abort"]}, []])
def test_a_wrong_pause_is_400_and_changes_nothing(serve, body):
    server = serve()
    assert server.http.post("/pause_generation", json=body).status_code == 400
    assert (server.engine.aborted, server.engine.pauses) == ([], [])


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_a_dead_engine_cannot_be_paused(serve, path):
    server = serve(dead="scheduler: boom")
    answer = server.http.post(path)
    assert answer.status_code == 503 and "scheduler" in answer.json()["error"]["message"]
    assert server.engine.pauses == []


# ---------------------------------------------------------------- refusals are told to the other half


@pytest.mark.parametrize("rooms", [7, [7, 8]])
def test_the_rooms_of_a_wrong_body_are_refused(serve, rooms):
    server = serve("prefill")
    many = len(rooms) if isinstance(rooms, list) else 1
    body = {"input_ids": [[1]] * many, "bootstrap_host": "h", "bootstrap_room": rooms}
    assert server.post("/generate", {**body, "sampling_params": {"top_p": 7}}).status_code == 400
    assert server.engine.refused_rooms == (rooms if isinstance(rooms, list) else [rooms])


@pytest.mark.parametrize("room", [None, "7", -1, 1 << 63, True, 7.0])
def test_what_is_no_room_is_not_refused(serve, room):
    server = serve("prefill")
    assert (
        server.post("/generate", {"text": "x", "bootstrap_host": "h", "bootstrap_room": room}).status_code
        == 400
    )
    assert server.engine.refused_rooms == []
