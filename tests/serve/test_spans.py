"""Spans of requests, seen by an exporter in memory and by a collector that speaks OTLP."""

import subprocess
import sys
import threading
import time
import types

import pytest
from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from serve_fakes import failed, text_outputs

from pdjax.engine.bootstrap.httpd import HttpThread, bind
from pdjax.sched.request import Output, PhaseTimes
from pdjax.serve import cli, spans
from pdjax.serve.spans import Ended, Spans, make_spans, room_ids, trace_of_room

SECRET = "the client's own words"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"text": SECRET, "rid": "r1", "bootstrap_host": "h", "bootstrap_room": 77}


def in_memory(role):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=room_ids())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider, role=role, model="m"), exporter


@pytest.fixture
def traced(serve):
    def start(role, **more):
        server = serve(role, **more)
        server.desk.spans, exporter = in_memory(role)
        return server, exporter

    return start


def timed(times):
    def script(request):
        for name, value in times.items():
            setattr(request.times, name, value)
        return text_outputs("hi")

    return script


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_both_halves_of_a_room_are_one_trace(traced):
    for role in ("prefill", "decode"):
        server, exporter = traced(role)
        assert server.post("/generate", BODY).status_code == 200
        (span,) = exporter.get_finished_spans()
        assert span.name == f"{role} request" and span.parent is None
        assert span.context.trace_id == trace_of_room(77)
        assert span.attributes["pd.room"] == "77" and span.attributes["pd.role"] == role
        server.post("/generate", {**BODY, "bootstrap_room": 78})
        assert exporter.get_finished_spans()[1].context.trace_id == trace_of_room(78)
    assert trace_of_room(77) != trace_of_room(78)


def test_a_request_without_a_room_has_a_trace_of_its_own(traced):
    server, exporter = traced("null")
    for _ in range(2):
        server.post("/generate", {"text": "x"})
    first, second = exporter.get_finished_spans()
    assert first.name == "request" and first.context.trace_id != second.context.trace_id


def test_the_clients_trace_is_joined(traced):
    server, exporter = traced("decode")
    server.http.post("/generate", json=BODY, headers={"traceparent": PARENT})
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    server.post("/generate", BODY)
    assert exporter.get_finished_spans()[1].context.trace_id == trace_of_room(77)


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-00", "ff" * 40])
def test_a_broken_traceparent_is_as_none(traced, header):
    server, exporter = traced("decode")
    assert server.http.post("/generate", json=BODY, headers={"traceparent": header}).status_code == 200
    assert by_name(exporter)["decode request"].context.trace_id == trace_of_room(77)


def test_a_trace_that_the_client_does_not_sample_is_not_recorded(traced):
    server, exporter = traced("decode")
    server.http.post("/generate", json=BODY, headers={"traceparent": PARENT[:-1] + "0"})
    assert exporter.get_finished_spans() == ()


def test_each_phase_that_happened_is_a_span_inside(traced):
    t0 = 1000.0
    times = {
        "arrived": t0,
        "ready": t0 + 2,
        "scheduled": t0 + 2.25,
        "landed": t0 + 3,
        "scattered": t0 + 3.5,
        "first_token": t0 + 3.5,
        "finished": t0 + 5,
        "peer_queue_s": 0.5,
    }
    server, exporter = traced("decode", script=timed(times))
    server.post("/generate", BODY)
    found = by_name(exporter)
    root = found.pop("decode request")
    took = {name: round((s.end_time - s.start_time) / 1e9, 3) for name, s in found.items()}
    assert took == {
        "ready": 2,
        "page_wait": 0.25,
        "pull": 0.75,
        "scatter": 0.5,
        "first_token": 3.5,
        "decode": 1.5,
    }
    assert all(s.parent.span_id == root.context.span_id for s in found.values())
    assert all(s.context.trace_id == root.context.trace_id for s in found.values())
    assert root.attributes["pd.peer_queue_s"] == 0.5
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_wall_times_are_those_of_the_monotonic_ones():
    made, exporter = in_memory("null")
    now = time.monotonic()
    before = time.time()
    made.ended(Ended("r", None, now - 2, now, PhaseTimes(), 1, 0, 1, "stop"))
    (span,) = exporter.get_finished_spans()
    assert abs(span.end_time / 1e9 - before) < 1 and span.end_time - span.start_time == pytest.approx(
        2e9, abs=10
    )


def test_a_failure_and_a_client_that_left_are_told(traced):
    server, exporter = traced("decode", script=lambda request: failed(503, "peer_lost", "it died"))
    server.post("/generate", BODY)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code == StatusCode.ERROR and span.status.description == "it died"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("peer_lost",)

    server, exporter = traced("null", script=lambda request: [Output((104,)), ..., Output((105,))])
    with server.http.stream("POST", "/generate", json={"text": "x", "stream": True}):
        server.engine.wait(lambda: server.engine.gated() == 1)
    server.engine.wait(lambda: server.engine.aborted)
    deadline = threading.Event()
    for _ in range(600):
        if exporter.get_finished_spans():
            break
        deadline.wait(0.05)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abandoned",)
    assert span.status.status_code == StatusCode.UNSET


def test_no_span_holds_a_prompt(traced):
    server, exporter = traced("prefill")
    server.post("/generate", BODY)
    text = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert SECRET not in text and str(list(SECRET.encode()))[1:-1] not in text


def test_a_collector_gets_them():
    got, arrived = [], threading.Event()
    app = FastAPI()

    @app.post("/v1/traces")
    async def traces(request: Request):
        got.append(ExportTraceServiceRequest.FromString(await request.body()))
        arrived.set()
        return Response(status_code=200)

    collector = HttpThread(app, bind("127.0.0.1", 0), "collector")
    collector.start()
    made = make_spans(f"{collector.url}/", role="decode", instance_id="d0", model="m")
    made.ended(Ended("r1", 77, 1.0, 2.0, PhaseTimes(arrived=1.0, ready=1.5), 3, 0, 4, "length"))
    made.close()
    assert arrived.wait(30)
    collector.stop()
    (resource,) = got[0].resource_spans
    about = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"], about["pd.role"]) == (
        "pdjax",
        "d0",
        "decode",
    )
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode request", "ready"]


def test_without_the_extra_the_flag_is_refused_in_one_line(monkeypatch, capsys):
    def run_server(args):
        spans.check_extra()
        return 0

    monkeypatch.setitem(sys.modules, "pdjax.serve.process", types.SimpleNamespace(run_server=run_server))
    argv = ["serve", "--model", "m", "--otlp-endpoint", "http://127.0.0.1:4318"]
    assert cli.run(argv) == 0
    monkeypatch.setattr(spans, "NEEDS", ("opentelemetry_is_not_here.sdk",))
    assert cli.run(argv) == 2
    assert capsys.readouterr().err == (
        "pdjax: --otlp-endpoint needs the extra: pip install 'pdjax[otel]', or drop the flag\n"
    )


def test_a_server_without_spans_does_not_import_opentelemetry():
    # FastAPI imports the bare API where it is installed; the extra is the SDK.
    code = "import sys, pdjax.serve.app; print('opentelemetry.sdk' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert out.stdout == "False\n"
