"""SmolLM2 through real processes and both routers: the tokens of one server, and of an independent implementation."""

import concurrent.futures
import json
import pathlib

import pytest
from fleets import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

# Few sizes, so that few programs are compiled.
SIZES = [
    "--context-length",
    "256",
    "--chunked-prefill-size",
    "64",
    "--max-running-requests",
    "16",
    "--num-pages",
    "320",
]
REFERENCE = pathlib.Path(__file__).parent.parent / "model" / "reference" / "smollm2.json"
N_OUT = 32


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    with Deployment(
        tmp_path_factory.mktemp("smollm2"), "smollm2", *SIZES, prefill=1, decode=1, plain=1
    ) as deployment:
        deployment.start()
        deployment.add_router("rust", "rust")
        deployment.add_router("mini", "mini")
        yield deployment
        deployment.await_free()
        deployment.check_logs()


@pytest.fixture(scope="module")
def cases():
    found = [c for c in json.loads(REFERENCE.read_text())["cases"] if len(c["ids"]) + N_OUT <= 256]
    assert len(found) >= 8
    return found


def ask(fleet, where, ids, n_out=N_OUT):
    sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
    answer = fleet.post(where, "/generate", {"input_ids": ids, "sampling_params": sampling}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def test_the_reference_tokens_come_through_both_routers(smollm2, cases):
    for i, case in enumerate(cases):
        assert ask(smollm2, ("rust", "mini")[i % 2], case["ids"]) == case["tokens"][:N_OUT], case["name"]


def test_sixteen_at_a_time(smollm2, cases):
    prompts = [case["ids"][: max(len(case["ids"]) - cut, 1)] for cut in (0, 1) for case in cases][:12]
    prompts += [prompts[0][:1], prompts[1][:15], prompts[1][:16], prompts[1][:17]]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        plain = list(pool.map(lambda ids: ask(smollm2, "plain-0", ids, 8), prompts))
        pd = list(pool.map(lambda ids: ask(smollm2, "rust", ids, 8), prompts))
    assert pd == plain
