"""A seed repeats what each client posts and each fault, however fast the processes are; a stop meets hand-offs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from pdjax.campaign import chaos, soak, states
from pdjax.campaign.chaos import Chaos
from pdjax.campaign.client import Record
from pdjax.campaign.drawn import prompts
from pdjax.campaign.neighbours import Crowd
from pdjax.campaign.rounds import HURT, KINDS, wishes
from pdjax.campaign.soak import CLIENTS, Client, Run, Soak

MANY = 40


class Clients(Run):
    """Whose answers take as long as a machine of that mood makes them."""

    def __init__(self, seed: int, turns: int) -> None:
        super().__init__(SimpleNamespace(instances=[]), None, Soak(seed, 0.0))
        self.turns, self.posted = turns, {}

    async def _ask(self, body):
        number = int(body["rid"].removeprefix("s").partition("-")[0])
        self.posted.setdefault(number, []).append(body)
        for _ in range(1 + (self.turns * number) % 7):
            await asyncio.sleep(0)
        return "ok"

    def _goes_on(self):
        return any(len(self.posted.get(number, [])) < MANY for number in range(CLIENTS))


async def posted(seed: int, turns: int):
    run = Clients(seed, turns)
    try:
        await asyncio.gather(*(run._post_all(client) for client in run._clients))
    finally:
        await run._http.aclose()
    return {number: bodies[:MANY] for number, bodies in run.posted.items()}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(soak, "DELAY_S", 1e-4)
    monkeypatch.setattr(chaos, "EVERY_S", (0.0, 1e-3))
    monkeypatch.setattr(chaos, "AWAY_S", 1e-3)


def test_each_client_posts_the_same_however_fast_the_others_are():
    one, other = asyncio.run(posted(3, 0)), asyncio.run(posted(3, 5))
    assert one == other and len(one) == CLIENTS
    assert one[0] != one[1]
    assert asyncio.run(posted(4, 0)) != one


class Faults(Chaos):
    """Which draws again after its process has taken its time, as a restart does."""

    def __init__(self, seed: int, turns: int) -> None:
        super().__init__(SimpleNamespace(instances=["p0"]), seed, Counter())
        self.turns, self.drawn, self.numbers = turns, {}, itertools.count()

    def _draw(self, rng):
        return self._two(next(self.numbers), rng)

    async def _two(self, number, rng):
        first = rng.random()
        for _ in range(self.turns * (number % 5)):
            await asyncio.sleep(1e-3)
        self.drawn[number] = (first, rng.random())


def drawn(seed: int, turns: int):
    faults = Faults(seed, turns)
    left = itertools.count(1)
    asyncio.run(faults.run(lambda: next(left) <= 12))
    return faults.drawn


def test_each_fault_is_the_same_however_long_another_one_takes():
    assert drawn(3, 0) == drawn(3, 3) != drawn(4, 0)
    assert len(drawn(3, 0)) == 12


class Remote:
    def __init__(self, name):
        self.name, self.told = name, []

    async def do(self, what, **more):
        self.told.append((what, more))


class Processes:
    """A fleet of names: who is killed, stopped and started."""

    def __init__(self):
        self.instances = ["p0", "p1", "d0", "d1"]
        self.seats = {name: SimpleNamespace(remote=Remote(name)) for name in self.instances}
        self.away: set[str] = set()

    def kill(self, name):
        assert name not in self.away
        self.away.add(name)
        assert name == "b0" or len([n for n in self.away if n[0] == name[0]]) == 1

    stop = kill

    async def start(self, name):
        self.away.discard(name)

    def go_on(self, name):
        self.away.discard(name)

    async def ready(self, name):
        pass


def test_every_kind_of_fault_is_made_and_one_of_each_role_stays_well(monkeypatch):
    monkeypatch.setattr(chaos, "STOPPED_S", (1e-3, 2e-3))
    processes, faults, left = Processes(), Counter(), itertools.count(1)
    made = Chaos(processes, 1, faults)
    asyncio.run(made.run(lambda: next(left) <= 300))
    assert made.errors == [] and processes.away == made.hurting == set()
    kinds = {what.split()[-1] if what.split()[0] in "pd" else what.split()[0] for what in faults}
    assert {"killed", "stopped", "registry", "message", "transfer"} <= kinds
    assert {what for what in faults if what.endswith("raises")} == {
        f"{where} raises" for where in itertools.chain(*chaos.WORK.values())
    }


def test_a_fault_that_cannot_be_made_is_told():
    processes, left = Processes(), itertools.count(1)

    async def never(name):
        raise RuntimeError("no port")

    processes.start = never
    made = Chaos(processes, 1, Counter())
    asyncio.run(made.run(lambda: next(left) <= 30))
    assert made.hurting == processes.away and "b0" in made.hurting
    assert len(made.errors) == len(made.hurting) and all("no port" in error for error in made.errors)


def test_requests_of_the_rounds_are_drawn_in_their_order():
    one, other = (list(itertools.islice(wishes(seed), 2000)) for seed in (1, 2))
    assert one == list(itertools.islice(wishes(1), 2000)) != other
    assert [wish.room for wish in one] == list(range(1, 2001))
    hurt = [wish.kind for wish in one if wish.kind]
    assert set(hurt) == set(KINDS) and HURT / 2 < len(hurt) / len(one) < HURT * 2


def test_shares_of_the_requests_are_as_stated():
    client = Client("0", 1, prompts(1, 4))
    ways = Counter(client.next()[1] for _ in range(4000))
    assert ways["left"] / 4000 == pytest.approx(soak.LEFT, rel=0.3)
    assert ways["aborted"] / 4000 == pytest.approx(soak.ABORTED, rel=0.3)


# ---------------------------------------------------------------- a stop in the middle of hand-offs


def records():
    return [Record(name, {}, [], {}, [], 0.0) for name in "ab"]


def crowd(in_flight):
    async def state(name):
        return {"in_flight": in_flight[name].pop(0) if len(in_flight[name]) > 1 else in_flight[name][0]}

    return Crowd(SimpleNamespace(state=state, log_files=list), None)


def test_a_hand_off_is_waited_for_before_its_instance_is_stopped():
    own = [("p1", "d0"), ("p1", "d1")]
    in_flight = {"d0": [0], "d1": [0, 0, 0, 1]}
    assert asyncio.run(crowd(in_flight)._under_way(own, records()))
    assert in_flight["d1"] == [1]  # it was looked at until then


def test_without_a_hand_off_a_stop_shows_nothing(monkeypatch):
    own, ended = [("p0", "d1")], records()
    for record in ended:
        record.ended.set()
    assert not asyncio.run(crowd({"d1": [0]})._under_way(own, ended))
    monkeypatch.setattr(states, "REACH_S", 0.05)
    assert not asyncio.run(crowd({"d1": [0]})._under_way(own, records()))
