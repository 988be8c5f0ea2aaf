"""The inequalities of protocol §7 hold by default, and each can be broken and is then named."""

import dataclasses

import pytest

from pdjax.core.settings import PDSettings


def test_the_defaults_are_sound():
    assert PDSettings().check() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peer_timeout_s": 3.0}, "peer-timeout"),
        ({"lease_s": 5.0}, "lease"),
        ({"transfer_timeout_s": 75.0}, "limbo-timeout"),
        ({"tombstone_s": 10.0}, "tombstone"),
        ({"bootstrap_timeout_s": 296.0}, "request-timeout"),
        ({"request_timeout_s": 360.0}, "router timeout"),
        ({"heartbeat_interval_s": 7.5}, "heartbeat-ttl"),
        ({"hello_interval_s": -1.0}, "disaggregation-hello-interval"),
        ({"max_peers": 0}, "disaggregation-max-peers"),
        ({"max_channel_connections": 0}, "disaggregation-max-connections"),
        ({"unpulled_budget_bytes": -1}, "disaggregation-unpulled-budget"),
        ({"tombstone_s": -1.0}, "tombstone"),
        ({"lease_s": float("nan")}, "disaggregation-lease"),
        ({"heartbeat_ttl_s": float("inf")}, "heartbeat-ttl"),
        ({"router_timeout_s": 1e7}, "router-request-timeout"),
    ],
)
def test_each_broken_rule_is_named_with_its_numbers(change, named):
    broken = dataclasses.replace(PDSettings(), **change).check()
    assert any(named in line for line in broken), broken


def test_every_field_has_a_flag_and_a_sentence():
    flags = [f.metadata["flag"] for f in dataclasses.fields(PDSettings)]
    assert len(set(flags)) == len(flags)
    assert all(f.metadata["doc"] for f in dataclasses.fields(PDSettings))
