"""The protocol mistakes that public incidents are made of, written out. Must never differ from the program in more than its name says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.mutate.patches import Mutant, attribute, rows_replaced, rows_where, swap, table_entry


def _freed_at_kv_ready(row: t.Row) -> t.Row:
    if row.role == t.SENDER and row.event == "kv_ready":
        return dataclasses.replace(row, effects=(*row.effects, "free_budget"))
    return row


def mistakes() -> list[Mutant]:
    """The protocol mistakes that public incidents are made of."""
    from pdjax.core import link
    from pdjax.core.receiver import ReceiverRoom, ReceiverSide
    from pdjax.core.room import Room
    from pdjax.core.sender import SenderRoom
    from pdjax.engine.driver import Driver
    from pdjax.sched.decode import SchedulerDisaggregationDecodeMixin as D

    def no_epoch_check() -> contextlib.AbstractContextManager[None]:
        judge = link.Link.judge

        def trusting(self: link.Link, frame: Any, my_epoch: int, now: float, life_s: float) -> str:
            verdict = judge(self, frame, my_epoch, now, life_s)
            return link.OK if verdict in (link.OLD_EPOCH, link.TOO_OLD) else verdict

        return attribute(link.Link, "judge", trusting)

    def no_attempt_check() -> contextlib.AbstractContextManager[None]:
        return attribute(ReceiverSide, "_of_another_attempt", staticmethod(lambda record, ev: False))

    def count_instead_of_set() -> contextlib.AbstractContextManager[None]:
        done = Driver._pull_done

        def counted(self: Any, room: int, event: Any, start: Any) -> None:
            errors = (None,) * len(event.errors)
            arrays = tuple(
                a if a is not None else _like(p) for a, p in zip(event.arrays, start.parts, strict=True)
            )
            done(self, room, dataclasses.replace(event, errors=errors, arrays=arrays), start)

        return attribute(Driver, "_pull_done", counted)

    def page_queue_by_intake() -> contextlib.AbstractContextManager[None]:
        take_in = D._page_head

        def by_serial(self: Any, now_s: float) -> Any:
            first = min(self.page_queue, key=lambda seq: seq.serial, default=None)
            if first is not None and first is not self.page_queue.head():
                others = [s for s in self.page_queue if s is not first]
                for seq in others:
                    self.page_queue.remove(seq)
                    self.page_queue.push(seq)
            return take_in(self, now_s)

        return attribute(D, "_page_head", by_serial)

    def abort_said_once() -> contextlib.AbstractContextManager[None]:
        def once(self: Any, ev: Any, now: float) -> Any:
            self.notices = {k: n for k, n in self.notices.items() if n.kind != "abort"}
            return self._arm_notice()

        return table_entry(ReceiverRoom, "_effects", "repeat_notice", once)

    def tombstone_forgotten() -> contextlib.AbstractContextManager[None]:
        def bury(self: Any, ev: Any, now: float) -> Any:
            for kind in ("request", "bootstrap", "lease", "transfer", "hello"):
                self.timers.pop(kind, None)
            return self._arm("tombstone", now, 0.05)

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            of_p, of_d = (table_entry(side, "_effects", "bury", bury) for side in (SenderRoom, ReceiverRoom))
            with of_p, of_d:
                yield

        return both()

    def done_before_scatter() -> contextlib.AbstractContextManager[None]:
        rows = [
            dataclasses.replace(r, effects=("deliver", "notice_done"))
            if (r.role, r.event) == (t.RECEIVER, "landed")
            else r
            for r in t.ROWS
        ]
        return rows_replaced(rows)

    def quiet_always() -> contextlib.AbstractContextManager[None]:
        abort = ReceiverRoom._abort

        def said(self: Any, uuid: int) -> Any:
            import msgspec

            return msgspec.structs.replace(abort(self, uuid), quiet=True)

        return attribute(ReceiverRoom, "_abort", said)

    def lease_not_renewed() -> contextlib.AbstractContextManager[None]:
        hello = ReceiverRoom._effects["say_hello"]

        def mute(self: Any, ev: Any, now: float) -> Any:
            if self.bound and self.state == t.LETTERS["W"]:
                return self._arm("hello", now, self.settings.renew_s)
            return hello(self, ev, now)

        return table_entry(ReceiverRoom, "_effects", "say_hello", mute)

    sender_t = (t.SENDER, "T")
    found = [
        Mutant("free on send", "P's budget is free once the KV is offered", rows_where(_freed_at_kv_ready)),
        Mutant("no epoch check", "messages of an older life and of any age act", no_epoch_check),
        Mutant("no attempt check", "D's record takes messages of another attempt", no_attempt_check),
        Mutant("done before scatter", "D says done when the parts have landed", done_before_scatter),
        Mutant(
            "release on abort while landing",
            "P frees the bytes on an abort that is not quiet",
            swap("to_limbo", "free_budget", lambda r: (r.role, r.states) == sender_t and r.event == "abort"),
        ),
        Mutant(
            "lease not renewed while queued", "D says no hello while it waits for pages", lease_not_renewed
        ),
        Mutant("tombstone forgotten", "an ended room is forgotten at once", tombstone_forgotten),
        Mutant(
            "count instead of set", "D counts parts that have ended, right or wrong", count_instead_of_set
        ),
        Mutant("budget freed without quiet", "P believes every abort to be quiet", quiet_always),
        Mutant(
            "page queue by intake", "D gives pages in the order of legs, not of ready", page_queue_by_intake
        ),
        Mutant("abort said once", "D's abort is not repeated", abort_said_once),
        Mutant(
            "answer to an echo",
            "D answers failed(echo 1) with its abort",
            rows_where(
                lambda r: (
                    dataclasses.replace(r, effects=("notice_again",))
                    if (r.role, r.states, r.event) == (t.RECEIVER, "F", "failed") and "noticed" in r.when
                    else r
                )
            ),
        ),
        Mutant(
            "non-quiet abort answered at once",
            "F answers every failed(echo 0) with its abort (docs/decisions/0002)",
            rows_where(
                lambda r: (
                    dataclasses.replace(r, effects=("notice_again",))
                    if (r.role, r.states, r.event, r.when) == (t.RECEIVER, "F", "failed", ("!echo",))
                    else r
                )
            ),
        ),
        Mutant(
            "no failed push",
            "P tells nobody that it has failed",
            swap("say_failed", "", lambda r: r.role == t.SENDER and r.event != "hello"),
        ),
        Mutant(
            "limbo without a timer",
            "bytes in limbo wait for D's word for ever",
            lambda: table_entry(SenderRoom, "_effects", "to_limbo", _limbo_without_timer),
        ),
        Mutant(
            "pages at intake",
            "D takes pages when the request comes, not when the KV is ready",
            lambda: attribute(D, "_create_recv_queue", _pages_at_intake(D._create_recv_queue)),
        ),
        Mutant(
            "a deadline of the peer's clock",
            "a timer is set from a time that the peer's clock gave",
            lambda: attribute(Room, "_arm", _foreign_arm(Room._arm)),
        ),
    ]
    return [dataclasses.replace(m, shown_by=SHOWN_BY.get(m.name, "")) for m in found]


SHOWN_BY = {
    "answer to an echo": "B34-client-leaves-during-the-transfer",
    "non-quiet abort answered at once": "row-the-end-of-a-hanging-pull",
    "free on send": "B02-failure-notice",
    "no epoch check": "row-a-word-of-an-old-life",
    "no attempt check": "row-old-messages-under-a-pull",
    "done before scatter": "row-landed-during-a-long-step",
    "release on abort while landing": "B34-client-leaves-during-the-transfer",
    "lease not renewed while queued": "B53-d-queues-longer-than-the-lease",
    "tombstone forgotten": "B96-decode-leg-lost",
    "count instead of set": "B93-shorter-than-stated",
    "budget freed without quiet": "B34-client-leaves-during-the-transfer",
    "page queue by intake": "row-ready-in-another-order-than-the-legs",
    "abort said once": "row-an-abort-is-lost",
    "no failed push": "row-p-fails-between-two-hellos",
    "limbo without a timer": "row-d-dies-and-stays-away",
    "pages at intake": "B97-slow-prefill",
    "a deadline of the peer's clock": "B02-failure-notice",
}


def _like(part: Any) -> Any:
    import numpy as np

    return np.zeros(part.shape, part.dtype)


def _limbo_without_timer(self: Any, ev: Any, now: float) -> None:
    from pdjax.core.sender import Limbo, LimboKey

    key = LimboKey(self.room, self.peer, self.attempt)
    self.side.limbo[key] = Limbo(self.peer_epoch, self.uuid, self.charged_bytes, float("inf"))
    self.charged_bytes = 0


def _pages_at_intake(original: Callable[..., None]) -> Callable[..., None]:
    def create(self: Any, seq: Any) -> None:
        original(self, seq)
        if seq.queue is self.bootstrapping and not seq.has_pages:
            self._take_pages(seq)

    return create


def _foreign_arm(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, kind, now, delay_s: original(
        self, kind, now + (1e6 if kind == "lease" else 0.0), delay_s
    )
