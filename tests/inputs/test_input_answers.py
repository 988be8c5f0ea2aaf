"""What a registry may answer, as JSON and as raw bytes: every look-up ends, the heartbeats go on, nothing is left behind."""

import queue
import sys
from pathlib import Path

import msgspec
import pytest
from fuzzing import tries
from hypothesis import given
from hypothesis import strategies as st

from pdjax.engine.bootstrap.asking import NoAnswer
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.registry_answers import listing, peers, refusal

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from stranger import Stranger, answer, head

WAIT_S = 30.0
TEXT = st.text(max_size=8)
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


def object_of(**fields):
    """Each field as it should be or anything, or left out."""
    return st.fixed_dictionaries({}, optional={name: st.one_of(good, ANY) for name, good in fields.items()})


SEAT = object_of(
    instance_id=TEXT,
    epoch=st.one_of(st.integers(0, 2**64 - 1), st.just("7")),
    zmq_addr=st.sampled_from(["127.0.0.1:9", "[::1]:0", ""]),
    serving_url=st.sampled_from(["http://127.0.0.1:1", "http://[", ""]),
    compatible=st.booleans(),
    reason=TEXT,
)
REPLY = object_of(
    instances=st.lists(SEAT, max_size=3),
    peers=object_of(compatible=st.integers(0, 9), rejected=st.dictionaries(TEXT, TEXT, max_size=2)),
    error=object_of(message=TEXT),
)
PIECE = st.sampled_from(
    [b"{", b"}", b"[", b'"', b":", b",", b"\\ud800", b"1e999", b"-0", b"NaN", b"Infinity", b"null", b"true", b"9" * 5000,
     b"[" * 5000, b'{"a":' * 5000, b"\xff", b"\0", b"\xef\xbb\xbf", b'"instances"', b'"peers"', b'"compatible"', b'"epoch"']
)  # fmt: skip
BODY = st.one_of(
    REPLY.map(msgspec.json.encode), st.binary(max_size=60), st.lists(PIECE, max_size=12).map(b"".join)
)
STATUS = st.sampled_from([b"200 OK", b"404 Not Found", b"401 No", b"302 Elsewhere", b"500 x", b"999 x"])
FIELD = st.sampled_from(
    [b"", b"location: http://127.0.0.1:1/\r\n", b"content-encoding: gzip\r\n", b"set-cookie: a=b\r\n",
     b"content-type: text/html; charset=zlib\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"\0: \xff\r\n"]
)  # fmt: skip


@given(BODY)
@tries(150)
def test_an_answer_is_read_or_it_is_none(body):
    for parse in (listing, peers, refusal):
        try:
            parse(body)
        except NoAnswer as error:
            assert len(str(error)) <= 400


@pytest.fixture(scope="module")
def world():
    stranger, done = Stranger(), queue.SimpleQueue()
    client = HttpRegistryClient(stranger.host, stranger.port, heartbeat_interval_s=0.01)
    client.start(done.put)
    client.announce(
        {"role": "decode", "instance_id": "d", "epoch": 5, "fingerprint": {"hash": "x", "fields": {}}}
    )
    yield stranger, client, done
    client.close()
    stranger.close()


@given(status=STATUS, field=FIELD, body=BODY, raw=st.one_of(st.none(), st.binary(max_size=80)))
@tries(40)
def test_whatever_comes_every_look_up_is_answered(world, status, field, body, raw):
    stranger, client, done = world
    stranger.reply = raw if raw is not None else head(len(body), status=status, more=field) + body
    client.lookup(1, "127.0.0.1", None)
    done.get(timeout=WAIT_S)
    assert client.failed() is None and not client.counters["died"]


def test_after_all_that_it_is_well_and_nothing_is_left(world):
    stranger, client, done = world
    stranger.reply = answer(b'{"instances":[],"peers":{"compatible":3,"rejected":{}}}')
    heard = client.counters["heartbeat"] + client.counters["registered"]
    while (
        client.counters["heartbeat"] + client.counters["registered"] < heard + 2
    ):  # or the test's own time limit
        client.lookup(2, "127.0.0.1", None)
        done.get(timeout=WAIT_S)
    assert client.membership.registered and client.membership.compatible == 3
    assert not client._asking and len(client._known) == 1 and not client._http.cookies
