"""Shared prefixes through the routers: prefilled once on P, handed over whole, the same tokens, nothing left after a flush."""

import pytest
from test_tokens import PAGE, generate, prompt_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NODES = ("prefill-0", "plain-0")


def flush(fleet, name):
    answer = fleet.http.post(f"{fleet.url(name)}/flush_cache", params={"timeout": 60})
    assert answer.status_code == 200, answer.text
    state = fleet.state(name)
    assert state["cached_pages"] == state["used_pages"] == 0 and state["free_pages"] == 255


@pytest.mark.parametrize("router", ["rust-1p1d", "mini-1p1d"])
def test_the_second_request_finds_the_first_ones_prefix(fleet, router):
    stem = prompt_of(200, seed=77)  # four chunks, twelve pages and a half
    prompts = [[*stem, *prompt_of(n, seed=78)] for n in (3, 40)] + [stem[: 12 * PAGE]]
    cold = []
    for ids in prompts:
        flush(fleet, "plain-0")
        cold.append(generate(fleet, "plain-0", ids))
        assert cold[-1]["meta_info"]["cached_tokens"] == 0
    flush(fleet, "prefill-0")
    before = fleet.state("prefill-0")["prefill_tokens"]
    for where in (router, "plain-0"):
        flush(fleet, "plain-0")
        warm = [generate(fleet, where, ids) for ids in prompts]
        assert [a["output_ids"] for a in warm] == [a["output_ids"] for a in cold], where
        # Whole pages, and never the last token of a prompt.
        assert [a["meta_info"]["cached_tokens"] for a in warm] == [0, 12 * PAGE, 11 * PAGE], where
    computed = fleet.state("prefill-0")["prefill_tokens"] - before
    assert computed == 203 + (240 - 12 * PAGE) + PAGE
    assert fleet.state("prefill-0")["cached_pages"] > 0
    fleet.await_free()
    for name in NODES:
        flush(fleet, name)


def test_each_server_says_whether_it_shares_prefixes(fleet):
    said = {
        n: fleet.http.get(f"{fleet.url(n)}/server_info").json()["disable_radix_cache"]
        for n in (*NODES, "decode-0")
    }
    assert said == {"prefill-0": False, "plain-0": False, "decode-0": True}
