"""What the doctor learns by asking: the registry, the registered instances, their fingerprints, the routers.

It asks over HTTP and opens and closes a connection to the side channel; a transfer port that is in use is never
touched (facts/transfer row 15).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap.access import base_url, host_of
from pdjax.engine.bootstrap.asking import Blocking, NoAnswer
from pdjax.engine.bootstrap.registry import BadRegistration, Print, parse_print
from pdjax.engine.bootstrap.registry_answers import ListedSeat
from pdjax.engine.jax_transfer.addresses import split
from pdjax.serve.args import ServeArgs
from pdjax.serve.doctor import TIMEOUT_S, Checks, Finding, ask, ask_for, client_of, fail, ok, state_of, warn
from pdjax.serve.doctor_local import is_loopback

Port = Annotated[int, msgspec.Meta(gt=0, lt=65536)]
OTHER = {"prefill": "decode", "decode": "prefill"}
START = "start it with `pdjax bootstrap --host ADDRESS`, or open its port here"


@dataclass(frozen=True)
class Seat:
    """One registered instance, as the registry lists it."""

    role: str
    name: str
    url: str
    zmq_addr: str
    age_s: float
    known: Print
    of_device: tuple[str, ...] = ()  # fields computed here that the device on which it will run may change

    @property
    def label(self) -> str:
        return f"{self.role} {self.name}"


class _Printed(ListedSeat, frozen=True, kw_only=True):
    age_s: float
    fingerprint: dict[str, Any]


class _Workers(msgspec.Struct, frozen=True):
    workers: list[Any]


class _Listing(msgspec.Struct, frozen=True):
    instances: list[_Printed]


def registry(args: ServeArgs, model_known: bool) -> Checks:
    if args.disaggregation_mode == "null":
        return
    if not args.bootstrap_host:
        if args.with_bootstrap:
            yield ok("registry", "will run inside this process")
        else:
            advice = "give --disaggregation-bootstrap-host, so that this server is listed, and ready only with a peer"
            yield warn("registry", "not configured: each request's own is asked", advice)
        return
    base = args.registry_url
    with client_of(args, args.token()) as http, client_of(args, args.api_key()) as servers:
        began = time.monotonic()
        try:
            health = ask(http, f"{base}/health")
            seats = [seat for role in OTHER for seat in _seats(http, base, role)]
        except NoAnswer as error:
            yield fail("registry", str(error), START)
            return
        took_ms = (time.monotonic() - began) * 1000
        yield ok(
            "registry", f"{base} lists {health.get('instances')} instances, answered in {took_ms:.0f} ms"
        )
        peers = [seat for seat in seats if seat.role == OTHER[args.disaggregation_mode]]
        if not peers:
            advice = f"start a {OTHER[args.disaggregation_mode]} instance with this registry"
            yield warn("peers", f"no {OTHER[args.disaggregation_mode]} instance is registered", advice)
        for peer in peers:
            yield from _peer(args, servers, peer)
        yield from _fingerprints(args, seats, model_known)


def _seats(http: Blocking, base: str, role: str) -> list[Seat]:
    try:
        return [
            Seat(
                role,
                one.instance_id,
                one.serving_url or "",
                one.zmq_addr or "",
                one.age_s,
                parse_print(one.fingerprint),
            )
            for one in ask_for(http, f"{base}/list", _Listing, role=role).instances
        ]
    except BadRegistration as error:
        raise NoAnswer(f"{base}/list: is no registry of pdjax: {error}") from None


# ---------------------------------------------------------------- one peer


def _peer(args: ServeArgs, http: Blocking, peer: Seat) -> Checks:
    host = host_of(peer.url)
    if host is not None and is_loopback(host) and not is_loopback(args.bootstrap_host):
        advice = f"start {peer.name} with --host and its machine's own address"
        yield fail(peer.label, f"advertises {host}, which only its own machine reaches", advice)
    if peer.age_s > args.settings.heartbeat_ttl_s / 2:
        yield warn(peer.label, f"last heard {peer.age_s:.0f} s ago", "it is stalled or gone: see its log")
    info: Mapping[str, Any] = {}
    try:
        info = ask(http, f"{peer.url}/server_info")
        yield ok(peer.label, f"{peer.url} answers, ready: {info.get('ready')}")
    except NoAnswer as error:
        # P never calls D over HTTP, nor D P: only the router must reach it.
        yield warn(peer.label, str(error), "the router must reach it; the hand-off itself does not need this")
    if peer.role == "prefill":
        yield _side_channel(peer)
        yield from _transfer(peer, info)
        counters = state_of(info).get("counters", {})
        if isinstance(counters, Mapping) and counters.get("bad_frame_checksum"):
            advice = "give all instances the same --disaggregation-secret-file, or none"
            found = f"dropped {counters['bad_frame_checksum']} frames with another secret"
            yield warn(f"secret of {peer.name}", found, advice)


def _dial(host: str, port: int) -> str:
    """ "open", "closed" (the machine answers that nobody listens), or why nothing came back."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S):
            return "open"
    except ConnectionRefusedError:
        return "closed"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else "no answer"


