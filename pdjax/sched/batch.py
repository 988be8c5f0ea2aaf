"""One request's place in the scheduler (Seq), the queues it stands in (Fifo), and what a step computes of it.

Must never call the runner, the manager or a sink: this is the bookkeeping that scheduler.py acts on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from pdjax.core.wire import FirstToken
from pdjax.engine.base import BaseKVReceiver, BaseKVSender
from pdjax.engine.ports import NO_SLOT, DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.sched.request import Finish, Request
from pdjax.sched.steering import Steering, base_spec


@dataclass(eq=False, slots=True)
class Seq:
    """A request that was taken in. It stands in exactly one Fifo until it is closed.

    token owns its pages (D: the attempt). max_outputs: tokens it may produce within the context length.
    computed: positions whose KV is in its pages, or will be when the steps under way are over. queued: it counts
    against max_queue. unread: tokens that steps under way draw for it. slot: its place for tokens on the device.
    steering: None when every token of it is drawn alike. scored: its prompt's own tokens that the client wants to know
    the log-probabilities of.
    """

    serial: int
    req: Request
    max_outputs: int
    token: int = 0
    queue: Fifo | None = None
    since: float = 0.0  # when it joined that queue, for who asks why it waits
    queued: bool = True
    has_pages: bool = False
    computed: int = 0
    unread: int = 0
    slot: int | None = None
    steering: Steering | None = None
    scored: list[Sampled] = field(default_factory=list)
    sender: BaseKVSender | None = None
    kv_bytes: int = 0  # P: what the hand-off charges to the unpulled budget
    receiver: BaseKVReceiver | None = None
    first: FirstToken | None = None  # D: from KVReady
    committed: bool = False  # D: the hand-off is Success; the room is no longer ours to abort
    retry_at: float = 0.0  # D: receive() said not now; not before this time

    @property
    def n_prompt(self) -> int:
        return len(self.req.prompt_ids)

    @property
    def n_sampled(self) -> int:
        """Output tokens, those that are not read yet included."""
        return len(self.req.output_ids) + self.unread

    @property
    def closed(self) -> bool:
        return self.queue is None

    @property
    def sample(self) -> SampleSpec:
        """How its next token is drawn. Raises what its grammar does when it cannot go on: this request's end alone."""
        return base_spec(self.req.sampling) if self.steering is None else self.steering.spec()

    def take(self, token: int, eos_ids: Set[int]) -> Finish | None:
        """The next output token, wherever it was drawn: why it ends the request, if it does.

        A stop is reported before the length. Raises ValueError for a token that the grammar does not allow.
        """
        req, sampling = self.req, self.req.sampling
        req.output_ids.append(token)
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return Finish("stop", matched=token)
        if self.steering is not None:
            self.steering.push(token)
        text = req.find_stop(token) if req.find_stop is not None else None
        if text is not None:
            return Finish("stop", matched=text)
        if self.steering is not None and self.steering.complete:
            return Finish("stop", matched=token if token in eos_ids else None)
        return Finish("length") if len(req.output_ids) >= self.max_outputs else None

    def kv_ids(self) -> list[int]:
        """The tokens whose KV the pages hold."""
        return (self.req.prompt_ids + self.req.output_ids)[: self.computed]


@dataclass(eq=False)
class Fifo:
    """Requests in order of arrival. Taking out from anywhere costs the same however many wait (aborts).

    An OrderedDict, not a dict: the first key of a dict whose front was deleted is found by scanning.
    """

    name: str
    waiting: bool  # its members count against max_queue
    _seqs: OrderedDict[int, Seq] = field(default_factory=OrderedDict)

    def push(self, seq: Seq) -> None:
        self._seqs[seq.serial] = seq

    def remove(self, seq: Seq) -> None:
        del self._seqs[seq.serial]

    def head(self) -> Seq | None:
        return next(iter(self._seqs.values())) if self._seqs else None

    def oldest_since(self) -> float | None:
        """When its head joined it, None when it is empty. From any thread: the owner may move the head meanwhile."""
        for _ in range(4):
            try:
                head = self.head()
            except (RuntimeError, StopIteration):  # it changed between two steps of this look
                continue
            return None if head is None else head.since
        return None

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs.values())


def next_chunk(seq: Seq, chunked_prefill_size: int) -> PrefillChunk:
    """The next at most chunked_prefill_size tokens of the prompt; only the last chunk samples."""
    stop = min(seq.computed + chunked_prefill_size, seq.n_prompt)
    return PrefillChunk(
        tokens=seq.req.prompt_ids[seq.computed : stop],
        start=seq.computed,
        pages=seq.req.pages,
        sample=seq.sample if stop == seq.n_prompt else None,
        slot=NO_SLOT if seq.slot is None else seq.slot,
    )


def decode_row(seq: Seq) -> DecodeRow:
    """Its newest token is written at seq.computed, the position after everything computed."""
    return DecodeRow(
        token=None if seq.unread else seq.req.output_ids[-1],
        position=seq.computed,
        pages=seq.req.pages,
        sample=seq.sample,
        slot=NO_SLOT if seq.slot is None else seq.slot,
    )


def to_score(seq: Seq, chunk: PrefillChunk) -> tuple[int, list[int]] | None:
    """Which tokens of the prompt are scored after this chunk: (the chunk's token before the first of them, they)."""
    after = seq.req.sampling.prompt_logprobs_from
    if after is None:
        return None
    first = max(after, chunk.start)
    last = min(
        chunk.start + len(chunk.tokens), seq.n_prompt - 1
    )  # nothing of the prompt follows its last token
    return (first - chunk.start, seq.req.prompt_ids[first + 1 : last + 1]) if first < last else None
