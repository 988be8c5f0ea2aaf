"""Who is there: the table behind the bootstrap server, as a pure object (RFC-2 §5.3).

The HTTP server and the simulator run this code unchanged: time is passed in, nothing is read. It knows seats and
lives, never rooms (protocol §3). Must never read a clock, open a socket, or trust a field before checking it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pdjax.core.pools import Fingerprint

DEFAULT_PORT = 8998  # sglang's; RFC-2's 8000 is everybody's HTTP port (design §5)
MAX_ENTRIES = 4096
MAX_TEXT_CHARS = 1024
MAX_FIELDS = 64
MAX_DEPTH = (
    8  # of what a registration may nest: a deep one could be read, but never written into an answer again
)
UINT64_MAX = (1 << 64) - 1
ROUNDING_S = 1e-6  # of times that are added and compared

Registered = Literal["new", "renewed", "replaced", "stale", "full"]


class BadRegistration(ValueError):
    """The caller's message is malformed. The text names the field; the server answers 400 with it."""


class Key(NamedTuple):
    """A seat in the deployment (RFC-2 §5.3: the complete rank tuple, so that instances never collide)."""

    role: str
    instance_id: str
    tp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.instance_id} tp{self.tp_rank} cp{self.cp_rank} dp{self.dp_rank} pp{self.pp_rank}"


@dataclass(frozen=True)
class Print:
    """A fingerprint as the registry sees it: the hash decides, the fields only explain.

    The fields are opaque, so that a newer version with more of them can roll in beside an older one.
    """

    hash: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Seat:
    """One registered life of one seat. payload is the JSON that was registered, without what the registry adds."""

    key: Key
    epoch: int
    zmq_addr: str
    transfer_addr: str
    serving_url: str
    fingerprint: Print
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class Listed:
    """A seat as one asker sees it. reason is None when it is compatible. draining: it takes nothing new."""

    seat: Seat
    age_s: float
    reason: str | None
    draining: bool = False

    def to_json(self) -> dict[str, Any]:
        """epoch is text, so that no JSON reader rounds it (S8)."""
        out = dict(self.seat.payload)
        out.update(
            epoch=str(self.seat.epoch),
            age_s=round(self.age_s, 3),
            compatible=self.reason is None,
            reason=self.reason,
            draining=self.draining,
        )
        return out


@dataclass
class _Held:
    seat: Seat
    heard: float
    draining: bool = False


