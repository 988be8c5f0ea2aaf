"""``pdjax up`` as the README has it: its curl examples run as written, and OpenAI's own client works against it."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from pdjax.serve.cli import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

README = (pathlib.Path(__file__).parent.parent.parent / "README.md").read_text()
CONFIG = "context-length: 512\nnum-pages: 256\nchunked-prefill-size: 64\n"
MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    """The router of ``pdjax up`` over the tiny model; the README's model differs only in its size."""
    where = tmp_path_factory.mktemp("up")
    (where / "up.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "pdjax.serve.cli", "up", "--model", "tiny", "--json"]
    command += ["--prefill", "1", "--decode", "1", "--config", str(where / "up.yaml")]
    with (where / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline()
        assert line, (where / "log").read_text()[-3000:]
        yield json.loads(line)["router"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def curls():
    """Each curl command of the README's blocks, with its continuation lines."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    return [one.group(0) for block in blocks for one in re.finditer(r"^curl (?:.*\\\n)*.*$", block, re.M)]


@pytest.mark.parametrize("number", range(len(curls())))
def test_a_curl_of_the_readme_runs_as_written(router, number):
    assert shutil.which("curl"), "curl is not installed: apt-get install curl"
    command = curls()[number].replace("127.0.0.1:PORT", router.removeprefix("http://"))
    assert "PORT" not in command
    strict = 'curl() { command curl -sS --noproxy "*" --fail-with-body --max-time 60 "$@"; }'
    done = subprocess.run(["bash", "-c", f"{strict}\n{command}"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, (done.stdout, done.stderr)
    if '"stream": true' in command:
        frames = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert frames[-1] == "[DONE]" and len(frames) > 2 and all(map(json.loads, frames[:-1]))
    else:
        answer = json.loads(done.stdout)
        assert answer.get("choices") or answer.get("text"), answer


def test_the_readme_shows_each_api():
    text = "\n".join(curls())
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert path in text, path
    assert '"stream": true' in text


def test_the_python_of_the_readme_runs_as_written(router):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = code.replace("127.0.0.1:PORT", router.removeprefix("http://"))
    environ = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_bench_of_the_readme_runs_as_written(router, capsys):
    (command,) = re.findall(r"^pdjax (bench .*)$", README, re.M)
    words = shlex.split(command.replace("127.0.0.1:PORT", router.removeprefix("http://")))
    assert run(words) == 0
    told = capsys.readouterr()
    assert "100 of 100" in told.out and "goodput" in told.out, told


@pytest.fixture(scope="module")
def client(router):
    with (
        httpx.Client(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{router}/v1", api_key="none", http_client=http, max_retries=0) as one,
    ):
        yield one


def test_openai_models(client):
    assert [model.id for model in client.models.list()]


def test_openai_chat(client):
    whole = client.chat.completions.create(model="default", messages=MESSAGES, temperature=0, max_tokens=8)
    assert whole.usage.completion_tokens == 8 and whole.choices[0].finish_reason == "length"
    pieces, finishes = "", []
    usage = None
    with client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                pieces += choice.delta.content or ""
                finishes += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage or usage
    assert pieces == whole.choices[0].message.content and finishes == ["length"]
    assert usage.total_tokens == whole.usage.total_tokens


def test_openai_chat_options(client):
    """Seeds, several choices, log-probabilities, a JSON schema: typed objects of the client's own."""
    asked = {"model": "default", "messages": MESSAGES, "max_tokens": 5, "n": 2, "seed": 3}
    first, again = (client.chat.completions.create(**asked, logprobs=True, top_logprobs=2) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    for choice in first.choices:
        assert len(choice.logprobs.content) == 5
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    answer = client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=60, temperature=0, response_format=form
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


def test_openai_completions(client):
    asked = {"model": "default", "prompt": "Once upon", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked, logprobs=2)
    assert len(whole.choices[0].logprobs.tokens) == 6
    with client.completions.create(**asked, stream=True) as chunks:
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    many = client.completions.create(**{**asked, "prompt": ["Once upon", "The"]})
    assert many.choices[0].text == whole.choices[0].text and many.choices[1].index == 1


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError, match=r"context|tokens"):
        client.completions.create(model="default", prompt="word " * 2000, max_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES, max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="default", messages=MESSAGES, max_tokens=2, tool_choice="required"
        )
