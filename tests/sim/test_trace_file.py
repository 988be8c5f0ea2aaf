"""The reader of trace files: what it takes, what it refuses, and whether it says where."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from pdjax.core.settings import PDSettings
from pdjax.sim.schema import SchemaError, TraceError, trace_schema, validate
from pdjax.sim.trace_file import dumps, load, loads, parse, save

TRACES = Path(__file__).parent.parent / "traces"
BASE = {
    "format": "pdjax.trace/1",
    "world": {"prefill": ["p0", "p1"], "decode": ["d0"], "page_size": 4},
    "steps": [
        {"at": 0, "request": {"rid": "a", "room": 7, "prompt": 9, "output": 3}},
        {"at": 5, "request": {"rid": "b", "room": "9007199254740993", "prompt": 6, "output": 3, "prefill": "p1", "n": 2}},
        {"at": 0, "message": {"match": {"type": "ready", "room": 7}, "do": "drop"}},
        {"on": {"event": "sent", "message": "ready", "node": "p0"}, "nth": 2, "after": 3, "crash": "p0"},
    ],
    "expect": {"outcomes": {"a": "ok"}},
}  # fmt: skip


def changed(path: str, value: object) -> dict:
    """BASE with one key set: "steps.0.request.room"; ... deletes it."""
    raw = copy.deepcopy(BASE)
    *way, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    at = raw
    for key in way:
        at = at[key] if isinstance(at, list) or key in at else at.setdefault(key, {})
    if value is ...:
        del at[last]
    elif isinstance(at, list) and last == len(at):
        at.append(value)
    else:
        at[last] = value
    return raw


def step(action: str, value: object, **trigger: object) -> dict:
    return {**(trigger or {"at": 0}), action: value}


def test_a_file_is_read_with_its_defaults():
    trace = parse({"format": "pdjax.trace/1", "steps": BASE["steps"][:1]})
    assert [n.name for n in trace.nodes] == ["p0", "d0"]
    p0 = trace.nodes[0]
    assert (p0.page_size, p0.num_pages, p0.verify, p0.pools) == (16, 65, "all", ("main_kv",))
    assert p0.settings == PDSettings() and p0.config.chunked_prefill_size == 512
    assert (trace.router.mode, trace.router.retries, trace.router.timeout) == ("mini", 0, 60000)
    assert (trace.timing.link, trace.timing.jitter, trace.timing.loop) == (0.2, 0, 0.05)
    request = trace.steps[0].value
    assert (request["prefill"], request["decode"], request["room"]) == ("p0", "d0", 7)
    assert (trace.seed, trace.violations, trace.quiescent_within, trace.choices) == (0, (), None, ())


def test_rooms_are_exact():
    trace = parse(BASE)
    assert trace.steps[1].value["room"] == 9007199254740993
    raw = changed("steps.0.request.room", (1 << 63) - 1)
    raw["steps"] = raw["steps"][:1]
    assert parse(raw).steps[0].value["room"] == (1 << 63) - 1


@pytest.mark.parametrize(
    "text", ["7.0", "1e3", "-1", str(1 << 63), '"9223372036854775808"', '"7a"', '"٣"', "true", "null", '""']
)
def test_a_room_that_is_no_exact_integer_is_refused(text):
    raw = loads(json.dumps(BASE).replace('"room": 7,', f'"room": {text},', 1))
    with pytest.raises(
        TraceError, match=r"steps\[0\]\.request\.room: .*(exact integer|at most|form|at least)"
    ):
        parse(raw)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": NaN}', "format: NaN is no number"),
        ('{"a": -Infinity}', "a: -Infinity is no number"),
        ('{"steps": [], "steps": []}', "steps: stands there twice"),
        ('{"steps": [{}, {"at": 0, "at": 1}]}', r"steps\[1\]\.at: stands there twice"),
        ("{", "not JSON"),
        ("[" * 100000, "nested too deep"),
    ],
)
def test_json_without_its_traps(text, said):
    with pytest.raises(TraceError, match=said):
        loads(text)


def test_a_number_too_large_for_a_float_is_no_number():
    with pytest.raises(TraceError, match=r"steps\[0\]\.at: number expected"):
        parse(loads(json.dumps(BASE).replace('"at": 0', '"at": 1e999', 1)))


WRONG = [
    # unknown or missing keys, wrong types
    ("format", "pdjax.trace/2", "format", "expected"),
    ("stepz", [], "stepz", "unknown key"),
    ("steps", ..., "steps", "is missing"),
    ("world.pagesize", 4, "world.pagesize", "unknown key"),
    ("world.router.mode", "nginx", "world.router.mode", "one of rust, mini"),
    ("steps.0.request.promt", 9, "steps[0].request.promt", "unknown key"),
    ("steps.0.request.prompt", 9.0, "steps[0].request.prompt", "integer expected, 9.0 found"),
    ("steps.0.request.prompt", True, "steps[0].request.prompt", "integer expected"),
    ("steps.0.request.prompt", 0, "steps[0].request.prompt", "at least 1"),
    ("steps.0.at", math.nan, "steps[0].at", "number expected"),
    ("steps.0.at", -1, "steps[0].at", "at least 0"),
    ("steps.0.at", ..., "steps[0]", "exactly one of at, on"),
    ("steps.0.crash", "p0", "steps[0]", "exactly one of request, abort"),
    ("steps.0.nth", 2, "steps[0]", "nth, after cannot stand here"),
    ("steps.3.on.event", "sendt", "steps[3].on.event", '"sendt" is unknown'),
    ("steps.2.message.match.type", "redy", "steps[2].message.match.type", "is unknown"),
    ("steps.2.message.do", "delay", "steps[2].message.by", "is missing"),
    ("expect.outcomes.a", "okay", "expect.outcomes.a", "is unknown"),
    # names that the file does not have
    ("world.ranks", 2, "world.ranks", "only one"),
    ("world.pages", {"p9": 3}, "world.pages.p9", "no node p9; it has p0, p1, d0"),
    ("world.clock_offset", {"d7": 3}, "world.clock_offset.d7", "no node d7"),
    ("steps.0.request.prefill", "p2", "steps[0].request.prefill", "no node p2"),
    ("steps.1.request.rid", "a", "steps[1].request.rid", "another request"),
    ("steps.3.crash", "p0/1", "steps[3].crash", "no node p0/1"),
    ("steps.3.on.room", 8, "steps[3].on.room", "no room 8"),
    ("steps.3.on.node", "d3", "steps[3].on.node", "no node d3"),
    ("steps.2.message.match.room", 8, "steps[2].message.match.room", "no room 8"),
    ("expect.outcomes", {"z": "ok"}, "expect.outcomes.z", "no request z"),
    ("expect.outcomes.a", {"outcome": "failed", "reason": "bad_luck"}, "expect.outcomes.a.reason", "is unknown"),
    ("expect.violations", ["S19"], "expect.violations[0]", "no property S19"),
    ("choices", [{"a": [1], "b": [2]}], "choices[0]", "one key"),
    ("choices", [{"driver": 1.5}], "choices[0]", "a list"),
    ("choices", [{"drvier": ["d0"]}], "choices[0]", "drvier: no kind of event; driver is one"),
    ("choices", [{"driver": ["d0"]}, {"driver": ["d9"]}], "choices[1].driver", "no node d9"),
    ("choices", [{"connect": ["d0"]}], "choices[0]", "process that it is about is missing"),
    ("digest", "abc", "digest", "--pin writes"),
    ("digest", "", "digest", "--pin writes"),
    ("digest", f"{'0' * 32}:2:A", "digest", "--pin writes"),
    # steps that can never happen
    ("steps.3.on", {"event": "landed", "node": "p0"}, "steps[3].on.node", "p0 never emits landed"),
    ("steps.3.on", {"event": "sent", "node": "c0"}, "steps[3].on.node", "no node c0"),
    ("steps.3.on", {"event": "landed", "message": "ready"}, "steps[3].on.message", "landed has no message"),
    ("steps.3.on", {"event": "crashed", "room": 7}, "steps[3].on.room", "not about a room"),
    ("steps.2.message.match", {"type": "ready", "from": "d0"}, "steps[2].message.match.type", "d0 never sends ready"),
    ("steps.2.message.match", {"from": "p0", "to": "p1"}, "steps[2].message.match.to", "never speak"),
    ("steps.4", step("error", {"node": "p0", "in": "scatter"}), "steps[4].error.in", "p0 never does scatter"),
    ("steps.4", step("abort", {"rid": "z"}), "steps[4].abort.rid", "no request z"),
    ("steps.4", step("transfer", {"match": {"from": "d0"}, "do": "hang"}), "steps[4].transfer.match.from", "wrong side"),
    ("steps.4", step("inject", {"to": "p0", "message": {"type": "done"}}), "steps[4].inject.from", "is missing"),
    ("steps.4", step("inject", {"to": "p0", "from": "p1", "message": {"type": "done"}}), "steps[4].inject.to", "between a P and a D"),
    ("steps.4", step("inject", {"to": "p0", "from": "d0", "message": {"type": "done", "colour": 1}}), "steps[4].inject.message.colour", "no such field"),
    ("steps.4", step("inject", {"to": "p0", "bytes": "0g"}), "steps[4].inject.bytes", "pairs of hex digits expected"),
    ("steps.4", step("crash", "x0"), "steps[4].crash", "a P, a D or the registry (p0, d0, b0) expected"),
    ("steps.4", step("stop", {"node": "x0", "for": 1}), "steps[4].stop.node", "a P, a D or the registry"),
    ("steps.4", step("pages", {"node": "b0", "free": 1}), "steps[4].pages.node", "a P or a D (p0, d0) expected"),
    ("steps.4", step("partition", {"between": ["c0", "d0"], "for": 1}), "steps[4].partition.between[0]", "no node c0"),
    ("steps.4", step("clock", {"node": "c0", "jump": 1}), "steps[4].clock.node", "nothing reads the wall clock of c0"),
    ("steps.4", step("clock", {"node": "b0", "jump": 1}), "steps[4].clock.node", "nothing reads the wall clock of b0"),
    ("steps.4", step("drain", "p7"), "steps[4].drain", "no node p7"),
    ("steps.4", step("drain", {"node": "d7", "within": 5}), "steps[4].drain.node", "no node d7"),
    ("steps.4", step("drain", {"node": "d0", "for": 5}), "steps[4].drain.for", "unknown key"),
    ("steps.4", step("partition", {"between": ["p0", "p0"], "for": 1}), "steps[4].partition.between", "two different"),
    ("steps.4", step("request", {"rid": "c", "room": 1, "prompt": 4, "output": 2, "eos": 3}), "steps[4].request.eos", "never come"),
    ("steps.4", step("request", {"rid": "c", "room": 1, "prompt": 4, "output": 2, "prefix": {"rid": "a", "tokens": 5}}), "steps[4].request.prefix.tokens", "at most 4"),
    ("steps.4", step("request", {"rid": "c", "room": 1, "prompt": 4, "output": 2, "prefix": {"rid": "c", "tokens": 1}}), "steps[4].request.prefix.rid", "another one"),
    ("steps.4", step("request", {"rid": "c", "room": 1, "prompt": 4, "output": 2, "legs": {"prefill": {"drop": True, "status": 400}}}), "steps[4].request.legs.prefill", "cannot stand here"),
    # flags
    ("world.flags", {"disaggregation-leese": 2}, "world.flags.disaggregation-leese", "no such flag"),
    ("world.flags", {"disaggregation-lease": "2"}, "world.flags.disaggregation-lease", "number of seconds"),
    ("world.flags", {"disaggregation-prefill-gate": 1}, "world.flags.disaggregation-prefill-gate", "one of eager, gated"),
    ("world.flags", {"d0": {"disaggregation-max-rooms": 1.5}}, "world.flags.d0.disaggregation-max-rooms", "whole number"),
    ("world.flags", {"d4": {"disaggregation-lease": 3}}, "world.flags.d4", "no node d4"),
    ("world.flags", {"disaggregation-lease": 4.0}, "world.flags", "settings that cannot work on p0: "),
    ("world.flags", {"chunked-prefill-size": 0}, "world.flags.chunked-prefill-size", "at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "where", "said"), WRONG, ids=[f"{w[2]}: {w[3]}" for w in WRONG])
def test_what_is_wrong_is_named(path, value, where, said):
    with pytest.raises(TraceError) as caught:
        parse(changed(path, value))
    assert caught.value.path == where
    assert said in caught.value.text


def test_flags_for_all_and_for_one():
    flags = {
        "disaggregation-lease": 20,
        "chunked-prefill-size": 8,
        "disaggregation-verify": "sampled",
        "d0": {"disaggregation-lease": 25, "max-running-requests": 3, "model": "other"},
    }
    p0, p1, d0 = parse(changed("world.flags", flags)).nodes
    assert p0.settings.lease_s == p1.settings.lease_s == 20 and d0.settings.lease_s == 25
    assert (p0.config.chunked_prefill_size, p0.verify, p0.max_batch) == (8, "sampled", 16)
    assert (d0.max_batch, d0.config.max_running, d0.weights, p0.weights) == (3, 3, "other", "sim")


def test_every_setting_has_its_flag():
    for spec in PDSettings.__dataclass_fields__.values():
        raw = changed("world.flags", {spec.metadata["flag"]: spec.default})
        assert parse(raw).nodes[0].settings == PDSettings()


def test_a_written_file_reads_the_same(tmp_path):
    for path in sorted(TRACES.glob("*.json"))[:10]:
        trace = load(path)
        save(tmp_path / "x.json", trace.raw)
        assert load(tmp_path / "x.json") == trace
    assert json.loads(dumps(BASE)) == BASE


def test_a_file_that_is_not_text():
    with pytest.raises(TraceError, match="No such file"):
        load(Path("/nowhere/x.json"))


def test_not_utf8(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(TraceError, match="not UTF-8"):
        load(path)


def test_the_schema_uses_nothing_that_is_not_checked():
    """A keyword that the checker does not know would be passed over in silence."""
    from pdjax.sim.schema import _CHECKS

    told = {"$ref", "$defs", "$schema", "title", "description", "default", "then"}

    def keywords(schema: object, names: bool = False) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(keywords, schema)) if schema else set()
        if not isinstance(schema, dict):
            return set()
        found: set[str] = set() if names else set(schema)
        for key, value in schema.items():
            if names or key not in ("const", "enum", "required", "default"):
                found |= keywords(value, not names and key in ("properties", "$defs"))
        return found

    assert keywords(trace_schema()) <= told | set(_CHECKS)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number"}, [1, 1.5], [True, "1", None, math.inf]),
        ({"type": ["integer", "null"]}, [1, None], [1.0, False]),
        ({"pattern": "^a$"}, ["a"], ["a\n", "b"]),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        ({"minItems": 2, "maxItems": 2, "uniqueItems": True}, [[1, 2]], [[1], [1, 2, 3], [1, 1]]),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "1"}]),
    ],
)
def test_the_checker(schema, good, bad):
    for value in good:
        validate(value, schema, schema)
    for value in bad:
        with pytest.raises(SchemaError):
            validate(value, schema, schema)
