"""How large the suite's checks are: in full on a TPU, and in small where only the harness is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The pool that is timed: layers × (num_pages, page_size, width) of dtype; pages: of the requests that are moved.

    exact_*: of the pools that are compared bit for bit. depths: layers that a kernel keeps in flight. transfer_bytes: of
    one pull. model, serve_options: of the whole 1P1D; prompts: lengths of its requests; staging: whether P stages, one
    deployment each.
    """

    layers: int
    num_pages: int
    page_size: int
    width: int
    dtype: str
    pages: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: int
    exact_layers: int
    exact_pages: int
    exact_width: int
    exact_page_sizes: tuple[int, ...]
    exact_dtypes: tuple[str, ...]
    transfer_bytes: tuple[int, ...]
    model: str
    serve_options: tuple[str, ...]
    prompts: tuple[int, ...]
    staging: tuple[bool, ...]


# 7.5 GB of pools with pages of 64 KiB: fits the smallest chip (16 GB), and is too large for XLA to keep on the chip's own memory.
FULL = Sizes(
    layers=28,
    num_pages=4096,
    page_size=16,
    width=2048,
    dtype="bfloat16",
    pages=(16, 64, 256, 1024),
    depths=(1, 2, 4, 8, 16),
    rounds=20,
    exact_layers=4,
    exact_pages=96,
    exact_width=1024,
    exact_page_sizes=(16, 64, 128),
    exact_dtypes=("bfloat16", "float32", "int8", "float8_e4m3fn"),
    transfer_bytes=(1 << 20, 16 << 20, 256 << 20),
    model="smollm2",
    serve_options=("--context-length", "512", "--num-pages", "256", "--chunked-prefill-size", "64"),
    prompts=(1, 15, 16, 17, 63, 64, 65, 127, 200, 300),
    staging=(False, True),
)
REHEARSAL = Sizes(
    layers=2,
    num_pages=24,
    page_size=16,
    width=256,
    dtype="float32",
    pages=(3, 12),
    depths=(1, 2),
    rounds=1,
    exact_layers=2,
    exact_pages=12,
    exact_width=256,
    exact_page_sizes=(16,),
    exact_dtypes=("bfloat16", "float32"),
    transfer_bytes=(1 << 16, 1 << 20),
    model="tiny",
    serve_options=(
        *("--context-length", "64", "--num-pages", "16", "--chunked-prefill-size", "32"),
        *("--max-running-requests", "2", "--disaggregation-unpulled-budget", "100000"),
    ),
    prompts=(1, 16, 40),
    staging=(True,),
)
BY_NAME = {"full": FULL, "rehearsal": REHEARSAL}
