"""D computes a request itself when its P is lost (protocol §8, --disaggregation-on-failure recompute).

The hand-off has failed and stays failed, its pages are given back, its pull is in the graveyard; the request goes on
under a token of its own, so that whatever still lands for the old attempt finds no pages (protocol §6). Tokens are drawn
by (seed, position) and by nothing else, so they are those that P and D would have given.

Fairness: one prompt at a time, and while others decode a chunk of it is computed in at most one of ``recompute_every``
steps; a bounded number waits, each at most for what is left of the request's time. It comes before new pulls, because it
has waited longer than they have, and like theirs its row and pages are taken before any work (S17). Must never touch what
the failed attempt owned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pdjax.core.reasons import explain
from pdjax.sched.batch import Fifo, Seq
from pdjax.sched.disaggregation import RoomTable
from pdjax.sched.request import Failure, Output

# The KV will not come, and the request is not to blame. What P itself has ended is not computed here: P's own half is
# answered with its reason then, and routers retry or refuse the whole request (facts/router §3.2).
LOST: Final = frozenset({"peer_lost", "part_failed", "transfer_timeout"})


class Recomputing(RoomTable):
    """Mixin of D's scheduler."""

    in_flight: Fifo

    def _init_recompute(self) -> None:
        self.counts["recomputed"] = 0
        self.counts["recompute_refused"] = 0  # the queue was full, or the request's time was over
        self.recompute = Fifo("recompute", waiting=True)
        self._chunk_at = -self.config.recompute_every  # decode steps when the newest chunk was computed

    # ------------------------------------------------------------ taking over

    def _hand_off_failed(self, seq: Seq, failure: Failure) -> None:
        """The room has ended without its KV: compute the prompt here, or end the request with the failure."""
        if not self._take_over(seq, failure):
            super()._hand_off_failed(seq, failure)

    def _take_over(self, seq: Seq, failure: Failure) -> bool:
        if not self.config.recompute or failure.reason not in LOST:
            return False
        if len(self.recompute) >= self.config.max_recompute or self.clock() >= self._until_s(seq):
            self.counts["recompute_refused"] += 1
            return False
        self._give_back_pages(seq)
        self._leave_room(seq)
        # The prompt's own log-probabilities are P's share of the answer (facts/router §3.1).
        seq.req.sampling = replace(seq.req.sampling, prompt_logprobs_from=None)
        attempt = seq.token
        seq.receiver, seq.first, seq.token = None, None, seq.serial
        seq.req.times.scheduled = seq.req.times.ready = seq.req.times.landed = None
        self.counts["recomputed"] += 1
        self.manager.note(
            "recompute", seq.req.room, attempt=str(attempt), token=str(seq.token), reason=failure.reason
        )
        self._move(seq, self.recompute)
        return True

    def _until_s(self, seq: Seq) -> float:
        return seq.req.times.arrived + self.config.request_timeout_s

    # ------------------------------------------------------------ its turn

    def _admit_recompute(self) -> bool:
        """The head takes a row and its pages when no other prompt is being computed; those that are late end."""
        worked = self._end_late_ones()
        seq = self.recompute.head()
        if seq is None or not self._may_admit() or not self._take_pages(seq):
            return worked
        self._move(seq, self.prefilling)
        return True

    def _may_admit(self) -> bool:
        """It is the head's turn, and there is a row and there are pages for it."""
        seq = self.recompute.head()
        if seq is None or self.prefilling or not self._has_row():
            return False
        return self._pages_needed(seq.n_prompt, seq.max_outputs) <= self.cache.available_pages()

    def _is_held_up(self) -> bool:
        """The head's turn has come, and pulls leave it what becomes free."""
        return bool(self.recompute) and not self.prefilling

    def _end_late_ones(self) -> bool:
        now = self.clock()
        late = [seq for seq in self.recompute if now >= self._until_s(seq)]
        for seq in late:
            self.counts["recompute_refused"] += 1
            self._close(seq, Output(failure=Failure(503, "request_timeout", explain("request_timeout"))))
        return bool(late)

    def _has_row(self) -> bool:
        """A row is reserved before the pages (S17): what lands, or was computed, joins the batch at once."""
        return len(self.in_flight) + len(self.running) + len(self.prefilling) < self.max_running

    def _next_late_s(self) -> float | None:
        return min((self._until_s(seq) for seq in self.recompute), default=None)

    # ------------------------------------------------------------ beside decoding

    def _note_first_token(self, seq: Seq) -> None:
        """By its token, if the room's own hand-off did not bring it: the room may be used again by now."""
        if seq.receiver is None:
            self.manager.note("first_token", seq.req.room, token=str(seq.token))
        else:
            super()._note_first_token(seq)

    def next_prompt(self) -> Seq | None:
        seq = super().next_prompt()
        waits = self.counts["decode_steps"] - self._chunk_at < self.config.recompute_every
        return None if seq is None or (waits and self.decodable()) else seq

    def _launch_prefill(self) -> bool:
        launched = super()._launch_prefill()
        if launched:
            self._chunk_at = self.counts["decode_steps"]
        return launched
