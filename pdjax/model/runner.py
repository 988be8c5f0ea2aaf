"""JaxRunner: the model on a device, owner of the KV pools (engine.ports.Runner).

One scheduler thread calls it and nobody else: two owners of donated pools lose updates (a public incident), so a
call from a second thread is an error. Must never log or keep prompts and tokens, and never give the pools away.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from pdjax.core.budget import Slot
from pdjax.core.pools import Fingerprint, PoolTransferSpec, packed_bytes, plan_parts
from pdjax.engine.base import Packed
from pdjax.engine.kernels.checksum import checksum, chosen
from pdjax.engine.kernels.host_staging import HostStage
from pdjax.engine.kernels.mover import make_mover
from pdjax.engine.kernels.plan import check_parts, gather_ids, scatter_ids
from pdjax.engine.ports import NO_SLOT, DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.model.buckets import bucket
from pdjax.model.checkpoint import LoadedModel, fingerprint, load_model
from pdjax.model.programs import programs_for
from pdjax.model.sampler import Draw, Sampler
from pdjax.model.settings import RunnerSettings
from pdjax.model.shared_compiles import Job, run_jobs
from pdjax.model.sizes import Sizes, check, resolve_dtype

_IN_SLOT = -1  # in a column of tokens: take it from the request's slot


class JaxRunner:
    """Prefill, decode, gather and scatter on one device.

    pools: what a manager must know of the KV pools.
    """

    def __init__(self, model: LoadedModel, settings: RunnerSettings) -> None:
        cfg = model.config
        sizes = Sizes.of(cfg, settings)
        self.config = cfg
        self.weights_digest = model.digest
        self.page_size = settings.page_size
        self.num_pages = settings.num_pages
        self._verify = settings.verify
        self._device = jax.devices()[0]
        self.dtype, self.context_tokens, self.buckets = sizes.dtype, sizes.context_tokens, sizes.buckets
        self.max_batch = self.buckets.max_batch
        self.pools: Sequence[PoolTransferSpec] = (sizes.pool,)
        shape = sizes.pool.shape
        self._kv = [jax.device_put(jnp.zeros(shape, self.dtype), self._device) for _ in range(cfg.n_layers)]
        self._params = jax.tree.map(self._weight, model.params)
        self._stage = HostStage(self._device)
        self._mover = make_mover(jax.default_backend(), str(self.dtype))
        self._programs = programs_for(cfg)
        self._sampler = Sampler(self._programs, cfg.vocab_size)
        self._slots = jax.device_put(jnp.zeros(self.max_batch + 1, jnp.int32), self._device)
        self._last_logits: jax.Array | None = None
        self._last_rows = 0
        self._last_hidden: jax.Array | None = None  # of the latest prefill call
        self._owner: int | None = None
        self._gathers = 0
        self._shared = Path(settings.compilation_cache) if settings.compilation_cache else None
        if self._shared is not None:
            _use_compilation_cache(str(self._shared))

    @classmethod
    def from_directory(cls, directory: Path, settings: RunnerSettings) -> JaxRunner:
        """Load a Hugging Face directory and make its runner. Raises ConfigError for what cannot be served."""
        check(settings)
        return cls(load_model(directory, dtype=resolve_dtype(settings.dtype)), settings)

    # ------------------------------------------------------------ engine.ports.Runner

    def prefill(self, chunk: PrefillChunk) -> Draw | None:
        """Write the KV of a chunk's tokens; draw the next token when ``chunk.sample`` is given.

        It does not wait for the device. Raises ValueError for sizes beyond the buckets.
        """
        self._own()
        n = len(chunk.tokens)
        stop = chunk.start + n
        tokens = np.zeros(bucket(self.buckets.tokens, n, "tokens of a chunk"), np.int32)
        tokens[:n] = chunk.tokens
        table = self._tables([chunk.pages], [stop], 1)[0]
        logits, self._last_hidden, self._kv = self._programs.prefill(
            self._params, self._kv, tokens, np.int32(chunk.start), np.int32(n), table
        )
        self._last_logits, self._last_rows = logits, 1
        if chunk.sample is None:
            return None
        return self._draw(logits, self._slot_column([chunk.slot], 1), [chunk.sample], [stop])

    def decode(self, rows: Sequence[DecodeRow]) -> Draw:
        """One step of at most max_batch requests: writes each row's token and draws the token after it."""
        self._own()
        n = len(rows)
        size = bucket(self.buckets.batch, n, "rows of a decode step")
        tokens = np.zeros(size, np.int32)
        positions = np.zeros(size, np.int32)
        tokens[:n] = [_IN_SLOT if row.token is None else row.token for row in rows]
        positions[:n] = [row.position for row in rows]
        tables = self._tables([row.pages for row in rows], [row.position + 1 for row in rows], size)
        slot = self._slot_column([row.slot for row in rows], size)
        logits, self._kv = self._programs.decode(
            self._params, self._kv, tokens, self._slots, slot, positions, tables
        )
        self._last_logits, self._last_rows = logits, n
        return self._draw(logits, slot, [row.sample for row in rows], [row.position + 1 for row in rows])

    def collect(self, launched: Draw) -> Sequence[Sampled]:
        """What each row of a launch drew; waits for the device."""
        self._own()
        return launched.wait()

    def score(self, first: int, tokens: Sequence[int], n_top: int) -> Sequence[Sampled]:
        """Each token as if sampled after the latest prefill call's token first, first + 1, …; waits for the device."""
        self._own()
        if self._last_hidden is None:
            raise ValueError("no prefill call has been made yet")
        hidden = np.asarray(self._last_hidden)[first : first + len(tokens)]
        return self._sampler.score(self._params, hidden, tokens, n_top)

    def gather(self, pages: Sequence[int], slot: Slot | None = None) -> Packed:
        """Private packed copies of these pages (core.pools.plan_parts), with checksums as the settings say.

        slot: whose host memory they go to (RFC-2 §5.5 mode B); without one they stay on the device. The pages may be
        reused on return. With checksums it waits for the copy, else it only dispatches. Raises plan.PlanError for page
        ids that no request can own, ValueError for a slot of another size.
        """
        self._own()
        ids = gather_ids(pages, self.num_pages)
        parts = plan_parts(self.pools, len(pages))
        arrays = self._mover.gather([self._kv], ids, parts)
        if slot is not None:
            arrays = self._stage.copy(arrays, parts, slot)
        summed = chosen(len(parts), self._verify, self._gathers)
        self._gathers += 1
        stated = tuple(
            msgspec.structs.replace(part, checksum=checksum(array)) if i in summed else part
            for i, (part, array) in enumerate(zip(parts, arrays, strict=True))
        )
        return Packed(parts=stated, arrays=arrays)

    def scatter(self, pages: Sequence[int], packed: Packed) -> None:
        """Write packed arrays into these pages, all layers, in place. Raises plan.PlanError before any write."""
        self._own()
        ids = scatter_ids(pages, self.num_pages)
        check_parts(self.pools, len(pages), packed.parts, len(packed.arrays))
        [self._kv] = self._mover.scatter([self._kv], packed.arrays, ids, packed.parts)

    # ------------------------------------------------------------ beside the port

    @property
    def last_logits(self) -> jax.Array:
        """Logits of the latest prefill or decode call, float32 [rows, vocab_size], on the device."""
        if self._last_logits is None:
            raise ValueError("no prefill or decode call has been made yet")
        return self._last_logits[: self._last_rows]

    @property
    def compiles(self) -> dict[tuple[Any, ...], int]:
        """How often each program for pools like this one was compiled in this process, by (name, sizes …).

        More than once means that something besides a bucket differs between calls, and requests wait for it.
        """
        pool = (self.pools[0].shape, self.pools[0].dtype)
        forward = {key[:3]: n for key, n in self._programs.compiles.items() if key[3:] == pool}
        moves = {
            (name, rows, layers): n
            for (name, rows, ((layers, *shape),)), n in self._mover.compiles.items()
            if tuple(shape) == pool
        }
        return {**forward, **moves, **self._stage.compiles}

    def fingerprint(self, *, protocol: int, transfer_size: int, transport_addresses: int) -> Fingerprint:
        """What a peer of this runner must equal (S10): see checkpoint.fingerprint."""
        return fingerprint(
            self.config,
            self.weights_digest,
            self.pools[0],
            protocol=protocol,
            transfer_size=transfer_size,
            transport_addresses=transport_addresses,
        )

    def warmup(
        self,
        max_tokens: int = 0,
        *,
        prefill: bool = True,
        decode: bool = True,
        gather: bool = True,
        scatter: bool = True,
        stage: bool = False,
    ) -> int:
        """Compile what requests of at most max_tokens (0: the whole context) can need; the number of programs.

        Call it before the instance registers: a compile takes seconds and nothing may wait for it later
        (protocol §7). It writes to the reserved page only. A prefill instance needs no decode and scatter, and the
        copy to the host (stage) only with host staging. Servers with the same compilation cache share the work
        (shared_compiles).
        """
        most = min(max_tokens or self.context_tokens, self.context_tokens)
        before = sum(self.compiles.values())
        jobs: list[Job] = []
        if prefill:
            shapes = self.buckets.prefill_shapes(most, self.page_size)
            jobs += [(f"prefill {shape}", partial(self._warm_prefill, *shape)) for shape in shapes]
            jobs += self._draw_jobs([1])
            jobs.append(("score", self._warm_score))
        if decode:
            shapes = self.buckets.decode_shapes(most, self.page_size)
            jobs += [(f"decode {shape}", partial(self._warm_decode, *shape)) for shape in shapes]
            jobs += self._draw_jobs(self.buckets.batch)
        for n in self.buckets.transfer_shapes(most, self.page_size):
            if gather:
                jobs.append((f"gather {n}", partial(self._warm_gather, n)))
            if scatter:
                jobs.append((f"scatter {n}", partial(self._warm_scatter, n)))
            if stage:
                jobs.append((f"stage {n}", partial(self._warm_stage, n)))
        mine = f"{self.config.hash} {self.pools[0].shape} {self.dtype}"
        run_jobs([(f"{mine} {name}", job) for name, job in jobs], self._shared)
        for array in self._kv:
            array.block_until_ready()
        return sum(self.compiles.values()) - before

    def hand_off_bytes(self, max_tokens: int = 0) -> dict[int, int]:
        """Bytes of every size of hand-off of requests of at most max_tokens (0: the whole context) → its pages."""
        most = min(max_tokens or self.context_tokens, self.context_tokens)
        shapes = self.buckets.transfer_shapes(most, self.page_size)
        return {packed_bytes(self.pools, n): n for n in shapes}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Give fresh slots, of sizes that ``hand_off_bytes`` names, their memory, and wait until it is there."""
        self._own()
        sizes = self.hand_off_bytes()
        for slot in slots:
            self._stage.prepare(slot, plan_parts(self.pools, sizes[slot.n_bytes]))
        jax.block_until_ready([slot.arrays for slot in slots])

    def _warm_prefill(self, n_tokens: int, n_pages: int) -> None:
        tokens, table = np.zeros(n_tokens, np.int32), np.zeros(n_pages, np.int32)
        _, _, self._kv = self._programs.prefill(
            self._params, self._kv, tokens, np.int32(0), np.int32(1), table
        )

    def _warm_decode(self, n_rows: int, n_pages: int) -> None:
        row, tables = np.zeros(n_rows, np.int32), np.zeros((n_rows, n_pages), np.int32)
        slot = self._slot_column([], n_rows)
        _, self._kv = self._programs.decode(self._params, self._kv, row, self._slots, slot, row, tables)

    def _draw_jobs(self, rows: Sequence[int]) -> list[Job]:
        return [(f"draw {n}", partial(self._warm_draw, n)) for n in rows]

    def _warm_draw(self, n_rows: int) -> None:
        none = self._slot_column([], n_rows)
        self._slots = self._programs.keep(self._slots, none, np.zeros(n_rows, np.int32))
        self._sampler.warm_up(n_rows)

    def _warm_score(self) -> None:
        self._sampler.score(self._params, np.zeros((1, self.config.hidden_size), self.dtype), [0], 1)

    def _warm_gather(self, n_pages: int) -> None:
        self._mover.gather([self._kv], np.zeros(n_pages, np.int32), plan_parts(self.pools, n_pages))

    def _warm_stage(self, n_pages: int) -> None:
        parts = plan_parts(self.pools, n_pages)
        arrays = self._mover.gather([self._kv], np.zeros(n_pages, np.int32), parts)
        self._stage.copy(arrays, parts, Slot(0, packed_bytes(self.pools, n_pages)))

    def _warm_scatter(self, n_pages: int) -> None:
        parts = plan_parts(self.pools, n_pages)
        arrays = [np.zeros(part.shape, self.dtype) for part in parts]
        [self._kv] = self._mover.scatter([self._kv], arrays, np.zeros(n_pages, np.int32), parts)

    def _own(self) -> None:
        """The first caller's thread owns the runner; any other is refused before it touches the pools."""
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise RuntimeError("the runner is owned by another thread: only the scheduler thread may call it")

    def _tables(self, pages: Sequence[Sequence[int]], n_tokens: Sequence[int], n_rows: int) -> np.ndarray:
        """Page tables int32 [n_rows, page bucket], padded with the reserved page. A short table is a ValueError.

        Only the pages that hold the row's n_tokens go in: a decode request owns pages that it has not reached yet.
        """
        needed = [-(-n // self.page_size) for n in n_tokens]
        tables = np.zeros((n_rows, bucket(self.buckets.pages, max(needed), "pages of a request")), np.int32)
        for i, (row, n) in enumerate(zip(pages, needed, strict=True)):
            if len(row) < n:
                raise ValueError(f"{n_tokens[i]} tokens need {n} pages but the page table has {len(row)}")
            tables[i, :n] = row[:n]
        return tables

    def _slot_column(self, slots: Sequence[int], n_rows: int) -> np.ndarray:
        """int32 [n_rows]: rows without a slot, and padding, use the last element. ValueError beyond max_batch."""
        if any(not NO_SLOT <= slot < self.max_batch for slot in slots):
            raise ValueError(f"slots {list(slots)}: a slot lies in 0…{self.max_batch - 1}")
        column = np.full(n_rows, self.max_batch, np.int32)
        column[: len(slots)] = [self.max_batch if slot == NO_SLOT else slot for slot in slots]
        return column

    def _draw(
        self, logits: jax.Array, slot: np.ndarray, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> Draw:
        draw = self._sampler.launch(logits, specs, positions)
        self._slots = self._programs.keep(self._slots, slot, draw.tokens)
        return draw

    def _weight(self, value: Any) -> jax.Array:
        weight: jax.Array = jax.device_put(jnp.asarray(value, self.dtype), self._device)
        return weight


def _use_compilation_cache(directory: str) -> None:
    """Keep every compiled program in ``directory``, small and fast ones too. Process-wide, as JAX has it."""
    setting = "jax_compilation_cache_dir"
    if getattr(jax.config, setting) != directory:
        compilation_cache.reset_cache()  # one that was opened elsewhere before would stay in use
    update: Any = jax.config.update
    update(setting, directory)
    update("jax_persistent_cache_min_compile_time_secs", 0.0)
    update("jax_persistent_cache_min_entry_size_bytes", -1)
