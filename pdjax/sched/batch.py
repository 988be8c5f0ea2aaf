"""One request's place in the scheduler (Seq), the queues it stands in (Fifo), and what a step computes of it.

Must never call the runner, the manager or a sink: this is the bookkeeping that scheduler.py acts on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from pdjax.core.wire import FirstToken
from pdjax.engine.base import BaseKVReceiver, BaseKVSender
from pdjax.engine.ports import DecodeRow, PrefillChunk, SampleSpec
from pdjax.sched.request import Finish, Request


@dataclass(eq=False, slots=True)
class Seq:
    """A request that was taken in. It stands in exactly one Fifo until it is closed.

    token owns its pages (D: the attempt). max_outputs: tokens it may produce within the context length.
    computed: positions whose KV is in its pages. queued: it counts against max_queue.
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
    prefill_s: float = 0.0
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
    def sample(self) -> SampleSpec:
        return SampleSpec(self.req.sampling.temperature, self.req.sampling.seed)

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
    )


def decode_rows(seqs: Iterable[Seq]) -> list[DecodeRow]:
    """A row for each: its newest token is written at seq.computed, the position after everything computed."""
    return [
        DecodeRow(token=s.req.output_ids[-1], position=s.computed, pages=s.req.pages, sample=s.sample)
        for s in seqs
    ]


def finish_of(seq: Seq, eos_ids: Set[int]) -> Finish | None:
    """Why the newest output token ends the request, if it does. A stop is reported before the length."""
    sampling, token = seq.req.sampling, seq.req.output_ids[-1]
    if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
        return Finish("stop", matched=token)
    if len(seq.req.output_ids) >= seq.max_outputs:
        return Finish("length")
    return None
