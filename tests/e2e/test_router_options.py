"""Every sampling option of docs/api.md gives through both routers what an ordinary server gives, log-probabilities included."""

import json

import pytest
from options_matrix import FIRST_TOKEN_ENDS, JSON, differences, matrix, through_rust
from router_rows import BOTH, PROMPT, ok

from pdjax.model.fetch import resolve_model
from pdjax.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cases():
    tokenizer = Tokenizer(resolve_model("tiny"))
    token = next(i for i in range(60, 500) if tokenizer.decode([i] * 3) == "aaa")
    return matrix(min(tokenizer.eos_ids), token, "a")


@pytest.fixture(scope="module")
def plain(fleet, cases):
    """What one server answers to each."""
    return {
        name: ok(fleet.post("plain-0", "/generate", {"input_ids": PROMPT, **body}))
        for name, body in cases.items()
    }


@pytest.mark.parametrize("router", BOTH)
def test_every_option_is_the_same_with_and_without_pd(fleet, cases, plain, router):
    found, asked = [], 0
    for name, body in cases.items():
        if router == "rust" and not through_rust(body):
            continue
        asked += 1
        answer = ok(fleet.post(router, "/generate", {"input_ids": PROMPT, **body}))
        found += [
            f"{name}: {one}" for one in differences(answer, plain[name], inputs=not isinstance(answer, list))
        ]
        if name in JSON:
            for one in answer if isinstance(answer, list) else [answer]:
                json.loads(one["text"])
    assert found == []
    assert asked == len(cases) if router == "mini" else asked > len(cases) // 2


@pytest.mark.parametrize("router", BOTH)
def test_what_the_first_token_ends_costs_no_decode_step(fleet, cases, router):
    before = [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)]
    for name in FIRST_TOKEN_ENDS:
        if router == "mini" or through_rust(cases[name]):
            answer = ok(fleet.post(router, "/generate", {"input_ids": PROMPT, **cases[name]}))
            assert answer["meta_info"]["completion_tokens"] == 1, name
    assert [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)] == before
