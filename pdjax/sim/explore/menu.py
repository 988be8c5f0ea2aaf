"""The searches that the project runs, by name, with their pinned sizes.

A change of the table changes sizes: whoever makes it reads the new ones off ``sim check`` and pins them, knowingly.
Must never hold a search that samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.sim.explore.config import Ask, Config


@dataclass(frozen=True)
class Search:
    """deep: too large for every test run (make check-deep)."""

    config: Config
    about: str
    deep: bool = False

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def pinned(self) -> tuple[int, int]:
        """(states, edges) of the table as it stands; (0, 0) is never right."""
        return PINNED.get(self.name, (0, 0))


PINNED = {
    "calm": (685, 1_891),
    "one-room": (20_420, 213_523),
    "one-room-crashes": (44_814, 348_942),
    "one-room-gated": (4_354, 33_462),
    "wrong-candidate": (16_261, 64_043),
    "crossed": (4_352, 11_114),
    "alien": (520, 3_392),
    "room-used-again": (16_568, 59_247),
    "twins": (16_066, 55_660),
    "room-used-again-by-a-new-life": (23_994, 79_741),
    "two-calm": (6_988, 26_998),
    "one-room-crash-d": (41_950, 455_159),
    "one-room-crash-p": (92_185, 978_349),
    "two-abort-p": (111_043, 333_872),
    "two-abort-d": (182_818, 587_810),
    "two-lose": (158_862, 1_324_784),
    "two-duplicate": (9_842, 43_016),
    "two-part-fails": (3_726, 9_046),
    "two-hang": (5_846, 16_026),
    "two-lease": (41_774, 99_588),
    "two-crash-d": (19_098, 61_522),
    "two-crash-p": (71_523, 214_082),
}


ONE = Config(name="one-room")
CALM = ONE.but(
    name="calm", wire=8, prompt=True, lose=False, duplicate=False, part_fails=False, hangs=False, timers=()
)
FEW = CALM.but(wire=2, aborts=(), prompt=False)
TWO = FEW.but(name="two-rooms", asks=(Ask(), Ask(room=8)))
REPEATS = ("hello", "notice")


def _quick() -> list[Search]:
    both = (("p0", 1), ("d0", 1))
    twins = (Ask(), Ask(d="d1", d_digest="b", p_leg=False))
    return [
        Search(CALM, "nothing is lost and no timer fires; aborts anywhere: all ends by messages alone (V7)"),
        Search(ONE, "every loss, duplicate, reordering, abort, part failure, hang and timer"),
        Search(
            ONE.but(name="one-room-crashes", wire=1, crashes=both),
            "the same with a crash and a restart of each side, one message under way each way",
        ),
        Search(
            ONE.but(name="one-room-gated", wire=1, gated=True, bad_legs=True, errors=("p", "d"), incompatible=True),
            "gated P, legs that are refused, engine errors, an incompatible registry",
        ),
        Search(
            ONE.but(
                name="wrong-candidate", wire=1, extra_prefills=("p1",), duplicate=False, hangs=False, part_fails=False,
                timers=("silence",), aborts=("d",),
            ),
            "the registry lists a second P that never gets the leg",
        ),
        Search(
            FEW.but(name="crossed", asks=twins, aborts=("d",), wire=1),
            "two requests with different prompts under one room number, at two D",
        ),
        Search(
            FEW.but(name="twins", asks=(Ask(), Ask(p="p1", d_leg=False)), wire=1, aborts=("p",), errors=("p",)),
            "two P have the leg for one D, and either may end it",
        ),
        Search(FEW.but(name="alien", alien=("d0",), lose=True, duplicate=True), "D runs another model"),
        Search(
            FEW.but(
                name="room-used-again", asks=(Ask(uses=2),), wire=1, aborts=("p", "d"),
                timers=("tombstone", "limbo", "hello", "lease"),
            ),
            "the room number comes a second time, as early or late as it can",
        ),
        Search(
            FEW.but(
                name="room-used-again-by-a-new-life", asks=(Ask(uses=2),), wire=1, crashes=(("d0", 1),),
                timers=("tombstone", "limbo", "hello", "lease"),
            ),
            "D dies, and its next life gets the room number that P still works on",
        ),
        Search(
            TWO.but(name="two-calm", wire=8, prompt=True),
            "two rooms, one page set and one room of budget: both end by messages alone",
        ),
    ]  # fmt: skip


def _deep() -> list[Search]:
    return [
        Search(ONE.but(name="one-room-crash-d", crashes=(("d0", 1),)), "one-room and a crash of D", True),
        Search(ONE.but(name="one-room-crash-p", crashes=(("p0", 1),)), "one-room and a crash of P", True),
        Search(TWO.but(name="two-abort-p", aborts=("p",)), "two rooms, P aborts", True),
        Search(TWO.but(name="two-abort-d", aborts=("d",)), "two rooms, D aborts", True),
        Search(
            TWO.but(name="two-lose", lose=True, timers=REPEATS), "two rooms, loss and repetition", True
        ),
        Search(TWO.but(name="two-duplicate", duplicate=True, wire=1), "two rooms, duplicates", True),
        Search(TWO.but(name="two-part-fails", part_fails=True, wire=1), "two rooms, parts fail", True),
        Search(TWO.but(name="two-hang", hangs=True, timers=("transfer", "graveyard"), wire=1),
               "two rooms, pulls hang until the graveyard timer", True),
        Search(TWO.but(name="two-lease", timers=("lease", "limbo"), wire=1), "two rooms, leases end under a pull", True),
        Search(TWO.but(name="two-crash-d", crashes=(("d0", 1),)), "two rooms, D crashes", True),
        Search(TWO.but(name="two-crash-p", crashes=(("p0", 1),)), "two rooms, P crashes", True),
    ]  # fmt: skip


SEARCHES: dict[str, Search] = {s.name: s for s in (*_quick(), *_deep())}
