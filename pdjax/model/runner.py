"""JaxRunner: the model on a device, owner of the KV pools (engine.ports.Runner).

One scheduler thread calls it and nobody else: two owners of donated pools lose updates (a public incident), so a
call from a second thread is an error. Must never log or keep prompts and tokens, and never give the pools away.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from pdjax.core.budget import Slot
from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint, PoolTransferSpec, packed_bytes, plan_parts
from pdjax.engine.base import Packed
from pdjax.engine.kernels.checksum import VERIFY_MODES, Verify, checksum, chosen
from pdjax.engine.kernels.host_staging import HostStage
from pdjax.engine.kernels.layout import pool_shape
from pdjax.engine.kernels.mover import make_mover
from pdjax.engine.kernels.plan import check_parts, gather_ids, scatter_ids
from pdjax.engine.ports import NO_SLOT, DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.model.buckets import bucket, make_buckets
from pdjax.model.checkpoint import LoadedModel, fingerprint, load_model
from pdjax.model.programs import programs_for
from pdjax.model.sampler import Draw, Sampler

LAYOUT = "list[layer](page, token, k0 v0 k1 v1 ..)"  # fingerprint: how the bytes of a pool are to be read
DTYPES = ("auto", "float32", "bfloat16")
_IN_SLOT = -1  # in a column of tokens: take it from the request's slot


@dataclass(frozen=True)
class RunnerSettings:
    """Sizes of the pools and of the compiled programs. num_pages includes the reserved page 0."""

    num_pages: int = 1024
    page_size: int = 16  # tokens
    max_batch: int = 16  # rows of the largest decode step
    chunk_tokens: int = 512  # tokens of the largest prefill call
    context_tokens: int = 0  # longest request; 0: what the model and the pools allow
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and KV: see resolve_dtype
    verify: Verify = "all"
    compilation_cache: str = ""  # directory for compiled programs, kept between runs; empty: none


class JaxRunner:
    """Prefill, decode, gather and scatter on one device.

    pools: what a manager must know of the KV pools.
    """

    def __init__(self, model: LoadedModel, settings: RunnerSettings) -> None:
        cfg = model.config
        self.config = cfg
        self.weights_digest = model.digest
        self.page_size = settings.page_size
        self.num_pages = settings.num_pages
        self._verify = settings.verify
        _check(settings)
        self._device = jax.devices()[0]
        self.dtype = resolve_dtype(settings.dtype)
        self.context_tokens = _context(settings, cfg.max_position)
        self.buckets = make_buckets(
            chunk_tokens=min(settings.chunk_tokens, self.context_tokens),
            max_batch=settings.max_batch,
            max_pages=-(-self.context_tokens // self.page_size),
        )
        self.max_batch = self.buckets.max_batch
        platform = jax.default_backend()
        shape = pool_shape((self.num_pages, self.page_size, cfg.kv_width), self.dtype, platform)
        self.pools: Sequence[PoolTransferSpec] = (
            PoolTransferSpec(
                name="kv",
                pool_type="kv",
                dtype=str(self.dtype),
                shape=shape,
                n_layers=cfg.n_layers,
                page_bytes=self.page_size * shape[2] * self.dtype.itemsize,
                metadata={"layout": LAYOUT if shape[2] == cfg.kv_width else f"{LAYOUT} {shape[2]} wide"},
            ),
        )
        self._kv = [jax.device_put(jnp.zeros(shape, self.dtype), self._device) for _ in range(cfg.n_layers)]
        self._params = jax.tree.map(self._weight, model.params)
        self._stage = HostStage(self._device)
        self._mover = make_mover(platform, str(self.dtype))
        self._programs = programs_for(cfg)
        self._sampler = Sampler(self._programs, cfg.vocab_size)
        self._slots = jax.device_put(jnp.zeros(self.max_batch + 1, jnp.int32), self._device)
        self._last_logits: jax.Array | None = None
        self._last_rows = 0
        self._last_hidden: jax.Array | None = None  # of the latest prefill call
        self._owner: int | None = None
        self._gathers = 0
        if settings.compilation_cache:
            _use_compilation_cache(settings.compilation_cache)

    @classmethod
    def from_directory(cls, directory: Path, settings: RunnerSettings) -> JaxRunner:
        """Load a Hugging Face directory and make its runner. Raises ConfigError for what cannot be served."""
        _check(settings)
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
    ) -> int:
        """Compile what requests of at most max_tokens (0: the whole context) can need; the number of programs.

        Call it before the instance registers: a compile takes seconds and nothing may wait for it later
        (protocol §7). It writes to the reserved page only. A prefill instance needs no decode and scatter.
        """
        most = min(max_tokens or self.context_tokens, self.context_tokens)
        before = sum(self.compiles.values())
        if prefill:
            for t, p in self.buckets.prefill_shapes(most, self.page_size):
                tokens, table = np.zeros(t, np.int32), np.zeros(p, np.int32)
                _, _, self._kv = self._programs.prefill(
                    self._params, self._kv, tokens, np.int32(0), np.int32(1), table
                )
            self._warm_sampler([1], score=True)
        if decode:
            for b, p in self.buckets.decode_shapes(most, self.page_size):
                row, tables = np.zeros(b, np.int32), np.zeros((b, p), np.int32)
                slot = self._slot_column([], b)
                _, self._kv = self._programs.decode(
                    self._params, self._kv, row, self._slots, slot, row, tables
                )
            self._warm_sampler(self.buckets.batch, score=False)
        for n in self.buckets.transfer_shapes(most, self.page_size) if gather or scatter else ():
            parts = plan_parts(self.pools, n)
            reserved = np.zeros(n, np.int32)
            if gather:
                self._mover.gather([self._kv], reserved, parts)
            if scatter:
                arrays = [np.zeros(part.shape, self.dtype) for part in parts]
                [self._kv] = self._mover.scatter([self._kv], arrays, reserved, parts)
        for array in self._kv:
            array.block_until_ready()
        return sum(self.compiles.values()) - before

    def hand_off_bytes(self, max_tokens: int = 0) -> dict[int, int]:
        """Bytes of every size of hand-off of requests of at most max_tokens (0: the whole context) → its pages."""
        most = min(max_tokens or self.context_tokens, self.context_tokens)
        shapes = self.buckets.transfer_shapes(most, self.page_size)
        return {packed_bytes(self.pools, n): n for n in shapes}

    def warmup_staging(self, slots: Sequence[Slot], max_tokens: int = 0) -> None:
        """Compile the copy to the host for every size of hand-off, and give these fresh slots their memory.

        Like ``warmup`` it reads the reserved page only, and must come before the instance registers.
        """
        self._own()
        sizes = self.hand_off_bytes(max_tokens)
        for n_bytes, n in sizes.items():
            parts = plan_parts(self.pools, n)
            arrays = self._mover.gather([self._kv], np.zeros(n, np.int32), parts)
            self._stage.copy(arrays, parts, Slot(0, n_bytes))
        for slot in slots:
            self._stage.prepare(slot, plan_parts(self.pools, sizes[slot.n_bytes]))
        jax.block_until_ready([slot.arrays for slot in slots])

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

    def _warm_sampler(self, rows: Sequence[int], *, score: bool) -> None:
        for n in rows:
            self._slots = self._programs.keep(self._slots, self._slot_column([], n), np.zeros(n, np.int32))
        self._sampler.warmup(self._params, self.config.hidden_size, self.dtype, rows, score=score)

    def _weight(self, value: Any) -> jax.Array:
        weight: jax.Array = jax.device_put(jnp.asarray(value, self.dtype), self._device)
        return weight


def resolve_dtype(name: str) -> np.dtype[Any]:
    """float32 on CPU (bfloat16 is 4 to 8 times slower there, facts/model §0.2), bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _check(settings: RunnerSettings) -> None:
    if settings.num_pages < 2:
        raise ConfigError(f"num_pages={settings.num_pages} must be at least 2: page 0 is reserved")
    if settings.page_size < 1:
        raise ConfigError(f"page_size={settings.page_size} must be at least 1 token")
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype={settings.dtype!r} must be one of {list(DTYPES)}")
    if settings.verify not in VERIFY_MODES:
        raise ConfigError(f"verify={settings.verify!r} must be one of {list(VERIFY_MODES)}")


def _context(settings: RunnerSettings, max_position: int) -> int:
    """Longest request in tokens: what was asked, at most what the model knows and the pools hold."""
    asked = settings.context_tokens
    if asked > max_position:
        raise ConfigError(
            f"context_tokens={asked} is more than the model's max_position_embeddings={max_position}"
        )
    held = (settings.num_pages - 1) * settings.page_size
    if asked > held:
        raise ConfigError(
            f"context_tokens={asked} does not fit: {settings.num_pages - 1} pages hold {held} tokens"
        )
    return asked or min(max_position, held)


def _use_compilation_cache(directory: str) -> None:
    """Keep every compiled program in ``directory``, small and fast ones too. Process-wide, as JAX has it."""
    setting = "jax_compilation_cache_dir"
    if getattr(jax.config, setting) != directory:
        compilation_cache.reset_cache()  # one that was opened elsewhere before would stay in use
    update: Any = jax.config.update
    update(setting, directory)
    update("jax_persistent_cache_min_compile_time_secs", 0.0)
    update("jax_persistent_cache_min_entry_size_bytes", -1)
