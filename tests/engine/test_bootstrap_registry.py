"""The pure registry: lives, time to live, bounds, compatibility (RFC-2 §5.3, protocol §3; S5, S8, S12, V6)."""

import dataclasses
import random

import msgspec
import pytest

from pdjax.core.pools import Fingerprint
from pdjax.engine.bootstrap.registry import BadRegistration, Key, Print, Registry, parse_print

FP = Fingerprint(1, "m", "w", "float32", 16, 2, 1, 64, "paged", "1x1", 4 << 20, 1, "0.10.2")


def payload(instance="p0", epoch=7, role="prefill", fingerprint=FP, **more):
    fields = msgspec.to_builtins(fingerprint)
    return {
        "role": role,
        "instance_id": instance,
        "epoch": epoch,
        "zmq_addr": "127.0.0.1:9",
        "serving_url": "http://127.0.0.1:8",
        "fingerprint": {"hash": fingerprint.hash, "fields": fields},
        **more,
    }


def names(listed):
    return [x.seat.key.instance_id for x in listed]


def test_registered_then_listed_under_its_role_only():
    registry = Registry(ttl_s=15)
    assert registry.register(payload(), 0.0) == "new"
    assert registry.register(payload(), 1.0) == "renewed"
    assert names(registry.list("prefill", 1.0)) == ["p0"]
    assert registry.list("decode", 1.0) == []


def test_silent_longer_than_the_ttl_is_forgotten_and_may_come_back():
    registry = Registry(ttl_s=15)
    registry.register(payload(), 0.0)
    assert registry.heartbeat(Key("prefill", "p0"), 7, 10.0)
    assert registry.sweep(25.0) == []
    assert registry.sweep(25.1) == [Key("prefill", "p0")]
    assert not registry.heartbeat(Key("prefill", "p0"), 7, 25.2)
    assert registry.register(payload(), 25.3) == "new", "a stalled life may list itself again (V6)"
    assert registry.counters["expired"] == 1


def test_a_list_never_shows_an_expired_seat_even_without_a_sweep():
    registry = Registry(ttl_s=15)
    registry.register(payload(), 0.0)
    assert registry.list("prefill", 15.5) == []
    registry.register(payload(), 16.0)
    assert registry.route("prefill", 31.5) == []


def test_a_newer_life_replaces_and_the_older_one_is_refused_everywhere():
    registry = Registry(ttl_s=15)
    registry.register(payload(epoch=7), 0.0)
    assert registry.register(payload(epoch=9, zmq_addr="127.0.0.1:10"), 1.0) == "replaced"
    key = Key("prefill", "p0")
    assert registry.register(payload(epoch=7), 2.0) == "stale"
    assert not registry.heartbeat(key, 7, 2.0)
    assert not registry.remove(key, 7)
    (listed,) = registry.list("prefill", 2.0)
    assert (listed.seat.epoch, listed.seat.zmq_addr) == (9, "127.0.0.1:10")
    assert registry.counters == {
        "replaced": 1,
        "stale_register": 1,
        "stale_heartbeat": 1,
        "stale_remove": 1,
        "expired": 0,
    }


def test_a_stale_heartbeat_does_not_keep_the_newer_life_alive():
    registry = Registry(ttl_s=15)
    registry.register(payload(epoch=9), 0.0)
    registry.heartbeat(Key("prefill", "p0"), 7, 14.0)
    assert registry.list("prefill", 16.0) == []


def test_a_delayed_put_of_a_life_that_left_does_not_list_it_again():
    registry = Registry(ttl_s=15)
    registry.register(payload(epoch=7), 0.0)
    assert registry.remove(Key("prefill", "p0"), 7)
    assert registry.register(payload(epoch=7), 1.0) == "stale"
    assert registry.register(payload(epoch=8), 2.0) == "new"


def test_an_expired_newer_life_still_fences_the_older_one():
    registry = Registry(ttl_s=15)
    registry.register(payload(epoch=9), 0.0)
    registry.sweep(16.0)
    assert registry.register(payload(epoch=7), 17.0) == "stale"


def test_entries_and_fences_are_bounded():
    registry = Registry(ttl_s=15, max_entries=2)
    assert [registry.register(payload(f"p{i}"), 0.0) for i in range(3)] == ["new", "new", "full"]
    assert registry.register(payload("p0", epoch=8), 0.0) == "replaced", "a held seat may always be renewed"
    for i in range(10):
        assert registry.remove(Key("prefill", "p0" if i == 0 else f"x{i - 1}"), 8)
        assert registry.register(payload(f"x{i}", epoch=8), 0.0) == "new"
    assert len(registry._floor) <= 2


def test_the_asker_learns_which_fields_differ():
    other = msgspec.structs.replace(FP, page_size=8, kv_dtype="bfloat16")
    registry = Registry(ttl_s=15)
    registry.register(payload("same"), 0.0)
    registry.register(payload("other", fingerprint=other), 0.0)
    for asker in (parse_print(FP), FP.hash):
        same, differs = registry.list("prefill", 0.0, asker)
        assert same.reason is None
        assert differs.reason == "kv_dtype: 'bfloat16' there, 'float32' here; page_size: 8 there, 16 here"
    assert all(x.reason is None for x in registry.list("prefill", 0.0)), "no fingerprint asked, none judged"
    (unknown,) = registry.route("prefill", 0.0, instance_id="same", fingerprint="feed")
    assert unknown.reason and "feed" in unknown.reason


