"""Who may finish a handshake with P's side channel: with a secret, only who has it (ZMQ's CURVE).

P's key pair is made of the deployment's secret, so that every D can make P's public key and nobody else knows it. A
stranger's connection then ends before it has sent one message: ZMQ's many-part messages, which P would have to read to
their end, and the wish for another's routing id come after the handshake. What passes is encrypted, too. Must never
take the place of the frames' own MACs, which say how old a frame is and of which life (core/link).
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret) of P, as ZMQ writes keys."""
    key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"pdjax channel").digest())
    return zmq.curve_public(key), key


def guard_listener(listener: zmq.Socket[bytes], secret: bytes) -> None:
    """P, before it binds. b"": anybody may come in."""
    if secret:
        listener.curve_server = True
        listener.curve_publickey, listener.curve_secretkey = _pair(secret)


def knock(dealer: zmq.Socket[bytes], secret: bytes) -> None:
    """D, before it connects: P's key, and a pair of its own that nobody asks for."""
    if secret:
        dealer.curve_serverkey, _ = _pair(secret)
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
