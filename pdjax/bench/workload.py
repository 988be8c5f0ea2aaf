"""What is asked of a server and when: made up from lengths, or read from a public trace.

The same seed gives the same lengths, prompts and arrivals on every machine. Must never read a clock or send anything.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pdjax.core.errors import ConfigError

FIRST_ID = 3  # below it most tokenizers keep their special tokens
MOONCAKE_BLOCK = 512  # prompt tokens of one hash id
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
WORDS = (
    "a",
    "day",
    "in",
    "the",
    "life",
    "of",
    "one",
    "old",
    "town",
    "by",
    "sea",
    "and",
    "hill",
    "where",
    "men",
    "work",
)


@dataclass(frozen=True)
class Job:
    """One request. at_s: seconds after the start, None in a closed loop. blocks: ids of prompt blocks of MOONCAKE_BLOCK
    tokens that requests share, in order; the prompt is filled up from the job's own number."""

    number: int
    n_prompt: int
    n_output: int
    at_s: float | None = None
    blocks: tuple[int, ...] = ()


def synthetic(
    n: int, n_prompt: int, n_output: int, *, spread: float = 0.0, rate: float | None = None, seed: int = 0
) -> list[Job]:
    """n jobs with lengths drawn evenly from [(1 - spread) × length, length]; rate: Poisson arrivals per second."""
    rng = random.Random(f"lengths {seed}")
    arrivals: Iterator[float | None] = itertools.repeat(None) if rate is None else _poisson(rate, seed)

    def draw(most: int) -> int:
        return rng.randint(max(1, round(most * (1 - spread))), most)

    return [Job(i, draw(n_prompt), draw(n_output), next(arrivals)) for i in range(n)]


def _poisson(rate: float, seed: int) -> Iterator[float]:
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


# ---------------------------------------------------------------------- traces


def read_trace(path: Path, limit: int = 0) -> list[Job]:
    """Jobs of a trace file in its order of arrival, the first at 0 s; limit 0: all. Raises ConfigError with the line.

    Formats, told apart by the first line: Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids)
    and Azure's CSV (TIMESTAMP as wall clock, ContextTokens, GeneratedTokens).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = _mooncake if first.lstrip().startswith("{") else _azure
            jobs = list(itertools.islice(reader(path, file), limit or None))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from None
    if not jobs:
        raise ConfigError(f"--trace {path}: holds no request")
    start_s = min(job.at_s or 0.0 for job in jobs)
    return sorted(
        (replace(job, at_s=(job.at_s or 0.0) - start_s) for job in jobs), key=lambda job: job.at_s or 0.0
    )


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Job]:
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            job = Job(
                number,
                _length(row["input_length"]),
                _length(row["output_length"]),
                float(row["timestamp"]) / 1e3,
                tuple(int(block) for block in row.get("hash_ids", ())),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _broken(path, number + 1, error) from None
        yield job


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Job]:
    rows = csv.DictReader(lines)
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"--trace {path}: neither Mooncake's JSON lines nor Azure's CSV: no column {', '.join(missing)}"
        )
    for number, row in enumerate(rows):
        try:
            at_s = _wall_s(row["TIMESTAMP"])
            job = Job(number, _length(row["ContextTokens"]), _length(row["GeneratedTokens"]), at_s)
        except (ValueError, TypeError) as error:
            raise _broken(path, rows.line_num, error) from None
        yield job


def _wall_s(text: str) -> float:
    """Azure writes 100 ns, datetime holds microseconds: the seventh digit is dropped."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{(fraction or '0')[:6]}")


def _length(value: Any) -> int:
    n = int(value)
    if n < 1:
        raise ValueError(f"a length of {n} tokens")
    return n


def _broken(path: Path, line: int, error: Exception) -> ConfigError:
    why = f"no field {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"--trace {path}, line {line}: {why}")


def fitted(jobs: Sequence[Job], *, max_input: int, max_output: int, speed: float) -> list[Job]:
    """The jobs with lengths cut to what the server takes (0: as they are), and arrivals ``speed`` times as fast."""
    return [
        replace(
            job,
            n_prompt=min(job.n_prompt, max_input or job.n_prompt),
            n_output=min(job.n_output, max_output or job.n_output),
            at_s=None if job.at_s is None else job.at_s / speed,
        )
        for job in jobs
    ]


# ---------------------------------------------------------------------- prompts


def prompt_ids(job: Job, vocab_size: int, seed: int) -> list[int]:
    """Exactly job.n_prompt token ids in [FIRST_ID, vocab_size); equal blocks give equal ids."""
    ids: list[int] = []
    for block in job.blocks:
        if len(ids) >= job.n_prompt:
            break
        ids += _draw_ids(f"block {seed} {block}", MOONCAKE_BLOCK, vocab_size)
    ids += _draw_ids(f"job {seed} {job.number}", max(job.n_prompt - len(ids), 0), vocab_size)
    return ids[: job.n_prompt]


def _draw_ids(key: str, n: int, vocab_size: int) -> list[int]:
    return random.Random(key).choices(range(FIRST_ID, vocab_size), k=n)


def prompt_text(job: Job, seed: int) -> str:
    """job.n_prompt short words: about as many tokens, how many exactly is for the tokenizer to say."""
    return " ".join(WORDS[i % len(WORDS)] for i in prompt_ids(job, FIRST_ID + 1000, seed))