def _text(payload: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    value = payload.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise BadRegistration(f"{name} must be a non-empty string, got {value!r:.80}")
    if len(value) > MAX_TEXT_CHARS:
        raise BadRegistration(f"{name} is longer than {MAX_TEXT_CHARS} characters")
    return value


def parse_uint(value: Any, name: str, maximum: int = UINT64_MAX) -> int:
    """An exact integer from JSON: a number or decimal text, never a float or a bool (S8)."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or not 0 <= value <= maximum:
        raise BadRegistration(
            f"{name} must be an integer in [0, {maximum}] as a number or text, got {value!r:.80}"
        )
    return value


def _url(payload: Mapping[str, Any], name: str) -> str:
    """Text that urlsplit takes: each D reads it in every look-up."""
    text = _text(payload, name)
    try:
        urlsplit(text)
    except ValueError as error:
        raise BadRegistration(f"{name} is no URL ({error}): {text!r:.80}") from None
    return text


def _shallow(value: Any, name: str, depth: int = MAX_DEPTH) -> None:
    """Fields of newer versions are kept as they are, so their nesting is bounded here."""
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    if inner and depth == 0:
        raise BadRegistration(f"{name!s:.40} is nested deeper than {MAX_DEPTH} levels")
    for one in inner:
        _shallow(one, name, depth - 1)


def parse_key(payload: Mapping[str, Any]) -> Key:
    """The seat that a payload, a heartbeat or a query names. Ranks left out are 0."""
    role = payload.get("role")
    if role not in ("prefill", "decode"):
        raise BadRegistration(f'role must be "prefill" or "decode", got {role!r:.80}')
    instance = _text(payload, "instance_id", required=True)
    ranks = (
        parse_uint(payload.get(f"{axis}_rank", 0), f"{axis}_rank", 1 << 20)
        for axis in ("tp", "cp", "dp", "pp")
    )
    return Key(role, instance, *ranks)


def parse_print(value: Any) -> Print:
    """{"hash", "fields"}, as registered. A Fingerprint object is taken too (the simulator passes it directly)."""
    if isinstance(value, Fingerprint):
        return Print(value.hash, {name: getattr(value, name) for name in value.__struct_fields__})
    if not isinstance(value, Mapping):
        raise BadRegistration('fingerprint must be an object {"hash": text, "fields": object}')
    digest = _text(value, "hash", required=True)
    fields = value.get("fields", {})
    if not isinstance(fields, Mapping) or len(fields) > MAX_FIELDS:
        raise BadRegistration(f"fingerprint.fields must be an object of at most {MAX_FIELDS} fields")
    for name, content in fields.items():
        if (
            not isinstance(content, (str, int, float, bool, type(None)))
            or len(f"{name}{content}") > MAX_TEXT_CHARS
        ):
            raise BadRegistration(f"fingerprint.fields.{name!s:.40} must be a short text or a number")
    return Print(digest, dict(fields))


def parse_seat(payload: Mapping[str, Any]) -> Seat:
    """Check a registration (RFC-2 §5.3 plus epoch, fingerprint, serving_url). Raises BadRegistration."""
    key = parse_key(payload)
    epoch = parse_uint(payload.get("epoch"), "epoch")
    if epoch == 0:
        raise BadRegistration("epoch 0 means 'none yet' in the protocol; a life must have a greater one")
    for axis, rank in zip(("tp", "cp", "dp", "pp"), key[2:], strict=True):
        size = parse_uint(payload.get(f"{axis}_size", 1), f"{axis}_size", 1 << 20)
        if rank >= size:
            raise BadRegistration(f"{axis}_rank = {rank} must be below {axis}_size = {size}")
    known = parse_print(payload.get("fingerprint"))
    stored = {name: value for name, value in payload.items() if name not in ("epoch", "fingerprint")}
    for name, value in stored.items():
        _shallow(value, name)
    stored["fingerprint"] = {"hash": known.hash, "fields": dict(known.fields)}
    return Seat(
        key=key,
        epoch=epoch,
        zmq_addr=_text(payload, "zmq_addr", required=key.role == "prefill"),
        transfer_addr=_text(payload, "transfer_addr"),
        serving_url=_url(payload, "serving_url"),
        fingerprint=known,
        payload=stored,
    )


def explain(asker: Print, other: Print) -> str:
    """One line that names what differs between two fingerprints (hashes are known to differ)."""
    if not asker.fields or not other.fields:
        return f"fingerprint {other.hash} there, {asker.hash} here (one side sent no fields to compare)"
    absent = "absent"
    names = [*asker.fields, *(name for name in other.fields if name not in asker.fields)]
    parts = [
        f"{name}: {other.fields.get(name, absent)!r} there, {asker.fields.get(name, absent)!r} here"
        for name in names
        if asker.fields.get(name, absent) != other.fields.get(name, absent)
    ]
    return "; ".join(parts) or f"fingerprint {other.hash} there, {asker.hash} here, though all fields agree"


class Registry:
    """Not thread-safe: one owner calls it. ``now`` is the owner's monotonic seconds and never goes back.

    counters: stale_register, stale_heartbeat, stale_remove, unknown_heartbeat, expired, replaced, full.
    """

    def __init__(self, ttl_s: float, max_entries: int = MAX_ENTRIES) -> None:
        self.ttl_s = ttl_s
        self.max_entries = max_entries
        self.counters: Counter[str] = Counter()
        self._held: dict[Key, _Held] = {}
        # Smallest epoch that a vacated seat still accepts, and until when: a delayed message of a life that has
        # left must not list it again (S5). After that the TTL bounds the harm.
        self._floor: dict[Key, tuple[int, float]] = {}
        self._kinds: Counter[tuple[str, str]] = Counter()  # (role, fingerprint hash) → seats held
        self._now = 0.0
        # Before this time nothing can expire: a beat only moves that on, and what is added lives for a whole TTL.
        self._calm_until = float("-inf")

    def __len__(self) -> int:
        return len(self._held)

    def register(self, payload: Mapping[str, Any], now: float) -> Registered:
        """Take a seat for a life. "stale": a newer life holds it; "full": max_entries seats are held.

        Repeating a registration renews it. Raises BadRegistration.
        """
        seat = parse_seat(payload)
        self.sweep(now)
        held = self._held.get(seat.key)
        if seat.epoch < (held.seat.epoch if held else self._floor.get(seat.key, (0, 0.0))[0]):
            self.counters["stale_register"] += 1
            return "stale"
        if held is None and len(self._held) >= self.max_entries:
            self.counters["full"] += 1
            return "full"
        self._floor.pop(seat.key, None)
        if held is not None:
            self._count(held, -1)
        taken = self._held[seat.key] = _Held(seat, now, payload.get("draining") is True)
        self._count(taken, 1)
        if held is None:
            return "new"
        if held.seat.epoch == seat.epoch:
            return "renewed"
        self.counters["replaced"] += 1
        return "replaced"

    def heartbeat(self, key: Key, epoch: int, now: float, *, draining: bool = False) -> bool:
        """False: this life is not listed (never was, has expired, or is older than the listed one).

        draining: from now on it takes nothing new. It counts as nobody's peer and ``list`` leaves it out; ``route``
        goes on naming it, because a D must still find the P of a room that it has taken before (V12).
        """
        self.sweep(now)
        held = self._held.get(key)
        if held is None or held.seat.epoch != epoch:
            older = held is not None and epoch < held.seat.epoch
            self.counters["stale_heartbeat" if older else "unknown_heartbeat"] += 1
            return False
        held.heard = now
        if draining and not held.draining:
            self._count(held, -1)
            held.draining = True
        return True

    def remove(self, key: Key, epoch: int) -> bool:
        """Leave the seat. False: this life does not hold it, nothing changes."""
        held = self._held.get(key)
        if held is None or held.seat.epoch != epoch:
            self.counters["stale_remove"] += held is not None
            return False
        self._vacate(key, epoch + 1)
        return True

    def sweep(self, now: float) -> list[Key]:
        """Forget the seats that were silent for longer than the TTL, and return them (RFC-2 §5.3)."""
        self._now = max(self._now, now)
        if now < self._calm_until:
            return []
        late = [key for key, held in self._held.items() if now - held.heard > self.ttl_s]
        for key in late:
            # The same life may come back: it may only have been stalled (V6).
            self._vacate(key, self._held[key].seat.epoch)
        self.counters["expired"] += len(late)
        for key in [key for key, (_, until) in self._floor.items() if now > until]:
            del self._floor[key]
        heard = min((held.heard for held in self._held.values()), default=now)
        floors = min((until for _, until in self._floor.values()), default=now + self.ttl_s)
        self._calm_until = min(heard + self.ttl_s, floors) - ROUNDING_S
        return late

    def _vacate(self, key: Key, floor: int) -> None:
        self._count(self._held.pop(key), -1)
        self._floor.pop(key, None)
        while len(self._floor) >= self.max_entries:
            del self._floor[next(iter(self._floor))]
        self._floor[key] = (floor, self._now + self.ttl_s)

    def _count(self, held: _Held, n: int) -> None:
        """_kinds counts the seats that take requests."""
        if held.draining:
            return
        kind = held.seat.key.role, held.seat.fingerprint.hash
        self._kinds[kind] += n
        if not self._kinds[kind]:
            del self._kinds[kind]

    def peers(self, role: str, now: float, fingerprint: Print | str | None) -> tuple[int, dict[str, str]]:
        """How many seats of a role fit the asker, and why each other one does not.

        Every heartbeat asks, so where all fit it does not look at each seat (docs/performance.md).
        """
        self.sweep(now)
        asker = self._asker(fingerprint)
        total = sum(n for (held_role, _), n in self._kinds.items() if held_role == role)
        fitting = total if asker is None else self._kinds[role, asker.hash]
        if fitting == total:
            return total, {}
        seats = self.list(role, now, asker)
        return fitting, {
            listed.seat.key.instance_id: listed.reason for listed in seats if listed.reason is not None
        }

    def route(
        self,
        role: str,
        now: float,
        *,
        instance_id: str | None = None,
        ranks: tuple[int, int, int, int] = (0, 0, 0, 0),
        fingerprint: Print | str | None = None,
    ) -> list[Listed]:
        """Seats of that rank tuple (tp, cp, dp, pp): of one instance, or of all when D cannot know it (design §5)."""
        return [
            listed
            for listed in self._listed(role, now, fingerprint)
            if tuple(listed.seat.key[2:]) == tuple(ranks)
            and instance_id in (None, listed.seat.key.instance_id)
        ]

    def _asker(self, fingerprint: Print | str | None) -> Print | None:
        if not isinstance(fingerprint, str):
            return fingerprint
        for held in self._held.values():
            if held.seat.fingerprint.hash == fingerprint:
                return held.seat.fingerprint
        return Print(fingerprint, {})

    @staticmethod
    def _judge(asker: Print | None, seat: Seat) -> str | None:
        if asker is None or asker.hash == seat.fingerprint.hash:
            return None
        return explain(asker, seat.fingerprint)

    def _listed(self, role: str, now: float, fingerprint: Print | str | None) -> list[Listed]:
        self.sweep(now)
        asker = self._asker(fingerprint)
        return [
            Listed(held.seat, now - held.heard, self._judge(asker, held.seat), held.draining)
            for held in self._held.values()
            if held.seat.key.role == role
        ]

    def list(self, role: str, now: float, fingerprint: Print | str | None = None) -> list[Listed]:
        """Every seat of a role that takes requests, oldest registration first, judged against the asker's fingerprint.

        A bare hash is enough when any listed seat has the same hash: its fields explain the differences.
        """
        return [listed for listed in self._listed(role, now, fingerprint) if not listed.draining]
