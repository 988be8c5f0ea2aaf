"""``pdjax up`` with scripted engines behind the real command line, registry, HTTP layer and both real routers."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

STUB = Path(__file__).with_name("stub_pdjax.py")
WAIT_S = 100

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Up:
    """The command with its logs in a file: a pipe that nobody reads would stop it."""

    def __init__(self, log, *options):
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(STUB), "up", *options], stdout=subprocess.PIPE, stderr=file, text=True
            )

    @property
    def err(self):
        return self._log.read_text()

    def first_line(self):
        line = self.process.stdout.readline()
        assert line, self.err
        return line

    def wait_for_log(self, text):
        deadline = time.monotonic() + WAIT_S
        while text not in self.err:
            assert time.monotonic() < deadline and self.process.poll() is None, self.err
            threading.Event().wait(0.05)

    def end(self, number=signal.SIGTERM):
        if number is not None:
            self.process.send_signal(number)
        return self.process.communicate(timeout=WAIT_S)[0]


@pytest.fixture
def up(tmp_path):
    started = []

    def start(*options):
        started.append(Up(tmp_path / f"up-{len(started)}.log", *options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()
        one.process.stdout.close()


def refuses(url):
    with pytest.raises(httpx.ConnectError), httpx.Client(trust_env=False) as http:
        http.get(url)
    return True


def accepted(url):
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.get(f"{url}/server_info").json()["internal_states"][0]["http"].get("accepted", 0)


@pytest.mark.parametrize("router", ["rust", "mini"])
def test_requests_pass_the_real_router_to_both_halves(up, router):
    one = up("--model", "stub", "--prefill", "2", "--decode", "2", "--router", router, "--json")
    addresses = json.loads(one.first_line())
    assert len(addresses["prefill"]) == len(addresses["decode"]) == 2
    greedy = {"temperature": 0, "max_new_tokens": 20}
    with httpx.Client(base_url=addresses["router"], trust_env=False, timeout=60) as http:
        body = http.post("/generate", json={"text": "x", "rid": "mine", "sampling_params": greedy}).json()
        assert body["text"].startswith("hello decode-") and body["meta_info"]["id"] == "mine"
        batch = http.post("/generate", json={"input_ids": [[1], [2, 3]], "sampling_params": greedy}).json()
        assert [len(batch), batch[1]["meta_info"]["prompt_tokens"]] == [2, 2]
        chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
        assert (
            http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["role"]
            == "assistant"
        )
        two = {"model": "default", "prompt": ["a", "b"], "max_tokens": 20}
        assert len(http.post("/v1/completions", json=two).json()["choices"]) == 2
        streamed = http.post("/v1/chat/completions", json=chat | {"stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n") and '"content":"h"' in streamed
        bad = http.post("/v1/chat/completions", json=chat | {"continue_final_message": True})
        assert bad.status_code == 400 and "continue_final_message" in bad.text
    halves = [sum(accepted(url) for url in addresses[role]) for role in ("prefill", "decode")]
    assert halves == [7, 7], "each prompt reached exactly one P and one D, and the refused one none"
    one.end()
    assert one.process.returncode == 0
    assert all(refuses(url) for role in ("prefill", "decode") for url in addresses[role])
    assert refuses(addresses["router"]) and refuses(addresses["bootstrap"])
    assert "[prefill-1]" in one.err and "[decode-0]" in one.err


def test_addresses_as_lines_chips_and_options_of_serve(up):
    one = up(
        *("--model", "stub", "--router", "none", "--plain", "1", "--page-size", "8"),
        *("--prefill", "2", "--prefill-chips", "0,1;2,3", "--decode-chips", "4"),
    )
    names = [one.first_line().split()[0] for _ in range(5)]
    assert names == ["bootstrap", "prefill-0", "prefill-1", "decode-0", "plain-0"]
    one.end(signal.SIGINT)
    assert one.process.returncode == 0
    for line in (
        "[prefill-0] chips 0,1",
        "[prefill-1] chips 2,3",
        "[decode-0] chips 4",
        "[plain-0] chips None",
    ):
        assert line in one.err


def test_a_child_that_dies_ends_all_and_is_named(up):
    one = up("--model", "ends", "--router", "none", "--json")
    addresses = json.loads(one.first_line())
    with httpx.Client(trust_env=False, timeout=60) as http, pytest.raises(httpx.HTTPError):
        body = {"text": "x", "bootstrap_host": "127.0.0.1", "bootstrap_room": 1}
        http.post(f"{addresses['decode'][0]}/generate", json=body)
    one.end(None)
    assert one.process.returncode == 1
    assert "pdjax up: decode-0 ended with code 7: stopping the others" in one.err
    assert refuses(addresses["prefill"][0]) and refuses(addresses["bootstrap"])


def test_a_wrong_option_of_a_child_is_told_and_ends_with_2(up):
    one = up("--model", "refuses", "--router", "none")
    assert one.end(None) == ""
    assert one.process.returncode == 2
    assert "[decode-0] pdjax: this model is a wrong setting" in one.err


def test_a_signal_while_it_starts_ends_what_is_there(up):
    one = up("--model", "stub", "--router", "none")
    one.wait_for_log("[bootstrap] ")
    assert one.end() == ""
    assert one.process.returncode == 0
    told = next(line for line in one.err.splitlines() if line.startswith("[bootstrap] "))
    assert refuses(json.loads(told.removeprefix("[bootstrap] "))["url"])


def test_half_a_pair_is_not_waited_for(up):
    one = up("--model", "stub", "--decode", "0", "--router", "none", "--json")
    assert sorted(json.loads(one.first_line())) == ["bootstrap", "prefill"]
    one.end()
    assert one.process.returncode == 0
