"""Continuous batching over a paged pool: the scheduler of a server without PD, and the base of P's and D's.

``step()`` is one turn of the loop: what the host has to do, then the device steps (steps.py); whoever owns the loop
calls it while it returns True and sleeps until ``wake`` or ``next_wake()`` when it returns False. Must never import JAX,
read a clock of its own, start a thread, sleep or draw a random number, and a step must never look at every waiting
request.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import pages_for
from pdjax.core.reasons import explain
from pdjax.engine.base import BaseKVManager
from pdjax.engine.ports import Clock, Runner, Sampled
from pdjax.sched.batch import Fifo, Seq
from pdjax.sched.chunk_cache import BasePrefixCache
from pdjax.sched.config import SchedulerConfig as SchedulerConfig
from pdjax.sched.flush import FlushQueue
from pdjax.sched.request import Failure, Finish, Output, Request, TopLogprobs
from pdjax.sched.steering import Steering
from pdjax.sched.steps import StepLoop

log = logging.getLogger(__name__)

# Named before the first of each happens: a reader of another thread must never see the table grow.
COUNTS = (
    "accepted",
    "refused",
    "aborts_unknown",
    "prefill_tokens",
    "cached_tokens",
    "decode_steps",
    "output_tokens",
    "surplus_tokens",  # sampled by a step that was launched before its request's end was known
    "finished_stop",
    "finished_length",
    "finished_abort",
    "failed",
    "engine_errors",
    "sink_errors",
)


class Scheduler(StepLoop):
    """submit() and abort() from any thread; everything else belongs to the one thread that calls step().

    Every request taken in gets exactly one Output with finish or failure, its last, on the scheduler's thread.
    Pages for the prompt and all its outputs are taken before its prefill; nothing is retracted (protocol §6).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Clock,
        cache: BasePrefixCache,
        manager: BaseKVManager | None = None,
        *,
        wake: Callable[[], None] | None = None,
    ) -> None:
        if config.max_running > runner.max_batch:
            raise ConfigError(
                f"max_running={config.max_running}: set it to at most {runner.max_batch}, the runner's largest batch"
            )
        self.config = config
        self.runner = runner
        self.clock = clock
        self._manager = manager
        self.wake = wake or (lambda: None)
        self.cache = cache
        self._flushes = FlushQueue()
        self.max_running = config.max_running or runner.max_batch
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.waiting = Fifo("waiting", waiting=True)  # FIFO for pages
        self.prefilling = Fifo("prefilling", waiting=False)  # at most one
        self.running = Fifo("running", waiting=False)
        self._serials = itertools.count(1)
        self._by_rid: dict[str, list[Seq]] = {}
        self._lock = threading.Lock()  # guards the two fields below, and nothing slow
        self._inbox: list[Callable[[], None]] = []
        self._queued = 0
        self._init_steps(self.max_running)
        self._init_disaggregation()

    # ------------------------------------------------------------ any thread

    def submit(self, req: Request) -> None:
        """Take a request in. Raises PDError: 400 what can never run, 503 queue_full.

        When a request with a room is refused its room is ended too, on the next step: the claim came before.
        """
        try:
            self.check(req)
            self._enqueue(req)
        except PDError as error:
            with self._lock:
                self.counts["refused"] += 1
            if req.room is not None:
                reason = error.reason
                self._post(lambda: self._refused(req, reason))
            raise
        self.wake()

    def check(self, req: Request) -> None:
        """Raises PDError with status 400 if the request could never run here, however long it waited.

        Reads limits only: an HTTP layer may ask before it claims the room.
        """
        n_prompt, sampling = len(req.prompt_ids), req.sampling
        if n_prompt < 1:
            message = "the prompt has no tokens"
        elif n_prompt >= self.config.context_length:
            message = f"the prompt has {n_prompt} tokens, the context holds {self.config.context_length} with the output"
        elif sampling.max_new_tokens < 1:
            message = f"max_new_tokens={sampling.max_new_tokens} must be at least 1"
        elif (need := self._pages_needed(n_prompt, self._max_outputs(req))) > self.cache.capacity():
            # Waiting would hold up the queue forever: no end of another request makes it fit.
            message = f"the request needs {need} pages, the pool has {self.cache.capacity()}: ask for fewer new tokens"
        else:
            return
        raise PDError(message, reason="bad_request", status=400, room=req.room)

    def abort(self, rid: str) -> None:
        """End every live request of exactly this rid (incidents B39, L13: never by prefix). Unknown: counted.

        P: also the hand-offs of requests that have had their answer and that D has not confirmed.
        """
        self._post(lambda: self._abort_rid(rid))

    def abort_request(self, req: Request) -> None:
        """End this very request, whoever shares its rid (a client's retry may)."""
        self._post(lambda: self._abort_one(req))

    def abort_all(self, reason: str = "client_abort") -> None:
        """End every request that was submitted before this call. reason: what the other halves are told."""
        self._post(lambda: self._abort_everything(reason))

    def pause(self, paused: bool, told: Callable[[], None]) -> None:
        """Launch no step until the opposite is asked for; told, on the scheduler's thread, when that holds.

        Requests come, queue and can be aborted meanwhile, and rooms keep their timers. Each keeps its pages.
        """

        def change() -> None:
            self._set_paused(paused)
            told()

        self._post(change)

    def flush_cache(self, timeout_s: float, told: Callable[[bool], None]) -> None:
        """Empty the prefix cache once no request is here; told(False), on the scheduler's thread: one still was.

        timeout_s: how long to wait for that; 0 asks once.
        """
        until_s = self.clock() + timeout_s
        self._post(lambda: self._flushes.add(until_s, told))

    def stats(self) -> dict[str, int]:
        """Requests in each queue, pages, and counts since the start. Numbers may be one step apart."""
        free, capacity = self.cache.available_pages(), self.cache.capacity()
        queues = {queue.name: len(queue) for queue in self._queues()}
        return {
            "queued": self._queued,
            "paused": int(self.paused),
            **queues,
            "free_pages": free,
            "used_pages": capacity - free,
            "cached_pages": self.cache.cached_pages,
            "evicted_pages": self.cache.evicted_pages,
            **self.counts,
        }

    def oldest_s(self) -> dict[str, float]:
        """Seconds since the head of each queue joined it, 0 for an empty one."""
        now = self.clock()
        heads = {queue.name: queue.oldest_since() for queue in self._queues()}
        return {name: 0.0 if since is None else max(now - since, 0.0) for name, since in heads.items()}

    # ------------------------------------------------------------ the loop

    def step(self) -> bool:
        """Everything that can be done now: at most one prefill chunk and one decode batch. False: nothing was."""
        worked = self.host_work()
        return self.device_work() or worked

    def host_work(self) -> bool:
        """The part of a step before its device calls; the simulator lets time pass between the two parts."""
        # Events before the inbox: a room's end is known before a new request takes the same room.
        worked = self._take_events()
        worked |= self._drain_inbox()
        worked |= self._read_prefill()
        worked |= self._admit()
        worked |= self._answer_flushes()
        return worked

    def _answer_flushes(self) -> bool:
        busy = bool(self._by_rid or self._unread)
        return bool(self._flushes) and self._flushes.answer(self.cache, busy, self.clock())

    def idle(self) -> bool:
        """A step would do nothing unless the manager has events."""
        steps = not self.paused and (self.waiting or self.prefilling or self.running)
        return not (self._inbox or self._unread or steps)

    def next_wake(self) -> float | None:
        """The time on the clock at which an idle scheduler wants a step; None: only when woken."""
        return self._flushes.next_deadline_s()

    # ------------------------------------------------------------ what PD modes change

    def _init_disaggregation(self) -> None:
        """The queues and counts of a PD mode."""

    def _queues(self) -> tuple[Fifo, ...]:
        return (self.waiting, self.prefilling, self.running)

    def _accept(self, seq: Seq) -> None:
        self._move(seq, self.waiting)

    def _take_events(self) -> bool:
        return False

    def _pages_needed(self, n_prompt: int, max_outputs: int) -> int:
        # The last output token is never written back, but its page costs nothing to own: the rule of
        # protocol §6 is prompt + max_new_tokens, and both sides count alike (incident L03).
        return pages_for(n_prompt + max_outputs, self.runner.page_size)

    def _handle_launched_prefill(self, seq: Seq) -> None:
        self._move(seq, self.running)

    def _handle_completed_prefill(self, seq: Seq, sampled: Sampled) -> None:
        self.cache.insert(seq.token, seq.req.prompt_ids)  # others need not wait for the end of this request
        self._emit_token(seq, sampled.token, sampled.logprob, sampled.top)

    def _end_room(self, seq: Seq, reason: str) -> None:
        """Tell the peer that this request ends on our side."""

    def _refused(self, req: Request, reason: str) -> None:
        """End the room of a request that submit refused. Without PD a room means nothing."""

    # ------------------------------------------------------------ inbox

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._inbox.append(action)
        self.wake()

    def _drain_inbox(self) -> bool:
        if not self._inbox:
            return False
        with self._lock:
            actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        return True

    def _max_outputs(self, req: Request) -> int:
        return min(req.sampling.max_new_tokens, self.config.context_length - len(req.prompt_ids))

    def _enqueue(self, req: Request) -> None:
        with self._lock:
            if self._queued >= self.config.max_queue:
                message = f"{self._queued} requests wait already: try again later"
                raise PDError(message, reason="queue_full", room=req.room)
            self._queued += 1
            if not req.times.arrived:
                req.times.arrived = self.clock()
            self._inbox.append(lambda: self._take_in(req))

    def _take_in(self, req: Request) -> None:
        serial = next(self._serials)
        steering = Steering.of(req.sampling, req.grammar, self.config.eos_ids)
        seq = Seq(serial, req, self._max_outputs(req), token=serial, steering=steering)
        self._by_rid.setdefault(req.rid, []).append(seq)
        self.counts["accepted"] += 1
        self._accept(seq)

    def _abort_rid(self, rid: str) -> None:
        seqs = list(self._by_rid.get(rid, ()))
        for seq in seqs:
            self._abort_seq(seq)
        self.counts["aborts_unknown"] += not (self._abort_hand_offs(rid, "client_abort") or seqs)

    def _abort_hand_offs(self, rid: str | None, reason: str) -> int:
        """End what goes on of requests that are closed already, of this rid or of all; how many there were."""
        return 0

    def _abort_one(self, req: Request) -> None:
        seqs = [seq for seq in self._by_rid.get(req.rid, ()) if seq.req is req]
        self.counts["aborts_unknown"] += not seqs
        for seq in seqs:
            self._abort_seq(seq)

    def _abort_everything(self, reason: str) -> None:
        for seq in [seq for seqs in self._by_rid.values() for seq in seqs]:
            self._abort_seq(seq, reason)
        self._abort_hand_offs(None, reason)

    def _abort_seq(self, seq: Seq, reason: str = "client_abort") -> None:
        try:
            self._end_room(seq, reason)
        except Exception as error:
            self._fail(seq, error)
            return
        if reason == "draining" and not seq.req.output_ids:  # nothing was said yet: another server may do it
            self._close(seq, Output(failure=Failure(503, reason, explain(reason))))
        else:
            self._close(seq, Output(finish=Finish("abort", message="aborted")))

    # ------------------------------------------------------------ admission

    def _admit(self) -> bool:
        """The head of the queue takes its pages when no other prompt is being prefilled. No overtaking."""
        seq = self.waiting.head()
        if seq is None or self.prefilling or len(self.running) >= self.max_running:
            return False
        if not self._take_pages(seq):
            return False
        self._move(seq, self.prefilling)
        return True

    def _take_pages(self, seq: Seq) -> bool:
        """All pages of seq under its token, or none."""
        acquired = self.cache.acquire(
            seq.token,
            seq.req.prompt_ids,
            self._pages_needed(seq.n_prompt, seq.max_outputs),
            max_cached_tokens=seq.req.sampling.prompt_logprobs_from,
        )
        if acquired is None:
            return False
        seq.has_pages = True
        seq.req.pages = acquired.pages
        seq.computed = seq.req.cached_tokens = acquired.cached_tokens
        self.counts["cached_tokens"] += acquired.cached_tokens
        seq.req.times.scheduled = self.clock()
        return True

    def _give_back_pages(self, seq: Seq) -> None:
        if seq.has_pages:
            seq.has_pages = False
            self.cache.release(seq.token, seq.kv_ids())
            seq.req.pages = []
            seq.computed = 0
            seq.scored = []

    # ------------------------------------------------------------ outputs and ends

    def _emit_token(self, seq: Seq, token: int, logprob: float | None, top: TopLogprobs) -> None:
        """One new output token: to the sink, and to the running batch unless it is the last."""
        req = seq.req
        try:
            finish = seq.take(token, self.config.eos_ids)
        except Exception as error:
            self._fail(seq, error)
            return
        self.counts["output_tokens"] += 1
        if req.times.first_token is None:
            req.times.first_token = self.clock()
            self._note_first_token(seq)
        prompt, seq.scored = tuple(seq.scored), []
        output = Output((token,), () if logprob is None else (logprob,), (top,), prompt, finish)
        if finish is not None:
            self._close(seq, output)
            return
        if seq.queue is not self.running:
            self._move(seq, self.running)
        self._emit(req, output)

    def _note_first_token(self, seq: Seq) -> None:
        if self._manager is not None:
            self._manager.note("first_token", seq.req.room)

    def _fail(self, seq: Seq, error: Exception) -> None:
        """What was done for this request went wrong: it ends alone (S11), its pages' content is not trusted."""
        reason = error.reason if isinstance(error, PDError) else "engine_error"
        self.counts["engine_errors"] += reason == "engine_error"
        log.error("request %s (room %s) failed", seq.req.rid, seq.req.room, exc_info=error)
        try:
            self._end_room(seq, reason)
        except Exception:
            self.counts["engine_errors"] += 1
            log.exception("request %s: its room %s did not end", seq.req.rid, seq.req.room)
        seq.computed = 0
        self._close(seq, Output(failure=failure_of(error)))

    def _close(self, seq: Seq, output: Output) -> None:
        """The only end of a request: out of its queue, last Output (S3: exactly once), pages back.

        Pages that a step under way writes are given back when it is over (StepLoop).
        """
        self._move(seq, None)
        self._free_slot(seq)
        if not seq.unread:
            self._give_back_pages(seq)
        peers = self._by_rid[seq.req.rid]
        peers.remove(seq)
        if not peers:
            del self._by_rid[seq.req.rid]
        seq.req.times.finished = self.clock()
        self.counts[
            "failed" if output.failure else f"finished_{output.finish.type if output.finish else ''}"
        ] += 1
        self._emit(seq.req, output)

    def _emit(self, req: Request, output: Output) -> None:
        try:
            req.sink(output)
        except Exception:
            # A broken client connection is that client's loss only (S11); its request runs to its end.
            self.counts["sink_errors"] += 1
            log.exception("the sink of request %s raised", req.rid)

    def _move(self, seq: Seq, queue: Fifo | None) -> None:
        if seq.queue is not None:
            seq.queue.remove(seq)
        seq.queue, seq.since = queue, self.clock()
        if queue is not None:
            queue.push(seq)
        if seq.queued and (queue is None or not queue.waiting):
            seq.queued = False
            with self._lock:
                self._queued -= 1


def failure_of(error: Exception | None) -> Failure:
    """What the client is told: a PDError in its own words, anything else as an engine error that a retry may cure."""
    if isinstance(error, PDError):
        return Failure(error.status, error.reason, error.message)
    return Failure(
        503, "engine_error", f"the engine failed on this request: {error!r}" if error else "the room ended"
    )
