"""D's half: a request waits for P's KV, takes pages, pulls, scatters, and decodes from P's first token on.

Must never decode before commit (S2), never scatter into pages that the attempt does not own any more (S1,
incident B26), never compute the first token again, and never let a request that waits for its P hold up others.

Fairness (V9): requests wait for ``ready`` in no order at all, so a P that never answers delays nobody. Only the page
queue is FIFO, by the order of the ready events: its head may wait for pages or for its peer to answer again, and the
others wait behind it, at most for the peer silence timer, after which the room ends and leaves the queue.
"""

from __future__ import annotations

from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import pages_for
from pdjax.engine.base import KVEvent, KVLanded, KVReady, Packed
from pdjax.sched.batch import Fifo, Seq
from pdjax.sched.recompute import Recomputing
from pdjax.sched.request import Request
from pdjax.sched.scheduler import Scheduler, failure_of

RECEIVE_RETRY_S = 0.02  # gap between two tries of a receive() that said "not now", when nothing else happens


class SchedulerDisaggregationDecodeMixin(Recomputing):
    """submit → ready → pages (FIFO by ready) → pull → landed → scatter, commit → decode (protocol §5).

    A hand-off that fails because its P is lost may go on without one (recompute.py).
    """

    def _init_disaggregation(self) -> None:
        self._init_rooms()
        self.counts["late_landings"] = 0  # KV that came for an attempt whose pages are gone
        self.counts["receive_refusals"] = 0
        self.bootstrapping = Fifo("bootstrapping", waiting=True)
        self.page_queue = Fifo("page_queue", waiting=True)
        self.in_flight = Fifo("in_flight", waiting=False)
        self._held: list[Seq] = []  # landed in a pause: the first token is said after it
        self._init_recompute()

    def _queues(self) -> tuple[Fifo, ...]:
        lost = (self.recompute, self.prefilling) if self.config.recompute else ()
        return (self.bootstrapping, self.page_queue, self.in_flight, *lost, self.running)

    def idle(self) -> bool:
        return super().idle() and self._page_head(self.clock()) is None and not self._may_admit()

    def next_wake(self) -> float | None:
        head, times = self.page_queue.head(), [super().next_wake(), self._next_late_s()]
        if head is not None and head.retry_at > self.clock():
            times.append(head.retry_at)
        return min((at for at in times if at is not None), default=None)

    def step(self) -> bool:
        return self._event_loop_decode_disagg()

    def _event_loop_decode_disagg(self) -> bool:
        """One turn of D's loop (RFC-2 §5.4). It prefills nothing but lost prompts: what has landed joins the next launch."""
        worked = self.host_work()
        return self.device_work() or worked

    def host_work(self) -> bool:
        worked = self._take_events()
        worked |= self._drain_inbox()
        worked |= self._admit_recompute()
        worked |= self._start_pulls()
        worked |= self._answer_flushes()
        return worked

    # ------------------------------------------------------------ intake

    def _accept(self, seq: Seq) -> None:
        self._create_recv_queue(seq)

    def _create_recv_queue(self, seq: Seq) -> None:
        """The request's receiver; then it waits for P's ready."""
        if not self._enter_room(seq):
            return
        try:
            receiver = self.manager.create_receiver(seq.req.room or 0, bootstrap_addr(seq.req))
            seq.receiver, seq.token = receiver, receiver.token
            failed = receiver.poll() == KVPoll.Failed
        except Exception as error:
            self._fail(seq, error)
            return
        if failed:  # it ended between claim and here: its KVEnded found nobody
            self._hand_off_failed(seq, failure_of(receiver.failure_exception()))
        else:
            self._move(seq, self.bootstrapping)

    def _handle_event(self, event: KVEvent) -> None:
        if (head := self.page_queue.head()) is not None:
            head.retry_at = 0.0  # something happened: "not now" may be over
        if isinstance(event, KVReady):
            seq = self._rooms.get(event.room)
            if seq is None or seq.queue is not self.bootstrapping:
                self.counts["stray_events"] += 1
                return
            seq.first = event.first
            seq.req.times.ready = self.clock()
            seq.req.times.peer_queue_s = event.first.queue_s
            seq.req.times.peer_prefill_s = event.first.prefill_s
            if event.n_tokens == seq.n_prompt:
                self._move(seq, self.page_queue)
            else:  # the manager compares manifests (S7); this is the other half of the assertion
                message = f"P offers the KV of {event.n_tokens} tokens, the prompt has {seq.n_prompt}"
                self._fail(seq, PDError(message, reason="manifest_mismatch", room=event.room))
        elif isinstance(event, KVLanded):
            self._handle_landed(event)
        else:
            super()._handle_event(event)

    # ------------------------------------------------------------ pages and pull

    def _page_head(self, now_s: float) -> Seq | None:
        """The head of the page queue if a row, pages and time allow its pull now."""
        seq = self.page_queue.head()
        if seq is None or seq.retry_at > now_s:
            return None
        if not self._has_row() or self._is_held_up():
            return None
        need = self._pages_needed(seq.n_prompt, seq.max_outputs)
        return seq if need <= self.cache.available_pages() else None

    def _start_pulls(self) -> bool:
        worked = False
        while (seq := self._page_head(self.clock())) is not None:
            try:
                started = self._start_pull(seq)
            except Exception as error:
                self._fail(seq, error)
                started = True
            if not started:
                break
            worked = True
        return worked

    def _start_pull(self, seq: Seq) -> bool:
        """Take pages and begin. False: not now, the head keeps its place."""
        assert seq.receiver is not None
        if not self._take_pages(seq):
            return False
        if seq.receiver.receive(self._kv_pages(seq)):
            self._move(seq, self.in_flight)
            return True
        self.counts["receive_refusals"] += 1
        self._give_back_pages(seq)
        seq.req.times.scheduled = None
        if seq.receiver.poll() == KVPoll.WaitingForInput:
            seq.retry_at = self.clock() + RECEIVE_RETRY_S
            return False
        self._hand_off_failed(seq, failure_of(seq.receiver.failure_exception()))
        return True

    def _kv_pages(self, seq: Seq) -> list[int]:
        """The pages that the prompt's KV goes to; the rest of the table is for the outputs."""
        return seq.req.pages[: pages_for(seq.n_prompt, self.runner.page_size)]

    # ------------------------------------------------------------ landing

    def _handle_landed(self, event: KVLanded) -> None:
        seq = self._rooms.get(event.room)
        if (
            seq is None
            or seq.queue is not self.in_flight
            or seq.token != event.token
            or not self.cache.owns(event.token, self._kv_pages(seq))
        ):
            self.counts["late_landings"] += 1
            return
        seq.req.times.landed = self.clock()
        try:
            self._handle_recv_complete(seq, event.packed)
        except Exception as error:
            self._fail(seq, error)

    def _handle_recv_complete(self, seq: Seq, packed: Packed) -> None:
        """Scatter, commit, and only then believe: P's first token is this request's first output."""
        assert seq.receiver is not None and seq.first is not None
        self.runner.scatter(self._kv_pages(seq), packed)
        seq.req.times.scattered = self.clock()
        if not seq.receiver.commit():
            self._hand_off_failed(seq, failure_of(seq.receiver.failure_exception()))
            return
        seq.committed = True
        seq.computed = seq.n_prompt
        seq.req.cached_tokens = seq.first.cached_tokens
        # Success stands whatever P says later, and the room may be used again (protocol §5).
        self._leave_room(seq)
        if self.paused:
            self._held.append(seq)
        else:
            self._say_first(seq)

    def _say_first(self, seq: Seq) -> None:
        assert seq.first is not None
        self._emit_token(seq, seq.first.token, seq.first.logprob, seq.first.top)

    def _set_paused(self, paused: bool) -> None:
        super()._set_paused(paused)
        if not paused:
            held, self._held = self._held, []
            for seq in held:
                if not seq.closed:  # an abort may have come meanwhile
                    self._say_first(seq)

    def _end_room(self, seq: Seq, reason: str) -> None:
        if seq.receiver is not None and not seq.committed:
            seq.receiver.abort(reason)
        elif seq.queue is not None:
            # No row says that decoding ended early: without this line a recorded run would seem to have gone on.
            tokens, token = len(seq.req.output_ids), str(seq.token)
            self.manager.note("cut_short", seq.req.room, token=token, reason=reason, tokens=tokens)

    def _abort_claim(self, req: Request, room: int, reason: str) -> None:
        self.manager.create_receiver(room, bootstrap_addr(req)).abort(reason)


class DecodeScheduler(SchedulerDisaggregationDecodeMixin, Scheduler):
    """The scheduler of ``--disaggregation-mode decode``."""


def bootstrap_addr(req: Request) -> str:
    """The registry that the router named: "host:port", or "host" when it gave no port (the manager's own then)."""
    return req.bootstrap_host if req.bootstrap_port is None else f"{req.bootstrap_host}:{req.bootstrap_port}"
