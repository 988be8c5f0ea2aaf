"""What moves pages where: decided in one place, by platform and dtype."""

from __future__ import annotations

import pytest

from pdjax.engine.kernels.mover import KERNEL_DTYPES, form_of, make_mover
from pdjax.engine.kernels.pallas import PallasMover
from pdjax.engine.kernels.xla import XlaMover


@pytest.mark.parametrize(
    ("platform", "dtype", "form"),
    [
        *(("tpu", dtype, "kernel") for dtype in ("bfloat16", "float32", "int8", "float8_e4m3fn")),
        ("tpu", "float8_e5m2", "set"),  # no kernel was compiled for it
        ("cpu", "float32", "pages"),
        ("cpu", "int8", "pages"),
        ("cpu", "bfloat16", "merge"),
        ("cpu", "float8_e4m3fn", "merge"),
        ("gpu", "bfloat16", "set"),
    ],
)
def test_platform_and_dtype_decide(platform: str, dtype: str, form: str) -> None:
    assert form_of(platform, dtype) == form
    mover = make_mover(platform, dtype)
    assert type(mover) is (PallasMover if form == "kernel" else XlaMover)
    assert make_mover(platform, dtype) is mover, "owners share its programs"
    assert (dtype in KERNEL_DTYPES) or form != "kernel"
