"""Sizes that no memory holds are the operator's mistake: one line that says what fits."""

import jax
import pytest

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.serve import loading
from pdjax.serve.args import ServeArgs

MUCH = 2_000_000_000


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_pages": MUCH}, "at most [0-9]+ fit"),
        ({"page_size": MUCH, "num_pages": 2000}, "at most [0-9]+ fit"),
        ({"max_running_requests": MUCH}, "give at most [0-9]+"),
        ({"settings": PDSettings(host_staging=True, unpulled_budget_bytes=1 << 60)}, "this machine has"),
        ({"context_length": MUCH}, "max_position_embeddings"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_allocated(sizes, says):
    with pytest.raises(ConfigError, match=says) as told:
        loading.load(ServeArgs("tiny", **sizes))
    assert "\n" not in str(told.value)


def test_a_pool_that_does_not_fit_beside_the_weights_is_one_line(monkeypatch):
    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 bytes")

    monkeypatch.setattr(loading, "JaxRunner", no_memory)
    with pytest.raises(ConfigError, match=r"--num-pages 1024: .* lower it") as told:
        loading.load(ServeArgs("tiny"))
    assert "\n" not in str(told.value)


def test_another_error_of_the_device_is_not_the_operators(monkeypatch):
    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(loading, "JaxRunner", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        loading.load(ServeArgs("tiny"))