def test_a_version_with_another_field_is_named_not_rejected_as_malformed():
    newer = {"hash": "n", "fields": {**msgspec.to_builtins(FP), "topology": "ring"}}
    registry = Registry(ttl_s=15)
    registry.register(payload(fingerprint=FP) | {"fingerprint": newer}, 0.0)
    (listed,) = registry.list("prefill", 0.0, parse_print(FP))
    assert listed.reason == "topology: 'ring' there, 'absent' here"
    assert parse_print(newer) == Print("n", newer["fields"])


def test_route_selects_the_rank_tuple():
    registry = Registry(ttl_s=15)
    registry.register(payload("p0", tp_size=2), 0.0)
    registry.register(payload("p0", tp_rank=1, tp_size=2), 0.0)
    registry.register(payload("p1", tp_rank=1, tp_size=2), 0.0)
    assert names(registry.route("prefill", 0.0)) == ["p0"]
    assert names(registry.route("prefill", 0.0, ranks=(1, 0, 0, 0))) == ["p0", "p1"]
    assert names(registry.route("prefill", 0.0, instance_id="p1", ranks=(1, 0, 0, 0))) == ["p1"]
    assert registry.route("prefill", 0.0, instance_id="p1") == []


@pytest.mark.parametrize("epoch", [1, (1 << 64) - 1, str((1 << 64) - 1), (1 << 53) + 1])
def test_epochs_are_exact_as_number_and_as_text(epoch):
    registry = Registry(ttl_s=15)
    registry.register(payload(epoch=epoch), 0.0)
    (listed,) = registry.list("prefill", 0.0)
    assert listed.seat.epoch == int(epoch)
    assert listed.to_json()["epoch"] == str(int(epoch)), "text, so that no reader rounds it"


@pytest.mark.parametrize(
    ("change", "names_it"),
    [
        ({"epoch": 1e3}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 0}, "epoch"),
        ({"epoch": 1 << 64}, "epoch"),
        ({"epoch": "1e3"}, "epoch"),
        ({"role": "router"}, "role"),
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": "x" * 2000}, "instance_id"),
        ({"zmq_addr": None}, "zmq_addr"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank"),
        ({"dp_rank": "x"}, "dp_rank"),
        ({"fingerprint": "abc"}, "fingerprint"),
        ({"fingerprint": {"fields": {}}}, "hash"),
        ({"fingerprint": {"hash": "h", "fields": {"a": [1]}}}, "fields"),
        ({"fingerprint": {"hash": "h", "fields": {f"f{i}": 1 for i in range(99)}}}, "fields"),
    ],
)
def test_malformed_registrations_are_refused_and_named(change, names_it):
    registry = Registry(ttl_s=15)
    with pytest.raises(BadRegistration, match=names_it):
        registry.register(payload() | change, 0.0)
    assert len(registry) == 0


def test_a_decode_instance_needs_no_side_channel_address():
    assert Registry(ttl_s=15).register(payload("d0", role="decode") | {"zmq_addr": ""}, 0.0) == "new"


def test_a_listing_is_a_value_that_later_changes_do_not_touch():
    registry = Registry(ttl_s=15)
    registry.register(payload(), 0.0)
    (listed,) = registry.list("prefill", 0.0)
    registry.register(payload(epoch=8), 1.0)
    assert listed.seat.epoch == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        listed.reason = "x"


def test_peers_are_what_the_list_says_after_any_sequence():
    """The counts that every heartbeat reads, against a look at each seat."""
    rng = random.Random(5)
    other = msgspec.structs.replace(FP, weights="another")
    registry, now = Registry(ttl_s=10, max_entries=12), 0.0
    seen = set()
    for epoch in range(1, 2000):
        now += rng.random()
        role, name = rng.choice(["prefill", "decode"]), f"i{rng.randrange(8)}"
        known = registry._held.get(Key(role, name))
        if known is not None and rng.random() < 0.3:
            registry.remove(Key(role, name), known.seat.epoch)
        else:
            life = known.seat.epoch if known is not None and rng.random() < 0.3 else epoch
            registry.register(payload(name, life, role, rng.choice([FP, FP, other])), now)
        for asker in (None, FP.hash, parse_print(other), "of nobody"):
            listed = registry.list("prefill", now, asker)
            right = {x.seat.key.instance_id: x.reason for x in listed if x.reason is not None}
            assert registry.peers("prefill", now, asker) == (len(listed) - len(right), right)
            seen.add((bool(right), len(listed) > len(right)))
    assert len(seen) == 4 and registry.counters["expired"] > 100, "every mixture was met"
    assert set(registry._kinds.values()) >= {1} and all(n > 0 for n in registry._kinds.values())
