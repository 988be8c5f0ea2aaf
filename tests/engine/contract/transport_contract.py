"""What every ``Transport`` must do (protocol §6), written once for the real one and for a simulated one."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pdjax.core.pools import Part
from pdjax.engine.base import Packed
from pdjax.engine.ports import PullDone, PullSettled, Transport, TransportEvent

_uuids = itertools.count(1 << 40)


class TransportPair(ABC):
    """P's transport and D's, started, D verifying every part. events: what D's sink was given, in order."""

    p: Transport
    d: Transport
    events: list[TransportEvent]

    @abstractmethod
    def arrays(self, seed: int, shapes: Sequence[tuple[int, ...]]) -> Packed:
        """Random float32 arrays of these shapes with their parts and checksums: a pure function of its arguments."""

    @abstractmethod
    def equal(self, array: object, packed: Packed, index: int) -> bool:
        """Whether the pulled array has exactly the bytes of packed.arrays[index]."""

    @abstractmethod
    def settle(self, until: Callable[[], bool]) -> None:
        """Let the world run until the condition holds; fail the test when it does not within a bounded time."""

    @abstractmethod
    def idle(self) -> None:
        """Let the world run for longer than any prompt outcome takes."""

    # -------------------------------------------------------------- for the tests

    def uuid(self) -> int:
        return next(_uuids)

    def pull(self, uuid: int, parts: Sequence[Part], *, at: str = "d0", peer: str = "p0") -> int:
        """D pulls from the server that P keeps for ``at``; ``peer`` is D's own key for that server."""
        return self.d.pull(peer, self.p.address_for(at), uuid, parts)

    def of(self, pull_id: int) -> list[TransportEvent]:
        return [e for e in list(self.events) if e.pull_id == pull_id]

    def done(self, pull_id: int) -> PullDone:
        self.settle(lambda: bool(self.of(pull_id)))
        (event,) = self.of(pull_id)
        assert isinstance(event, PullDone), event
        return event

    def assert_right(self, pull_id: int, packed: Packed) -> None:
        event = self.done(pull_id)
        assert event.errors == (None,) * len(packed.parts)
        assert len(event.arrays) == len(packed.parts)
        assert all(self.equal(array, packed, i) for i, array in enumerate(event.arrays))
        assert event.seconds >= 0

    def assert_all_failed(self, pull_id: int, n_parts: int) -> PullDone:
        event = self.done(pull_id)
        assert len(event.errors) == n_parts
        assert all(event.errors), event.errors
        assert all(array is None for array in event.arrays), "a failed part must not hand out an array"
        return event

    def assert_settled(self, pull_id: int) -> None:
        self.settle(lambda: bool(self.of(pull_id)))
        assert self.of(pull_id) == [PullSettled(pull_id)]

    def assert_no_bytes(self, pull_id: int) -> None:
        """Nothing happened so far, or every part failed."""
        for event in self.of(pull_id):
            assert isinstance(event, PullDone)
            assert all(event.errors)
            assert all(array is None for array in event.arrays)

    def assert_healthy(self, *, at: str = "d0", peer: str = "p0") -> None:
        """A fresh hand-off over this pair of servers still works."""
        uuid, packed = self.uuid(), self.arrays(4242, [(3, 5), (2, 7)])
        self.p.offer(at, uuid, packed)
        self.assert_right(self.pull(uuid, packed.parts, at=at, peer=peer), packed)


SHAPES = [(2, 3, 8), (1, 16), (5,)]