def _side_channel(peer: Seat) -> Finding:
    check = f"side channel of {peer.name}"
    try:
        host, port = split(peer.zmq_addr)
    except ValueError as error:
        return fail(check, str(error), f"restart {peer.name} with a numeric --host")
    state = _dial(host, port)
    if state == "open":
        return ok(check, f"{peer.zmq_addr} can be reached")
    found = f"{peer.zmq_addr}: {'nobody listens' if state == 'closed' else state}"
    return fail(
        check, found, "open TCP from D to P there; a life that has just ended is listed until its TTL"
    )


def _transfer(peer: Seat, info: Mapping[str, Any]) -> Iterable[Finding]:
    """The last port of the fixed range, which is used last: a refusal shows that packets arrive, and disturbs nobody."""
    check = f"transfer ports of {peer.name}"
    first_last = state_of(info).get("transfer_ports")
    try:
        first, last = msgspec.convert(first_last, tuple[Port, Port])
    except msgspec.ValidationError:
        advice = (
            f"if a firewall is between: start {peer.name} with --disaggregation-port-base and open that range"
        )
        yield warn(check, "chosen by the kernel for each peer, so none can be tried", advice)
        return
    try:
        host, _ = split(peer.zmq_addr)
    except ValueError:
        return  # its side channel's row says so
    state = _dial(host, last)
    if state in ("open", "closed"):
        yield ok(check, f"{host}:{first} to {last}: packets arrive")
    else:
        yield fail(check, f"{host}:{last}: {state}", f"open TCP {first} to {last} from D to {host}")


# ---------------------------------------------------------------- fingerprints


def _fingerprints(args: ServeArgs, seats: Sequence[Seat], model_known: bool) -> Checks:
    """Each pair that could hand over, field by field: mine with the others', or theirs when mine is not known."""
    mine = _mine(args, seats, model_known)
    if isinstance(mine, Finding):
        yield mine
        mine = None
    role = args.disaggregation_mode
    own_side = [mine] if mine is not None else [seat for seat in seats if seat.role == role]
    peers = [seat for seat in seats if seat.role == OTHER[role]]
    fits, rows = 0, []
    for own in own_side:
        for peer in peers:
            differs = _differences(own, peer)
            fits += not differs
            rows.append((f"{own.name} with {peer.name}", differs))
    for pair, differs in rows:
        check = f"fingerprint of {pair}"
        if not differs:
            yield ok(check, "equal in every field")
        elif fits:
            yield warn(check, "; ".join(differs), "they never hand over to each other; others fit")
        else:
            yield fail(check, "; ".join(differs), "start both sides with equal flags, model and jaxlib")


def _differences(own: Seat, peer: Seat) -> list[str]:
    a, b = own.known, peer.known
    if a.hash == b.hash:
        return []
    differ = [n for n in dict.fromkeys([*a.fields, *b.fields]) if a.fields.get(n) != b.fields.get(n)]
    if differ and not set(differ) - set(own.of_device):
        return []
    told = [
        f"{name}: {a.fields.get(name, 'absent')!r} on {own.name}, {b.fields.get(name, 'absent')!r} on {peer.name}"
        for name in differ
        if name not in own.of_device
    ]
    return told or ["the hashes differ, though all fields agree"]


def _mine(args: ServeArgs, seats: Sequence[Seat], model_known: bool) -> Seat | Finding | None:
    """This server as it is registered, or as it would be; None when nothing is known of its model."""
    url = base_url(args.host, args.port, args.door.scheme)
    role = args.disaggregation_mode
    for seat in seats:
        if seat.role == role and seat.url == url:
            return replace(seat, name=f"{seat.name} (running)")
    if not model_known:
        return None
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a server that runs here may hold the accelerator
    from pdjax.serve.loading import own_fingerprint  # JAX comes with it

    try:
        known = parse_print(own_fingerprint(args))
    except ConfigError as error:
        return fail("model", str(error), "serve would refuse it, too")
    of_device = ("layout", "kv_dtype") if args.dtype == "auto" else ("layout",)
    return Seat(role, "this server", url, "", 0.0, known, of_device)


# ---------------------------------------------------------------- routers


def routers(args: ServeArgs) -> Checks:
    with client_of(args, args.router_key()) as http:
        for router in args.routers:
            try:
                workers = ask_for(http, f"{router.rstrip('/')}/workers", _Workers).workers
                yield ok(f"router {router}", f"lists {len(workers)} workers")
            except NoAnswer as error:
                advice = "start it, or correct --router-url and --router-key-file; the server goes on trying"
                yield warn(f"router {router}", str(error), advice)
