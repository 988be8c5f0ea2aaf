"""Device steps: launched in one turn, and their results read in the same turn or, overlapped, in the next (RFC-2 §5.4).

The overlap loop launches step N+1 before it reads what step N sampled, so that the host's work runs beside the
device's. A token goes from step to step on the device, through the request's slot. That a request has ended is seen
one turn late: what a later step sampled for it is dropped, and its pages are given back when that step is over.
Must never read a result out of order, launch a row for a token beyond the request's last, or let a request that was
closed hear of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass

from pdjax.engine.ports import Clock, DecodeRow, Launched, Runner, Sampled
from pdjax.sched.batch import Fifo, Seq, decode_row, next_chunk, to_score
from pdjax.sched.config import SchedulerConfig
from pdjax.sched.request import TopLogprobs


@dataclass(eq=False, slots=True)
class Step:
    """A launch that was not read yet. seqs: whose token each of its rows samples; turn: of the loop."""

    turn: int
    seqs: list[Seq]
    launched: Launched
    prefill: bool


class StepLoop(ABC):
    """The part of a scheduler that launches and reads. Seq.unread counts the steps that still sample for a request."""

    config: SchedulerConfig
    runner: Runner
    clock: Clock
    counts: Counter[str]
    prefilling: Fifo
    running: Fifo

    def _init_steps(self, max_running: int) -> None:
        self._turn = 0
        self._unread: deque[Step] = deque()
        self._slots = list(range(max_running))
        self.paused = False

    def _set_paused(self, paused: bool) -> None:
        """Paused, no step is launched. Those under way are read first: nothing is said in a pause."""
        if paused:
            self._read_all()
        self.paused = paused

    def device_work(self) -> bool:
        """The rest of a turn: at most one prefill chunk and one decode batch, and what follows from results."""
        if self.paused:
            return False
        self._turn += 1
        worked = self._launch_prefill()
        if not self.config.overlap:
            self._read_all()
        worked |= self._launch_decode()
        while self._unread and not (self.config.overlap and self._unread[0].turn == self._turn):
            self._read_oldest()
            worked = True
        return worked

    def unread(self) -> bool:
        """Steps are under way whose results were not read: there is something to do in the next turn."""
        return bool(self._unread)

    def decodable(self) -> list[Seq]:
        """Requests that get a row in the next decode step: of the others, the last token is under way."""
        return [seq for seq in self.running if seq.n_sampled < seq.max_outputs]

    def next_prompt(self) -> Seq | None:
        """The request whose next chunk this turn may compute."""
        return self.prefilling.head()

    # ------------------------------------------------------------ launch

    def _launch_prefill(self) -> bool:
        seq = self.next_prompt()
        if seq is None or seq.unread:
            return False
        try:
            chunk = next_chunk(self._with_slot(seq), self.config.chunked_prefill_size)
            launched = self.runner.prefill(chunk)
            if (launched is None) != (chunk.sample is None):
                raise RuntimeError("prefill must sample for the last chunk, and for no other")
            if (score := to_score(seq, chunk)) is not None:
                seq.scored += self.runner.score(*score, seq.req.sampling.top_logprobs)
        except Exception as error:
            self._fail(seq, error)
            return True
        seq.computed += len(chunk.tokens)
        self.counts["prefill_tokens"] += len(chunk.tokens)
        if launched is not None:
            self._unread.append(Step(self._turn, [seq], launched, prefill=True))
            seq.unread += 1
            self._handle_launched_prefill(seq)
        return True

    def _launch_decode(self) -> bool:
        if any(seq.unread and seq.req.sampling.follows_output for seq in self.running):
            self._read_all()  # its next draw needs the last token on the host
        wanted = self.decodable()
        rows = self._rows(wanted)
        if not rows:
            return bool(wanted)
        seqs = list(rows)
        try:
            launched = self.runner.decode(list(rows.values()))
        except Exception as error:
            self._read_all()  # what was sampled before the failure is right
            for seq in seqs:
                if not seq.closed:
                    self._fail(seq, error)
            return True
        self.counts["decode_steps"] += 1
        self._unread.append(Step(self._turn, seqs, launched, prefill=False))
        for seq in seqs:
            seq.computed += 1
            seq.unread += 1
        return True

    def _rows(self, seqs: list[Seq]) -> dict[Seq, DecodeRow]:
        """What the step computes of each; one whose grammar cannot go on ends alone (S11)."""
        rows = {}
        for seq in seqs:
            try:
                rows[seq] = decode_row(self._with_slot(seq))
            except Exception as error:
                self._fail(seq, error)
        return rows

    def _with_slot(self, seq: Seq) -> Seq:
        if seq.slot is None:
            seq.slot = self._slots.pop()
        return seq

    def _free_slot(self, seq: Seq) -> None:
        """At once, though a step under way may write it: the next owner's launch comes after that one."""
        if seq.slot is not None:
            self._slots.append(seq.slot)
            seq.slot = None

    # ------------------------------------------------------------ read

    def _read_prefill(self) -> bool:
        """What a prompt's last chunk sampled, before the next prompt is admitted: that one may share its prefix.

        The host waits for that chunk alone; the decode step launched behind it keeps the device at work meanwhile.
        """
        if not (self._unread and self._unread[0].prefill):
            return False
        self._read_oldest()
        return True

    def _read_all(self) -> None:
        while self._unread:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step = self._unread.popleft()
        for seq in step.seqs:
            seq.unread -= 1
        try:
            sampled = self.runner.collect(step.launched)
            if len(sampled) != len(step.seqs):
                raise RuntimeError(f"a step answered {len(sampled)} rows of {len(step.seqs)}")
        except Exception as error:
            for seq in step.seqs:
                seq.computed = 0  # the content of its pages cannot be trusted
                if not seq.closed:
                    self._fail(seq, error)
                else:
                    self._drop(seq)
            return
        now = self.clock()
        for seq, row in zip(step.seqs, sampled, strict=True):
            if seq.closed:
                self._drop(seq)
            elif step.prefill:
                seq.req.times.prefilled = now
                self._handle_completed_prefill(seq, row)
            else:
                self._emit_token(seq, row.token, row.logprob, row.top)

    def _drop(self, seq: Seq) -> None:
        """A token that was sampled for a request that had ended. Its last one gives the pages back."""
        self.counts["surplus_tokens"] += 1
        if not seq.unread:
            self._give_back_pages(seq)

    # ------------------------------------------------------------ what the scheduler does with it

    @abstractmethod
    def _handle_launched_prefill(self, seq: Seq) -> None:
        """The last chunk of its prompt is under way."""

    @abstractmethod
    def _handle_completed_prefill(self, seq: Seq, sampled: Sampled) -> None: ...

    @abstractmethod
    def _emit_token(self, seq: Seq, token: int, logprob: float | None, top: TopLogprobs) -> None: ...

    @abstractmethod
    def _fail(self, seq: Seq, error: Exception) -> None: ...

    @abstractmethod
    def _give_back_pages(self, seq: Seq) -> None: ...
