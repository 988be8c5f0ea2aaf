"""What each side notes of its rooms for each peer, beside a walk over all of them, after each event of random worlds."""

from collections import Counter

from pdjax.core.receiver import ReceiverSide
from pdjax.core.sender import SenderSide
from pdjax.sim.draw import draw
from pdjax.sim.replay import run_trace

SEEDS = range(12)


def walked_by_d(side, peer):
    return [
        r.room
        for r in side.rooms.values()
        if peer in r.notices or (r.live and (r.bound == peer or peer in r.candidates))
    ]


def walked_by_p(side, peer, epoch):
    bound = [r.room for r in side.rooms.values() if r.live and r.peer == peer and r.peer_epoch < epoch]
    limbo = [k.room for k, v in side.limbo.items() if k.peer == peer and v.epoch < epoch]
    return list(dict.fromkeys(bound + limbo))


def test_what_is_noted_of_rooms_and_peers_is_what_a_walk_finds(monkeypatch):
    named = Counter()  # how many rooms a peer had, of both roles: that the walk compares something

    def watch(side_of, compare):
        handle = side_of.handle

        def watched(self, *args, **kwargs):
            try:
                return handle(self, *args, **kwargs)
            finally:
                compare(self)

        monkeypatch.setattr(side_of, "handle", watched)

    def compare_d(side):
        assert side.n_notices == sum(len(r.notices) for r in side.rooms.values())
        peers = {p for r in side.rooms.values() for p in (r.bound, *r.candidates, *r.notices) if p}
        for peer in sorted(peers):
            found = side.rooms_of(peer)
            assert found == walked_by_d(side, peer)
            named["d", min(len(found), 2)] += 1
        assert set(side._by_peer._of) <= peers

    def compare_p(side):
        lives = {(r.peer, r.peer_epoch + more) for r in side.rooms.values() if r.peer for more in (0, 1)}
        for peer, epoch in sorted(lives):
            found = side.rooms_of_older_life(peer, epoch)
            assert found == walked_by_p(side, peer, epoch)
            named["p", min(len(found), 2)] += 1
        assert set(side._by_peer._of) <= {peer for peer, _ in lives}

    watch(ReceiverSide, compare_d)
    watch(SenderSide, compare_p)
    for seed in SEEDS:
        run_trace(draw(seed))
    assert min(named[role, n] for role in "pd" for n in range(3)) > 50, named
