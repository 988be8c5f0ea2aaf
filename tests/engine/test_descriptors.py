"""The limit of open files: raised as far as the operator allows, and shared."""

import resource

import pytest

from pdjax.engine.descriptors import raise_descriptor_limit, side_channel_connections, usable_descriptors

INF = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "made"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, INF), [(65536, INF)]),
        ((1024, 1 << 30), [(65536, 1 << 30)]),
        ((4096, 4096), []),
        ((1 << 20, 1 << 20), []),
        ((INF, INF), []),
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(monkeypatch, limits, made):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, to: found.append(to))
    raise_descriptor_limit()
    assert found == made


@pytest.mark.parametrize(
    ("soft", "wanted", "held"),
    [(1024, 1024, 496), (1024, 16, 16), (65536, 1024, 1024), (20, 1024, 1), (INF, 9, 9)],
)
def test_the_side_channel_has_its_share(monkeypatch, soft, wanted, held):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, INF))
    assert side_channel_connections(wanted) == held <= max(1, usable_descriptors())