class TransportContract:
    """Subclass it and override the fixture ``pair``."""

    @pytest.fixture
    def pair(self) -> TransportPair:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def one_event_a_pull(self, pair: TransportPair):
        yield
        ids = [event.pull_id for event in pair.events]
        assert len(ids) == len(set(ids)), "a pull ended twice"

    # -------------------------------------------------------------- bytes

    def test_bytes_are_right_after_a_pull(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(1, SHAPES)
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)

    def test_many_pulls_at_once_are_not_mixed_up(self, pair):
        offers = [(pair.uuid(), pair.arrays(seed, SHAPES)) for seed in range(16)]
        for uuid, packed in offers:
            pair.p.offer("d0", uuid, packed)
        pulls = [(pair.pull(uuid, packed.parts), packed) for uuid, packed in reversed(offers)]
        assert len({pull_id for pull_id, _ in pulls}) == len(pulls)
        for pull_id, packed in pulls:
            pair.assert_right(pull_id, packed)

    def test_seventy_parts(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(2, [(2, 4)] * 70)
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)

    def test_a_pull_before_the_offer_waits_for_it(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(3, SHAPES)
        pull_id = pair.pull(uuid, packed.parts)
        pair.idle()
        assert pair.of(pull_id) == []
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pull_id, packed)

    # -------------------------------------------------------------- one registration, one pull

    def test_a_second_pull_never_gives_bytes(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(4, SHAPES)
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)
        second = pair.pull(uuid, packed.parts)
        pair.idle()
        pair.assert_no_bytes(second)
        pair.assert_healthy()

    def test_a_uuid_offered_twice_is_refused_and_the_first_stands(self, pair):
        uuid, packed, other = pair.uuid(), pair.arrays(5, SHAPES), pair.arrays(6, SHAPES)
        pair.p.offer("d0", uuid, packed)
        with pytest.raises(ValueError, match=str(uuid)):
            pair.p.offer("d0", uuid, other)
        with pytest.raises(ValueError, match=str(uuid)):
            pair.p.offer("d1", uuid, other)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)
        with pytest.raises(ValueError, match=str(uuid)):
            pair.p.offer("d0", uuid, other)

    def test_a_withdrawn_uuid_cannot_be_offered_again(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(7, SHAPES)
        pair.p.offer("d0", uuid, packed)
        pair.p.withdraw("d0", uuid, 60.0)
        with pytest.raises(ValueError, match=str(uuid)):
            pair.p.offer("d0", uuid, packed)
        pair.assert_all_failed(pair.pull(uuid, packed.parts), len(SHAPES))

    def test_arrays_unlike_their_parts_are_refused(self, pair):
        packed = pair.arrays(8, SHAPES)
        fewer = Packed(packed.parts[:-1], packed.arrays)
        first = msgspec.structs.replace(packed.parts[0], shape=(48,))
        for bad in (fewer, Packed((first, *packed.parts[1:]), packed.arrays), Packed((), ())):
            with pytest.raises(ValueError):
                pair.p.offer("d0", pair.uuid(), bad)

    # -------------------------------------------------------------- withdraw

    @pytest.mark.parametrize("n_parts", [1, 8, 70])
    def test_withdraw_before_the_pull_fails_every_part(self, pair, n_parts):
        uuid, packed = pair.uuid(), pair.arrays(9, [(2, 4)] * n_parts)
        pair.p.offer("d0", uuid, packed)
        pair.p.withdraw("d0", uuid, 60.0)
        pair.assert_all_failed(pair.pull(uuid, packed.parts), n_parts)
        pair.assert_healthy()

    def test_withdraw_can_be_repeated_and_still_fences(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(10, SHAPES)
        pair.p.offer("d0", uuid, packed)
        for _ in range(3):
            pair.p.withdraw("d0", uuid, 60.0)
            pair.assert_all_failed(pair.pull(uuid, packed.parts), len(SHAPES))

    def test_withdraw_after_the_pull_keeps_its_bytes_and_fails_later_ones(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(11, SHAPES)
        pair.p.offer("d0", uuid, packed)
        first = pair.pull(uuid, packed.parts)
        pair.assert_right(first, packed)
        pair.p.withdraw("d0", uuid, 60.0)
        pair.assert_all_failed(pair.pull(uuid, packed.parts), len(SHAPES))
        pair.assert_right(first, packed)

    def test_a_pull_parked_on_a_consumed_uuid_fails_at_withdraw(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(12, [(2, 4)] * 70)
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)
        parked = pair.pull(uuid, packed.parts)
        pair.p.withdraw("d0", uuid, 60.0)
        pair.assert_all_failed(parked, 70)

    def test_withdraw_racing_a_pull_gives_right_bytes_or_errors(self, pair):
        for seed in range(12):
            uuid, packed = pair.uuid(), pair.arrays(seed, [(16, 1024)] * 8)
            pair.p.offer("d0", uuid, packed)
            pull_id = pair.pull(uuid, packed.parts)
            pair.p.withdraw("d0", uuid, 60.0)
            event = pair.done(pull_id)
            for i, (error, array) in enumerate(zip(event.errors, event.arrays, strict=True)):
                assert error is not None or pair.equal(array, packed, i)
        pair.assert_healthy()

    def test_withdraw_of_what_was_never_offered_does_nothing(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(13, SHAPES)
        pair.p.withdraw("d0", uuid, 60.0)  # no server yet
        pair.assert_healthy()
        pair.p.withdraw("d0", uuid, 60.0)
        pair.p.offer("d0", uuid, packed)
        pair.p.address_for("d1")
        pair.p.withdraw("d1", uuid, 60.0)  # another peer's word
        pair.assert_right(pair.pull(uuid, packed.parts), packed)

    # -------------------------------------------------------------- parts fail one by one

    def test_a_wrong_checksum_is_an_error_of_that_part_only(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(14, SHAPES)
        pair.p.offer("d0", uuid, packed)
        parts = list(packed.parts)
        parts[1] = msgspec.structs.replace(parts[1], checksum=parts[1].checksum ^ 1)
        self._only_part_1_failed(pair, pair.pull(uuid, parts), packed)

    @pytest.mark.parametrize("shape", [(1, 32), (1, 8)], ids=["larger", "smaller"])
    def test_a_wrong_shape_is_an_error_of_that_part_only(self, pair, shape):
        uuid, packed = pair.uuid(), pair.arrays(15, SHAPES)
        pair.p.offer("d0", uuid, packed)
        parts = list(packed.parts)
        parts[1] = msgspec.structs.replace(parts[1], shape=shape, nbytes=4 * shape[1])
        self._only_part_1_failed(pair, pair.pull(uuid, parts), packed)
        pair.assert_healthy()

    def _only_part_1_failed(self, pair: TransportPair, pull_id: int, packed: Packed) -> None:
        event = pair.done(pull_id)
        assert [error is not None for error in event.errors] == [False, True, False], event.errors
        assert event.arrays[1] is None
        assert pair.equal(event.arrays[0], packed, 0)
        assert pair.equal(event.arrays[2], packed, 2)

    def test_surplus_parts_fail_and_the_others_are_right(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(16, SHAPES)
        pair.p.offer("d0", uuid, packed)
        event = pair.done(pair.pull(uuid, [*packed.parts, packed.parts[0]]))
        assert event.errors[:3] == (None, None, None)
        assert event.errors[3] is not None

    @pytest.mark.parametrize(
        "change",
        [{"shape": (0, 16), "nbytes": 0}, {"nbytes": 63}, {"dtype": "float33"}, {"sharding": "x4"}],
        ids=["zero size", "nbytes", "dtype", "sharding"],
    )
    def test_a_malformed_part_fails_the_pull_before_it_starts(self, pair, change):
        uuid, packed = pair.uuid(), pair.arrays(17, SHAPES)
        pair.p.offer("d0", uuid, packed)
        parts = [packed.parts[0], msgspec.structs.replace(packed.parts[1], **change), packed.parts[2]]
        event = pair.assert_all_failed(pair.pull(uuid, parts), 3)
        assert event.errors[0] == event.errors[2] != event.errors[1]
        pair.assert_right(pair.pull(uuid, packed.parts), packed)  # nothing was consumed

    def test_a_malformed_address_is_an_error_of_every_part(self, pair):
        packed = pair.arrays(18, SHAPES)
        for address in ("nonsense", "some.host:80", "127.0.0.1:0", ""):
            pair.assert_all_failed(pair.d.pull("p0", address, pair.uuid(), packed.parts), 3)
        pair.assert_healthy()

    def test_a_pull_of_nothing_is_refused(self, pair):
        with pytest.raises(ValueError):
            pair.pull(pair.uuid(), ())

    # -------------------------------------------------------------- abandon

    def test_an_abandoned_pull_settles_when_the_bytes_come(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(19, SHAPES)
        pull_id = pair.pull(uuid, packed.parts)
        pair.d.abandon(pull_id)
        pair.idle()
        assert pair.of(pull_id) == [], "nothing has made it quiescent yet"
        pair.p.offer("d0", uuid, packed)
        pair.assert_settled(pull_id)
        pair.assert_healthy()

    def test_an_abandoned_pull_settles_at_withdraw(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(20, [(2, 4)] * 70)
        pair.p.offer("d0", uuid, packed)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)
        parked = pair.pull(uuid, packed.parts)
        pair.d.abandon(parked)
        pair.d.abandon(parked)
        pair.p.withdraw("d0", uuid, 60.0)
        pair.assert_settled(parked)

    def test_abandon_of_an_ended_or_unknown_pull_does_nothing(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(21, SHAPES)
        pair.p.offer("d0", uuid, packed)
        pull_id = pair.pull(uuid, packed.parts)
        pair.assert_right(pull_id, packed)
        pair.d.abandon(pull_id)
        pair.d.abandon(10**9)
        pair.idle()
        assert len(pair.of(pull_id)) == 1

    # -------------------------------------------------------------- drop_peer and isolation

    def test_drop_peer_settles_abandoned_pulls_and_fails_the_others(self, pair):
        packed = pair.arrays(22, SHAPES)
        abandoned, live = (pair.pull(pair.uuid(), packed.parts) for _ in range(2))
        pair.d.abandon(abandoned)
        pair.idle()
        assert pair.of(abandoned) == pair.of(live) == []
        pair.d.drop_peer("p0")
        pair.assert_settled(abandoned)
        pair.assert_all_failed(live, 3)
        pair.assert_healthy()

    def test_a_peer_dropped_on_p_can_be_served_again(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(23, SHAPES)
        pair.p.offer("d0", uuid, packed)
        pair.p.drop_peer("d0")
        pair.d.drop_peer("p0")
        pair.assert_healthy()
        with pytest.raises(ValueError, match=str(uuid)):
            pair.p.offer("d0", uuid, packed)
        late = pair.pull(uuid, packed.parts)
        pair.idle()
        pair.assert_no_bytes(late)

    def test_a_uuid_belongs_to_the_peer_it_was_offered_to(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(24, SHAPES)
        pair.p.offer("d0", uuid, packed)
        stranger = pair.pull(uuid, packed.parts, at="d1", peer="p1")
        pair.idle()
        pair.assert_no_bytes(stranger)
        pair.assert_right(pair.pull(uuid, packed.parts), packed)

    def test_dropping_one_peer_leaves_the_others_alone(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(25, SHAPES)
        other = pair.pull(uuid, packed.parts, at="d1", peer="p1")
        mine = pair.pull(pair.uuid(), packed.parts)
        pair.d.drop_peer("p0")
        pair.p.drop_peer("d0")
        pair.assert_all_failed(mine, 3)
        assert pair.of(other) == []
        pair.p.offer("d1", uuid, packed)
        pair.assert_right(other, packed)
        pair.assert_healthy(at="d1", peer="p1")

    def test_dropping_an_unknown_peer_does_nothing(self, pair):
        pair.p.drop_peer("nobody")
        pair.d.drop_peer("nobody")
        pair.assert_healthy()

    def test_an_address_stays_while_the_peer_is_served(self, pair):
        first = pair.p.address_for("d0")
        assert pair.p.address_for("d0") == first
        assert pair.p.address_for("d1") != first
        ip, _, port = first.rpartition(":")
        assert ip
        assert 0 < int(port) < 65536

    @pytest.mark.parametrize("seed", [1, 2])
    def test_random_churn_never_gives_wrong_bytes_and_leaves_nothing(self, pair, seed):
        """Offers, pulls, withdrawals, abandons and dropped peers in random order, two peers at once."""
        rng = random.Random(seed)
        kinds = [pair.arrays(k, [(16, 64)] * 6) for k in range(8)]
        lives = [0, 0]
        pulls: dict[int, tuple[Packed, bool]] = {}  # pull id → truth, abandoned
        for _ in range(250):
            side = rng.randrange(2)
            at, peer = f"d{side}:{lives[side]}", f"p{side}:{lives[side]}"
            uuid, packed = pair.uuid(), rng.choice(kinds)
            pair.p.offer(at, uuid, packed)
            if rng.random() < 0.1:
                pair.p.withdraw(at, uuid, 60.0)
            pull_id = pair.pull(uuid, packed.parts, at=at, peer=peer)
            abandoned = rng.random() < 0.3
            if abandoned:
                pair.d.abandon(pull_id)
            pulls[pull_id] = (packed, abandoned)
            if rng.random() < 0.3:
                pair.p.withdraw(at, uuid, 60.0)
            if rng.random() < 0.02:
                pair.d.drop_peer(peer)
                pair.p.drop_peer(at)
                lives[side] += 1
            if rng.random() < 0.1:
                pair.settle(lambda: len(pair.events) >= len(pulls) - 8)
        pair.settle(lambda: len(pair.events) == len(pulls))
        n_right = 0
        for event in pair.events:
            packed, abandoned = pulls[event.pull_id]
            if isinstance(event, PullDone):  # also an abandoned one, when it had ended before
                good = [i for i, error in enumerate(event.errors) if error is None]
                assert all(pair.equal(event.arrays[i], packed, i) for i in good)
                n_right += len(good) == len(packed.parts)
            else:
                assert abandoned
        assert n_right > 50

    # -------------------------------------------------------------- the end

    def test_close_ends_every_pull_and_nothing_follows(self, pair):
        packed = pair.arrays(26, SHAPES)
        live, abandoned = (pair.pull(pair.uuid(), packed.parts) for _ in range(2))
        pair.d.abandon(abandoned)
        pair.d.close(0.0)
        pair.assert_all_failed(live, 3)
        pair.assert_settled(abandoned)
        pair.d.close(0.0)
        pair.p.close(0.0)
        seen = len(pair.events)
        pair.idle()
        assert len(pair.events) == seen

    def test_close_of_p_fails_later_pulls(self, pair):
        uuid, packed = pair.uuid(), pair.arrays(27, SHAPES)
        pair.p.offer("d0", uuid, packed)
        address = pair.p.address_for("d0")
        pair.p.close(0.0)
        late = pair.d.pull("p0", address, uuid, packed.parts)
        pair.idle()
        pair.assert_no_bytes(late)
