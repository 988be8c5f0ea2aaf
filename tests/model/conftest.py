"""Fixtures of the model tests: tiny models made on the spot, and small runners for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.model.tiny import make_tiny_model

MakeRunner = Callable[..., JaxRunner]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_runner(tiny_dir: Path) -> MakeRunner:
    def make(directory: Path = tiny_dir, **settings: Any) -> JaxRunner:
        small = {"num_pages": 64, "page_size": 8, "chunk_tokens": 64, "max_batch": 4, "verify": "all"}
        return JaxRunner.from_directory(directory, RunnerSettings(**{**small, **settings}))

    return make
