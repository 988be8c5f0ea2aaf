"""What the client asks and when: lengths, arrivals, prompts, and the two public trace formats."""

import itertools
import statistics

import pytest

from pdjax.bench.workload import (
    FIRST_ID,
    MOONCAKE_BLOCK,
    Job,
    fitted,
    prompt_ids,
    prompt_text,
    read_trace,
    synthetic,
)
from pdjax.core.errors import ConfigError

MOONCAKE = """\
{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 14]}
{"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}

{"timestamp": 1500, "input_length": 20, "output_length": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:01.2319600,3180,8
"""


def write(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_a_mooncake_trace_is_read_in_order_of_arrival_from_zero(tmp_path):
    jobs = read_trace(write(tmp_path, MOONCAKE))
    assert [(j.at_s, j.n_prompt, j.n_output, j.blocks) for j in jobs] == [
        (0.0, 1030, 7, (0, 1, 2)),
        (0.5, 20, 1, ()),
        (2.0, 700, 5, (0, 14)),
    ]


def test_an_azure_trace_is_read_across_midnight(tmp_path):
    jobs = read_trace(write(tmp_path, AZURE))
    assert [(j.n_prompt, j.n_output) for j in jobs] == [(4808, 10), (3180, 8)]
    assert [j.at_s for j in jobs] == pytest.approx([0.0, 1.252], abs=1e-6)


def test_a_limit_takes_the_first_lines(tmp_path):
    assert len(read_trace(write(tmp_path, AZURE), 1)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither"),
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        (AZURE + "yesterday,1,1\n", "line 4"),
        (AZURE + "2023-11-16 18:17:03.97,0,1\n", "0 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1: no field 'output_length'"),
        (MOONCAKE + "{oops\n", "line 5"),
        ('{"timestamp": 0, "input_length": 3, "output_length": -1}\n', "-1 tokens"),
    ],
)
def test_a_broken_trace_is_one_line_that_names_the_place(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        read_trace(write(tmp_path, text))


def test_a_trace_that_is_not_there_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def test_fitted_cuts_lengths_and_speeds_arrivals_up(tmp_path):
    jobs = fitted(read_trace(write(tmp_path, MOONCAKE)), max_input=100, max_output=0, speed=4)
    assert [(j.n_prompt, j.n_output, j.at_s) for j in jobs] == [(100, 7, 0.0), (20, 1, 0.125), (100, 5, 0.5)]


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    runs = [synthetic(50, 100, 20, spread=0.5, rate=10, seed=s) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert all(50 <= j.n_prompt <= 100 and 10 <= j.n_output <= 20 for j in runs[0])
    assert len({j.n_prompt for j in runs[0]}) > 10


def test_arrivals_are_poisson_at_the_given_rate():
    at = [j.at_s for j in synthetic(4000, 1, 1, rate=20, seed=3)]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert at[0] == 0 and statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1), "of an exponential both are equal"


def test_a_closed_loop_has_no_times():
    assert {j.at_s for j in synthetic(3, 10, 5)} == {None}


def test_prompts_have_their_length_and_share_exactly_their_blocks():
    a, b = Job(1, MOONCAKE_BLOCK + 100, 1, None, (7, 8)), Job(2, MOONCAKE_BLOCK + 90, 1, None, (7, 9))
    left, right = (prompt_ids(job, 512, 0) for job in (a, b))
    assert (len(left), len(right)) == (MOONCAKE_BLOCK + 100, MOONCAKE_BLOCK + 90)
    assert left[:MOONCAKE_BLOCK] == right[:MOONCAKE_BLOCK]
    assert left[MOONCAKE_BLOCK:][:50] != right[MOONCAKE_BLOCK:][:50]
    assert all(FIRST_ID <= i < 512 for i in left)
    assert prompt_ids(Job(1, 10, 1), 512, 0) != prompt_ids(Job(2, 10, 1), 512, 0)


def test_a_text_prompt_has_a_word_for_each_token():
    assert len(prompt_text(Job(1, 17, 1), 0).split()) == 17
