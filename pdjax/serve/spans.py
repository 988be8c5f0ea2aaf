"""OpenTelemetry spans: one for each request, with one inside it for each of its phases on this node.

Both halves of a request share its room, so the room makes the trace: P's and D's spans meet without a header that
no router forwards (facts/router §2). A client that sends a W3C traceparent gets them into its own trace instead.
Made when a request has ended, from the times that were taken anyway. Must never hold a prompt or a token, and must
never be imported where the extra is not installed: ``make_spans`` does it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdjax.core.errors import ConfigError
from pdjax.sched.request import PhaseTimes
from pdjax.serve.phases import phase_intervals

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE = "pdjax"
NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
FLUSH_MS = 2000  # at the end of the process


@dataclass(frozen=True)
class Ended:
    """A request that is over. started, ended: this node's monotonic seconds. outcome: a finish type, a failure's
    reason, or "abandoned". traceparent: as the client sent it."""

    rid: str
    room: int | None
    started: float
    ended: float
    times: PhaseTimes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: str
    failed: bool = False
    message: str = ""
    traceparent: str | None = None


def trace_of_room(room: int) -> int:
    """The 128-bit trace id that both halves of a request give themselves; never 0."""
    return int.from_bytes(hashlib.blake2b(b"pdjax room %d" % room, digest_size=16).digest()) or 1


def make_spans(endpoint: str, *, role: str, instance_id: str, model: str) -> Spans:
    """Spans that go to an OTLP collector over HTTP. Raises ConfigError when the extra is missing."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": SERVICE, "service.instance.id": instance_id, "pd.role": role})
    provider = TracerProvider(resource=resource, id_generator=room_ids())
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))
    )
    return Spans(provider, role=role, model=model)


def check_extra() -> None:
    """Raises ConfigError when spans were asked for and cannot be made."""
    for name in NEEDS:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError("--otlp-endpoint needs the extra: pip install 'pdjax[otel]', or drop the flag")


def room_ids() -> Any:
    """An id generator whose next trace id can be chosen."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class RoomIds(RandomIdGenerator):
        next_trace_id: int | None = None

        def generate_trace_id(self) -> int:
            chosen, self.next_trace_id = self.next_trace_id, None
            return super().generate_trace_id() if chosen is None else chosen

    return RoomIds()


class Spans:
    """Event loop only. provider: with ``room_ids`` as its id generator."""

    def __init__(self, provider: TracerProvider, *, role: str, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._role, self._model = provider, role, model
        self._ids: Any = provider.id_generator
        self._tracer = provider.get_tracer("pdjax")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, one: Ended) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset_ns = time.time_ns() - int(time.monotonic() * 1e9)

        def wall(at: float) -> int:
            return offset_ns + int(at * 1e9)

        parent = Context()
        if one.traceparent is not None:
            parent = self._propagator.extract({"traceparent": one.traceparent}, context=parent)
        # Taken when the span has no parent; the next request sets its own.
        self._ids.next_trace_id = None if one.room is None else trace_of_room(one.room)
        span = self._tracer.start_span(
            f"{self._role} request" if self._role != "null" else "request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=wall(one.started),
            attributes=self._attributes(one),
        )
        if one.failed:
            span.set_status(Status(StatusCode.ERROR, one.message))
        within = set_span_in_context(span, parent)
        for name, (start, end) in phase_intervals(one.times).items():
            self._tracer.start_span(name, context=within, start_time=wall(start)).end(wall(end))
        span.end(wall(one.ended))

    def _attributes(self, one: Ended) -> dict[str, Any]:
        """OpenTelemetry's names for what every model server has, pd. for the rest."""
        told = {
            "pd.room": None if one.room is None else str(one.room),
            "pd.peer_queue_s": one.times.peer_queue_s,
            "pd.peer_prefill_s": one.times.peer_prefill_s,
        }
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": one.rid,
            "gen_ai.usage.input_tokens": one.prompt_tokens,
            "gen_ai.usage.output_tokens": one.completion_tokens,
            "gen_ai.response.finish_reasons": [one.outcome],
            "pd.role": self._role,
            "pd.cached_tokens": one.cached_tokens,
            **{name: value for name, value in told.items() if value is not None},
        }

    def close(self) -> None:
        """Send what is left; waits at most FLUSH_MS."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()
