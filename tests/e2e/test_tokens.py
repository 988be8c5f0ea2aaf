"""PD and an ordinary server give the same tokens, for every length, batch and router (f32, tiny model)."""

import concurrent.futures
import json
import random
import re
from collections import Counter

import pytest
from fleets import pairs_served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROUTERS = ["rust", "mini", "rust-1p1d", "mini-1p1d"]
PAGE, CHUNK = 16, 64
LENGTHS = [
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    3 * PAGE - 1,
    3 * PAGE,
    3 * PAGE + 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK + 7,
    300,
]


def prompt_of(n, seed=0):
    rng = random.Random(n * 1000 + seed)
    return [rng.randrange(3, 500) for _ in range(n)]


def generate(fleet, where, ids, n_out=12, **sampling):
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": n_out, **sampling}}
    answer = fleet.post(where, "/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("router", ROUTERS)
def test_every_length_gives_the_tokens_of_one_server(fleet, router):
    for n in LENGTHS:
        ids = prompt_of(n)
        pd, plain = (generate(fleet, where, ids) for where in (router, "plain-0"))
        assert pd["output_ids"] == plain["output_ids"], n
        assert pd["text"] == plain["text"]
        assert pd["meta_info"]["prompt_tokens"] == n
        assert pd["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


def test_sixteen_at_a_time(fleet):
    prompts = [prompt_of(n, seed) for seed in range(2) for n in (1, 5, 16, 17, 33, 64, 65, 200)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for router in ("rust", "mini"):
            plain = list(pool.map(lambda ids: generate(fleet, "plain-0", ids)["output_ids"], prompts))
            pd = list(pool.map(lambda ids, r=router: generate(fleet, r, ids)["output_ids"], prompts))
            assert pd == plain


def test_seeded_sampling_is_the_same_with_and_without_pd(fleet):
    ids = prompt_of(20)
    for seed in (1, 2, 3):
        answers = [
            generate(fleet, w, ids, temperature=1.0, sampling_seed=seed)["output_ids"]
            for w in ("rust", "mini", "plain-0")
        ]
        assert answers[0] == answers[1] == answers[2]
    assert (
        len(
            {
                tuple(generate(fleet, "plain-0", ids, temperature=1.0, sampling_seed=s)["output_ids"])
                for s in range(4)
            }
        )
        > 1
    )


def test_a_common_prefix_and_a_batch_paired_by_index(fleet):
    shared = prompt_of(40)
    batch = [shared + prompt_of(3, 1), shared + prompt_of(9, 2), prompt_of(5)]
    sampling = {"temperature": 0, "max_new_tokens": 8}
    expected = [generate(fleet, "plain-0", ids, 8)["output_ids"] for ids in batch]
    for router in ROUTERS:
        answer = fleet.post(router, "/generate", {"input_ids": batch, "sampling_params": sampling})
        assert [a["output_ids"] for a in answer.json()] == expected


def test_a_first_token_that_is_eos_decodes_nothing(fleet):
    ids = prompt_of(30)
    first = generate(fleet, "plain-0", ids, 1)["output_ids"][0]
    steps = [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)]
    for router in ("rust", "mini"):
        answer = generate(fleet, router, ids, 20, stop_token_ids=[first])
        assert answer["output_ids"] == [first]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}
        assert answer["meta_info"]["completion_tokens"] == 1
    assert [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)] == steps
    assert generate(fleet, "rust", ids, 1)["output_ids"] == [first]


@pytest.mark.parametrize("router", ["rust", "mini", "plain-0"])
def test_openai_chat_and_completions_stream_and_not(fleet, router):
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello there"}],
        "temperature": 0,
        "max_tokens": 10,
    }
    completion = {"model": "default", "prompt": "Once upon", "temperature": 0, "max_tokens": 10}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        whole = fleet.post(router, path, body)
        assert whole.status_code == 200, whole.text
        choice = whole.json()["choices"][0]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        plain = fleet.post("plain-0", path, body).json()["choices"][0]
        assert text == (plain["message"]["content"] if "chat" in path else plain["text"])
        pieces, finishes, frames = [], [], []
        with fleet.http.stream("POST", f"{fleet.url(router)}{path}", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            frames = [x[6:] for x in answer.iter_lines() if x.startswith("data: ")]
        assert frames[-1] == "[DONE]"
        for frame in map(json.loads, frames[:-1]):
            for c in frame["choices"]:
                pieces.append((c["delta"].get("content") or "") if "chat" in path else c["text"])
                finishes += [c["finish_reason"]] if c.get("finish_reason") else []
        assert "".join(pieces) == text
        assert finishes == [choice["finish_reason"]]


def test_all_four_pairs_serve(fleet):
    ids = prompt_of(10)
    for _ in range(60):
        generate(fleet, "rust", ids, 2)
        generate(fleet, "mini", ids, 2)
        if len(pairs_served(fleet.log_lines())) == 4:
            return
    raise AssertionError(f"only {pairs_served(fleet.log_lines())} served")


def test_a_log_without_one_line_is_refused(fleet):
    from pdjax.core import conform

    generate(fleet, "rust", prompt_of(10), 2)
    fleet.await_free()
    lines = fleet.check_logs()
    of_node: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        of_node.setdefault(json.loads(line)["node"], []).append(i)
    busy = [at for at in of_node.values() if len(at) > 1]
    assert len(busy) >= 2
    # One line of each process; tests/core/test_conform.py removes every single one, from a log that is short.
    for at in busy:
        i = at[len(at) // 2 - 1]
        assert conform.check(lines[:i] + lines[i + 1 :]), lines[i]


@pytest.fixture(scope="module", autouse=True)
def begun(fleet):
    fleet.await_free()
    return fleet.logged()


def test_the_recorded_run_imports_and_replays(fleet, begun, tmp_path):
    """What real processes wrote becomes a scenario of the same requests, and the simulator serves it rightly."""
    generate(fleet, "mini", prompt_of(10), 2)
    fleet.await_free()
    assert "ok" in fleet.replay_logs(tmp_path, begun)["expect"]["outcomes"].values()


def slot_bytes(fleet, name):
    """State → bytes of the host slots of a node, as /metrics has them; {} without staging."""
    text = fleet.http.get(f"{fleet.url(name)}/metrics").text
    return {
        s: int(float(n)) for s, n in re.findall(r'^pd_host_slot_bytes\{state="(\w+)"\} (\S+)$', text, re.M)
    }


def test_host_staging_changes_no_token_and_every_slot_comes_back(fleet):
    """RFC-2 §5.5 mode B: prefill-1 stages and prefill-0 does not, behind the same routers."""
    before = slot_bytes(fleet, "prefill-1")
    assert slot_bytes(fleet, "prefill-0") == {} and before["held"] == 0 < before["free"]
    for n in LENGTHS:
        ids = prompt_of(n, seed=7)
        plain = generate(fleet, "plain-0", ids)["output_ids"]
        for router in ("rust", "mini"):
            answers = [generate(fleet, router, ids)["output_ids"] for _ in range(2)]
            assert answers == [plain, plain], n
    fleet.await_free()
    after = slot_bytes(fleet, "prefill-1")
    assert after["held"] == 0 < after["free"]
    lines = [json.loads(line) for line in fleet.log_lines()]
    staged = Counter(x["node"] for x in lines if x["event"] == "slot_taken")
    returned = Counter(x["node"] for x in lines if x["event"] == "slot_freed")
    assert set(staged) == {"prefill-1"} and staged == returned and staged["prefill-1"] >= len(LENGTHS)
