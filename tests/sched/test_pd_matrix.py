"""PD answers as one server for every sampling option: real model (tiny, f32), real requests, all of them at once.

One server answers one request after the other, each step read before the next; the pair answers all together and
overlapped. So batch, padding, order and loop must not matter, and whatever P's first token decides must be right on D.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from options_matrix import FIRST_TOKEN_ENDS, JSON, differences, matrix, merged
from sched_pair import Pair

from pdjax.core.pools import request_digest
from pdjax.engine.base import Leg
from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.model.tiny import make_tiny_model
from pdjax.model.tokenizer import Tokenizer
from pdjax.sched.factory import make_scheduler
from pdjax.sched.scheduler import Scheduler, SchedulerConfig
from pdjax.serve.calls import Desk
from pdjax.serve.limits import HttpLimits
from pdjax.serve.log import ServerLog
from pdjax.serve.sglang_api import parse_generate
from pdjax.sim.ports import VirtualClock

pytestmark = pytest.mark.timeout(400)  # its fixture compiles everything that sampling knows

SETTINGS = RunnerSettings(
    num_pages=400, page_size=8, max_batch=8, chunk_tokens=16, context_tokens=128, dtype="float32"
)
PROMPT = [int(t) for t in np.random.default_rng(8).integers(3, 500, 21)]  # two chunks, three pages
TOKEN, TEXT = 41, "G"
EOS = 2


class JaxPair(Pair):
    """P and D with a real model on either side of the fake manager."""

    def __init__(self, make_runner) -> None:
        self.make_jax_runner = make_runner
        config = {"context_length": SETTINGS.context_tokens, "chunked_prefill_size": SETTINGS.chunk_tokens}
        config |= {"eos_ids": frozenset({EOS}), "overlap": True}
        super().__init__(p_config=config, d_config=config)

    def make_runner(self, **_: Any) -> JaxRunner:
        return self.make_jax_runner()


class SchedulerEngine:
    """serve.engine_api.Engine as far as a call needs it, over a scheduler that the test steps."""

    context_length = SETTINGS.context_tokens
    model_name = "tiny"

    def __init__(self, role: str, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.role, self.scheduler, self.tokenizer = role, scheduler, tokenizer
        self.vocab_size = tokenizer.vocab_size

    def submit(self, req) -> None:
        if self.role != "null":
            digest = request_digest(req.prompt_ids, req.sampling.first_token_key())
            self.scheduler.manager.claim(
                Leg(req.room, req.rid, digest, len(req.prompt_ids), req.bootstrap_host, None)
            )
        self.scheduler.submit(req)

    def abort(self, rid, all=False) -> None:
        self.scheduler.abort(rid)


def answers(
    engines: dict[str, SchedulerEngine], bodies: dict[str, dict], settle
) -> dict[str, dict[str, Any]]:
    """Role → name → the answer of /generate; all bodies are submitted before anything runs."""

    async def run() -> dict[str, dict[str, Any]]:
        plans = {
            role: {name: parse_generate(body, engine, HttpLimits()) for name, body in bodies.items()}
            for role, engine in engines.items()
        }
        desks = {role: Desk(engine, ServerLog(io.StringIO())) for role, engine in engines.items()}
        calls = {
            role: {name: desks[role].open(plan.prompts, False) for name, plan in of.items()}
            for role, of in plans.items()
        }
        settle()
        out: dict[str, dict[str, Any]] = {}
        for role, of in calls.items():
            out[role] = {}
            for name, call in of.items():
                await call.collect()
                whole = plans[role][name].dialect.whole(call.subs)
                out[role][name] = msgspec.json.decode(msgspec.json.encode(whole))  # as a client reads it
        return out

    return asyncio.run(run())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]:
    """(PD's answers as a router completes them, one server's, P's own, decode steps that D made for FIRST_TOKEN_ENDS)."""
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer(directory)
    assert tokenizer.decode([TOKEN]) == TEXT and tokenizer.eos_ids == {EOS}

    def make_runner() -> JaxRunner:
        return JaxRunner.from_directory(directory, SETTINGS)

    bodies = {name: {"input_ids": PROMPT, **body} for name, body in matrix(EOS, TOKEN, TEXT).items()}
    config = SchedulerConfig(
        context_length=SETTINGS.context_tokens,
        eos_ids=tokenizer.eos_ids,
        chunked_prefill_size=SETTINGS.chunk_tokens,
        overlap=False,
    )
    plain = make_scheduler("null", config, make_runner(), VirtualClock())

    def settle_plain() -> None:
        while plain.step():
            pass

    engine = {"null": SchedulerEngine("null", plain, tokenizer)}
    one_by_one = {
        name: answers(engine, {name: body}, settle_plain)["null"][name] for name, body in bodies.items()
    }
    pair = JaxPair(make_runner)
    engines = {
        "prefill": SchedulerEngine("prefill", pair.p, tokenizer),
        "decode": SchedulerEngine("decode", pair.d, tokenizer),
    }
    rooms = itertools.count(1, 10)

    def through_pd(names) -> dict[str, dict[str, Any]]:
        placed = {
            name: {**bodies[name], "bootstrap_host": "p.test", "bootstrap_room": next(rooms)}
            for name in names
        }
        return answers(engines, placed, pair.settle)

    first = through_pd(FIRST_TOKEN_ENDS)
    steps = pair.d.counts["decode_steps"]
    rest = through_pd([name for name in bodies if name not in FIRST_TOKEN_ENDS])
    pair.assert_initial()
    p = {**first["prefill"], **rest["prefill"]}
    d = {**first["decode"], **rest["decode"]}
    assert plain.counts["engine_errors"] == 0
    return {name: merged(d[name], p[name]) for name in bodies}, one_by_one, p, steps


@pytest.mark.parametrize("name", matrix(EOS, TOKEN, TEXT))
def test_pd_equals_one_server(name, outcome):
    pd, plain, _, _ = outcome
    assert differences(pd[name], plain[name]) == []


def test_a_request_that_its_first_token_ends_costs_no_decode_step(outcome):
    pd, _, _, decode_steps = outcome
    assert decode_steps == 0
    for name in FIRST_TOKEN_ENDS:
        assert pd[name]["meta_info"]["completion_tokens"] == 1, name
    assert pd["eos_ignored"]["meta_info"]["completion_tokens"] == 10


def test_the_options_do_what_they_say(outcome):
    """The comparison would also pass if both sides ignored an option."""
    pd, _, p, _ = outcome
    ids = {name: answer["output_ids"] for name, answer in pd.items() if isinstance(answer, dict)}
    text = {name: answer["text"] for name, answer in pd.items() if isinstance(answer, dict)}
    why = {name: a["meta_info"]["finish_reason"] for name, a in pd.items() if isinstance(a, dict)}
    changed = ("seeded", "hot", "presence", "repetition", "rewards", "json")
    assert all(ids[name] != ids["greedy"] for name in changed)
    assert len({tuple(ids[n]) for n in ("seeded", "hot", "min_p", "frequency", "bias")}) == 5
    assert why["eos_first"] == {"type": "stop", "matched": EOS} and text["eos_first"] == ""
    assert text["eos_shown"] == "<|im_end|>"
    assert [len(ids[n]) for n in ("min_1", "min_4", "stop_id_after_min")] == [2, 5, 4]
    assert ids["min_4"][-1] == EOS and EOS not in ids["min_4"][:-1]
    assert why["stop_first"] == {"type": "stop", "matched": TEXT} and text["stop_first"] == ""
    assert why["stop_third"] == {"type": "stop", "matched": TEXT * 3} and ids["stop_third"] == [TOKEN] * 3
    assert text["stop_kept"] == TEXT * 2
    assert why["json_cut"] == {"type": "length", "length": 5}
    one, two = pd["n_2"]
    assert one["output_ids"] != two["output_ids"]
    meta = pd["logprobs_from_5"]["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(PROMPT) - 5 and meta["input_token_logprobs"][0][0] is None
    assert len(p["greedy"]["meta_info"]["input_top_logprobs"]) == len(PROMPT)
    assert all(len(t) == 20 for t in pd["logprob_texts"]["meta_info"]["output_top_logprobs"])


@pytest.mark.parametrize("name", JSON)
def test_json_follows_the_schema(name, outcome):
    answer = outcome[0][name]
    for one in answer if isinstance(answer, list) else [answer]:
        value = json.loads(one["text"])
        assert value["name"] in ("ann", "bob") and value["n"] in (1, 22, 333) and value["ok"] in (True, False)
        assert one["meta_info"]["finish_reason"]["type"] == "stop"
