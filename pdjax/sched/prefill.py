"""P's half: a prompt waits for budget, is prefilled, its KV is offered, and the request ends with its first token.

Must never prefill before the budget is reserved (S17), never let one prompt overtake another, and never keep a
page after ``send``: the gather has copied it (protocol §6).
"""

from __future__ import annotations

from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import packed_bytes, pages_for
from pdjax.core.wire import FirstToken
from pdjax.engine.base import KVEvent, KVReleased, KVWanted
from pdjax.engine.ports import Sampled
from pdjax.sched.batch import Fifo, Seq
from pdjax.sched.disaggregation import RoomTable
from pdjax.sched.request import Finish, Output, Request
from pdjax.sched.scheduler import Scheduler, failure_of


class SchedulerDisaggregationPrefillMixin(RoomTable):
    """submit → (gated: D's hello) → budget (FIFO, the head waits) → pages → prefill → send → final Output (protocol §4)."""

    def _init_disaggregation(self) -> None:
        self._init_rooms()
        self.gate = Fifo(
            "gate", waiting=True
        )  # gated: who waits for a D holds up nobody whose D is there (V9)
        self.budget_queue = Fifo("budget_queue", waiting=True)
        self._try_budget = False  # the head has not been told no since budget came back or the head changed

    def _queues(self) -> tuple[Fifo, ...]:
        return (self.gate, self.budget_queue, *super()._queues())

    def step(self) -> bool:
        return self._event_loop_prefill_disagg()

    def _event_loop_prefill_disagg(self) -> bool:
        """One turn of P's loop (RFC-2 §5.4). It decodes nothing: a request ends with its first token."""
        worked = self.host_work()
        return self.device_work() or worked

    def host_work(self) -> bool:
        worked = self._take_events()
        worked |= self._drain_inbox()
        worked |= self._reserve_budget()
        worked |= self._read_prefill()
        worked |= self._admit()
        worked |= self._answer_flushes()
        return worked

    def _pages_needed(self, n_prompt: int, max_outputs: int) -> int:
        return pages_for(n_prompt, self.runner.page_size)

    # ------------------------------------------------------------ intake and budget

    def _accept(self, seq: Seq) -> None:
        self._create_send_queue(seq)

    def _create_send_queue(self, seq: Seq) -> None:
        """The request's sender; then it stands in the queue for budget, or before it until its D has come."""
        if not self._enter_room(seq):
            return
        try:
            seq.sender = self.manager.create_sender(seq.req.room or 0)
            seq.kv_bytes = packed_bytes(self.runner.pools, self._pages_needed(seq.n_prompt, seq.max_outputs))
        except Exception as error:
            self._fail(seq, error)
            return
        if seq.sender.wanted():
            self._queue_for_budget(seq)
        else:
            self._move(seq, self.gate)

    def _queue_for_budget(self, seq: Seq) -> None:
        self._move(seq, self.budget_queue)
        self._try_budget = True

    def _reserve_budget(self) -> bool:
        """Ask for the head's bytes, and for the next one's once it has them.

        A refused head is asked again only when bytes came back, a request came, or the head changed.
        """
        worked = False
        while self._try_budget and (seq := self.budget_queue.head()) is not None:
            try:
                assert seq.sender is not None
                if seq.sender.admit(seq.kv_bytes):
                    self._move(seq, self.waiting)
                elif seq.sender.poll() == KVPoll.Failed:
                    self._close(seq, Output(failure=failure_of(seq.sender.failure_exception())))
                else:
                    self._try_budget = False
                    break
            except Exception as error:
                self._fail(seq, error)
            worked = True
        return worked

    def _handle_event(self, event: KVEvent) -> None:
        if isinstance(event, KVReleased):
            self._try_budget = True
        elif isinstance(event, KVWanted):
            seq = self._rooms.get(event.room)
            if seq is not None and seq.queue is self.gate:  # else it has met its D before it was taken in
                self._queue_for_budget(seq)
        else:
            super()._handle_event(event)

    # ------------------------------------------------------------ the hand-off and the end

    def _handle_launched_prefill(self, seq: Seq) -> None:
        """It keeps its place until it is read: the next prompt's steps would delay the gather of this one's pages."""

    def _handle_completed_prefill(self, seq: Seq, sampled: Sampled) -> None:
        """The prompt's KV is complete: offer it with the first token, free the pages, end the request here."""
        req, times = seq.req, seq.req.times
        first = FirstToken(
            token=sampled.token,
            logprob=sampled.logprob,
            top=sampled.top,
            cached_tokens=req.cached_tokens,
            queue_s=(times.scheduled or times.arrived) - times.arrived,
            prefill_s=(times.prefilled or 0.0) - (times.scheduled or 0.0),
        )
        assert seq.sender is not None
        try:
            finish = seq.take(first.token, self.config.eos_ids)
            sent = seq.sender.send(req.pages, first)
        except Exception as error:
            self._fail(seq, error)
            return
        if not sent:  # the room ended meanwhile; its KVEnded will find nobody
            self._close(seq, Output(failure=failure_of(seq.sender.failure_exception())))
            return
        self.counts["output_tokens"] += 1
        times.first_token = self.clock()
        # P's share of the output is one token.
        last = finish or Finish("length")
        self._close(seq, Output((first.token,), (sampled.logprob,), (sampled.top,), tuple(seq.scored), last))

    def _close(self, seq: Seq, output: Output) -> None:
        self._try_budget |= seq is self.budget_queue.head()  # the next one may need fewer bytes
        super()._close(seq, output)

    def _end_room(self, seq: Seq, reason: str) -> None:
        if seq.sender is not None:
            seq.sender.abort(reason)

    def _abort_hand_offs(self, rid: str | None, reason: str) -> int:
        """P's answer is out when its KV is offered: whoever aborts it then still means the whole request."""
        live = self.manager.live_rooms(rid)
        # Not what is claimed and not yet taken in: a router's retry has the rid of what is aborted (facts/router §0.6).
        rooms = sorted(r for r, poll in live.items() if poll == KVPoll.Transferring and r not in self._rooms)
        for room in rooms:
            self.manager.create_sender(room).abort(reason)
        return len(rooms)

    def _abort_claim(self, req: Request, room: int, reason: str) -> None:
        self.manager.create_sender(room).abort(reason)


class PrefillScheduler(SchedulerDisaggregationPrefillMixin, Scheduler):
    """The scheduler of ``--disaggregation-mode prefill``."""
