"""The searches that the project runs, by name, with their pinned sizes.

A change of the table changes sizes: whoever makes it reads the new ones off ``sim check`` and pins them, knowingly.
Must never hold a search that samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.sim.explore.config import Ask, Config


@dataclass(frozen=True)
class Search:
    """deep: too large for every test run (make check-deep). states, edges: pinned, 0 while not pinned."""

    config: Config
    about: str
    states: int
    edges: int
    deep: bool = False

    @property
    def name(self) -> str:
        return self.config.name


ONE = Config(name="one-room")
CALM = ONE.but(
    name="calm", wire=8, prompt=True, lose=False, duplicate=False, part_fails=False, hangs=False, timers=()
)
FEW = CALM.but(wire=2, aborts=(), prompt=False)
TWO = FEW.but(name="two-rooms", asks=(Ask(), Ask(room=8)))
REPEATS = ("hello", "notice")


def _searches() -> list[Search]:
    both = (("p0", 1), ("d0", 1))
    twins = (Ask(), Ask(d="d1", d_digest="b", p_leg=False))
    return [
        Search(CALM, "nothing is lost and no timer fires; aborts anywhere: all ends by messages alone (V7)", 0, 0),
        Search(ONE, "every loss, duplicate, reordering, abort, part failure, hang and timer", 0, 0),
        Search(
            ONE.but(name="one-room-crashes", wire=1, crashes=both),
            "the same with a crash and a restart of each side, one message under way each way", 0, 0,
        ),
        Search(
            ONE.but(name="one-room-gated", wire=1, gated=True, bad_legs=True, errors=("p", "d"), incompatible=True),
            "gated P, legs that are refused, engine errors, an incompatible registry", 0, 0,
        ),
        Search(
            ONE.but(
                name="wrong-candidate", wire=1, extra_prefills=("p1",), duplicate=False, hangs=False, part_fails=False,
                timers=("silence",), aborts=("d",),
            ),
            "the registry lists a second P that never gets the leg", 0, 0,
        ),
        Search(
            FEW.but(name="crossed", asks=twins, aborts=("d",), wire=1),
            "two requests with different prompts under one room number, at two D", 0, 0,
        ),
        Search(FEW.but(name="alien", alien=("d0",), lose=True, duplicate=True), "D runs another model", 0, 0),
        Search(
            TWO.but(name="two-calm", wire=8, prompt=True),
            "two rooms, one page set and one room of budget: both end by messages alone", 0, 0,
        ),
        Search(ONE.but(name="one-room-crash-d", crashes=(("d0", 1),)), "one-room and a crash of D", 0, 0, True),
        Search(ONE.but(name="one-room-crash-p", crashes=(("p0", 1),)), "one-room and a crash of P", 0, 0, True),
        Search(TWO.but(name="two-abort-p", aborts=("p",)), "two rooms, P aborts", 0, 0, True),
        Search(TWO.but(name="two-abort-d", aborts=("d",), wire=1), "two rooms, D aborts", 0, 0, True),
        Search(
            TWO.but(name="two-lose", lose=True, timers=REPEATS, wire=1), "two rooms, loss and repetition", 0, 0, True
        ),
        Search(TWO.but(name="two-duplicate", duplicate=True, wire=1), "two rooms, duplicates", 0, 0, True),
        Search(TWO.but(name="two-part-fails", part_fails=True, wire=1), "two rooms, parts fail", 0, 0, True),
        Search(TWO.but(name="two-hang", hangs=True, timers=("transfer", "graveyard"), wire=1),
               "two rooms, pulls hang until the graveyard timer", 0, 0, True),
        Search(TWO.but(name="two-lease", timers=("lease", "limbo"), wire=1), "two rooms, leases end under a pull", 0, 0, True),
        Search(TWO.but(name="two-crash-d", crashes=(("d0", 1),), wire=1), "two rooms, D crashes", 0, 0, True),
        Search(TWO.but(name="two-crash-p", crashes=(("p0", 1),), wire=1), "two rooms, P crashes", 0, 0, True),
    ]  # fmt: skip


SEARCHES: dict[str, Search] = {s.name: s for s in _searches()}
