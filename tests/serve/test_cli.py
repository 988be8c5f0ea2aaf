"""The command line: generated flags, one-line errors, exit codes."""

import dataclasses
import signal
import socket
import subprocess
import sys
import types

import pytest
from quick_settings import another_value

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.serve import cli
from pdjax.serve.args import ServeArgs
from pdjax.serve.options import variables

STAGING = variables("disaggregation-host-staging")


@pytest.fixture
def node(monkeypatch):
    """Stands for pdjax.serve.process: remembers what it was started with."""
    calls = []

    def run_server(args):
        calls.append(args)
        return 0

    module = types.SimpleNamespace(run_server=run_server, calls=calls)
    monkeypatch.setitem(sys.modules, "pdjax.serve.process", module)
    for name in STAGING:
        monkeypatch.delenv(name, raising=False)
    return module


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pdjax: ") and err.count("\n") == 1
    return err


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pdjax 0.")


def test_no_default_but_the_dataclasses_own(node):
    assert cli.run(["serve", "--model", "tiny"]) == 0
    assert node.calls == [ServeArgs(model="tiny")]


def test_every_setting_has_its_flag(node):
    for spec in dataclasses.fields(PDSettings):
        flag, value = f"--{spec.metadata['flag']}", another_value(spec)
        argv = [flag] if value is True else [flag, str(value)]
        assert cli.run(["serve", "--model", "tiny", *argv]) == 0, flag
        want = dataclasses.replace(PDSettings(), **{spec.name: value})
        assert node.calls[-1].settings == want


def test_rfc_flags(node):
    argv = "serve --model m --disaggregation-mode decode --disaggregation-transfer-backend jax"
    argv += " --disaggregation-bootstrap-host h --disaggregation-bootstrap-port 9"
    argv += " --disaggregation-bootstrap-heartbeat-interval 4 --disaggregation-bootstrap-heartbeat-ttl 12"
    argv += " --disaggregation-trace f --disaggregation-verify all --host 10.0.0.1 --port 0"
    assert cli.run(argv.split()) == 0
    (args,) = node.calls
    assert (args.disaggregation_mode, args.bootstrap_host, args.bootstrap_port) == ("decode", "h", 9)
    assert (args.settings.heartbeat_interval_s, args.settings.heartbeat_ttl_s) == (4.0, 12.0)
    assert (args.trace, args.verify, args.host, args.port) == ("f", "all", "10.0.0.1", 0)
    assert args.at_registry("x", 5).bootstrap_port == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "--model"),
        ("--model m --port abc", "--port"),
        ("--model m --port 70000", "--port 70000"),
        ("--model m --port -1", "--port -1"),
        ("--model m --nonsense", "--nonsense"),
        ("--model m --dtype int4", "choose one of auto, float32, bfloat16"),
        ("--model m --disaggregation-prefill-gate shut", "choose one of eager, gated"),
        ("--model m --num-pages 1", "--num-pages 1: must be at least 2"),
        (
            "--model m --num-pages 99999999999",
            "--num-pages 99999999999: must be at least 2, at most 2147483647",
        ),
        ("--model m --router-url http://r:1 --host ::ffff:0.0.0.0", "own address"),
        ("--model m --page-size 0", "--page-size"),
        ("--model m --max-queue 0", "--max-queue"),
        ("--model m --host http://x", "not a URL"),
        ("--model m --disaggregation-mode both", "null, prefill, decode"),
        ("--model m --disaggregation-transfer-backend nixl", "choose one of jax"),
        ("--model m --disaggregation-verify maybe", "off, sampled, all"),
        ("--model m --disaggregation-mode prefill", "--with-bootstrap"),
        (
            "--model m --disaggregation-mode prefill --with-bootstrap --disaggregation-bootstrap-host h",
            "choose one",
        ),
        ("--model m --disaggregation-mode decode --with-bootstrap", "pdjax bootstrap"),
        ("--model m --with-bootstrap", "only prefill"),
        ("--model m --disaggregation-bootstrap-host h", "--disaggregation-mode prefill or decode"),
        ("--model m --disaggregation-mode decode --host 0.0.0.0", "own address"),
        ("--model m --disaggregation-mode decode --disaggregation-bootstrap-port 0", "free port"),
        ("--model m --disaggregation-mode decode --disaggregation-lease 5", "must be < lease = 5"),
        (
            "--model m --disaggregation-mode decode --disaggregation-max-rooms 0",
            "settings that cannot work: disaggregation-max-rooms = 0 must be at least 1",
        ),
        (
            "--model m --disaggregation-mode decode --disaggregation-max-frame 9999999999",
            "at most 1073741824",
        ),
        ("--model m --disaggregation-mode decode --disaggregation-max-peers 65537", "at most 65536"),
        (
            "--model m --disaggregation-mode decode --disaggregation-trace /nowhere/t",
            "/nowhere is no directory",
        ),
        (
            "--model m --disaggregation-mode decode --disaggregation-fault-socket /nowhere/s",
            "/nowhere is no directory",
        ),
        ("--model m --disaggregation-mode decode --disaggregation-port-base 9000", "only prefill"),
        (
            "--model m --disaggregation-mode prefill --with-bootstrap --disaggregation-port-base 80",
            "from 1024",
        ),
        (
            "--model m --disaggregation-mode prefill --with-bootstrap --disaggregation-port-base 65100",
            "below 65536",
        ),
        ("--model m --disaggregation-mode decode --disaggregation-secret-file /nowhere/s", "No such file"),
        (f"--model m --instance-id {'x' * 101}", "at most 100"),
        ("--model m --router-url 10.0.0.1:30000", "http://host:port"),
        ("--model m --router-url http://r:1/workers", "http://host:port"),
        ("--model m --router-url http://r:1 --host 0.0.0.0", "own address"),
        ("--model m --router-url http://r:1 --router-check-interval 0", "above 0"),
        ("--model m --router-check-interval inf", "at most 1e+06"),
        ("--model m --watchdog-timeout 1e300", "at most 1e+06"),
        ("--model m --drain-timeout nan", "above 0"),
        ("--model m --drain-linger -1", "above 0"),
        ("--model m --otlp-endpoint collector:4318", "http://host:port"),
        ("--model m --router-key-file /nowhere/k", "--router-key-file /nowhere/k: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(node, capsys, options, says):
    assert cli.run(["serve", *options.split()]) == 2
    assert says in complaint(capsys)
    assert node.calls == []


def test_without_pd_timers_do_not_matter(node):
    assert cli.run(["serve", "--model", "m", "--disaggregation-lease", "5", "--host", "0.0.0.0"]) == 0


@pytest.mark.parametrize(
    ("environ", "argv", "staged"),
    [
        ({}, "", False),
        ({}, "--disaggregation-host-staging", True),
        ({"TPU_ENABLE_D2H_TRANSFER": "1"}, "", True),
        ({"TPU_ENABLE_D2H_TRANSFER": "0"}, "", False),
        ({"TPU_ENABLE_D2H_TRANSFER": ""}, "", False),
        ({"TPU_ENABLE_D2H_TRANSFER": "1"}, "--no-disaggregation-host-staging", False),
        ({"TPU_ENABLE_D2H_TRANSFER": "0", "PDJAX_DISAGGREGATION_HOST_STAGING": "1"}, "", True),
    ],
)
def test_staging_by_flag_or_by_the_variable_that_others_use(node, monkeypatch, environ, argv, staged):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["serve", "--model", "m", *argv.split()]) == 0
    assert [args.settings.host_staging for args in node.calls] == [staged]


def test_a_wrong_value_of_the_shared_variable_names_it(node, monkeypatch, capsys):
    monkeypatch.setenv("TPU_ENABLE_D2H_TRANSFER", "perhaps")
    assert cli.run(["serve", "--model", "m"]) == 2
    assert "TPU_ENABLE_D2H_TRANSFER" in complaint(capsys)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.2:30000", "decode-10.0.0.2-30000"),
        ("http://[fe80::1]:80", "decode-fe80-1-80"),
    ],
)
def test_a_seat_keeps_its_name_over_its_lives(url, name):
    args = ServeArgs("m", disaggregation_mode="decode")
    assert args.seat(url) == name
    assert dataclasses.replace(args, instance_id="mine").seat(url) == "mine"


def test_the_secret_is_what_the_file_holds_without_its_last_newline(tmp_path):
    def key(content):
        (tmp_path / "secret").write_bytes(content)
        return ServeArgs("m", secret_file=str(tmp_path / "secret")).secret()

    assert ServeArgs("m").secret() == b""
    assert key(b"one\n") == key(b"one") != key(b"two")
    assert key(b"x" * 64 + b"a") != key(b"x" * 64 + b"b"), "every byte of a long one counts"
    with pytest.raises(ConfigError, match="is empty"):
        key(b"\n")


def test_an_error_of_the_node_is_one_line(node, capsys):
    def refuse(args):
        raise ConfigError("the model is not there")

    node.run_server = refuse
    assert cli.run(["serve", "--model", "m"]) == 2
    assert "the model is not there" in complaint(capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("nonsense", "nonsense"),
        ("fetch gpt9", "only smollm2"),
        ("bootstrap --port 70000", "--port"),
        ("bootstrap --disaggregation-bootstrap-heartbeat-ttl 0", "above 0"),
        ("up --model m --router nginx", "rust, mini, none"),
        ("up --model m --decode 0", "at least one prefill and one decode"),
        ("up --model m --prefill 0 --decode 0 --router none", "nothing to start"),
        ("up --model m --prefill 2 --prefill-chips 0,1", "1 instances, there are 2"),
    ],
)
def test_mistakes_of_the_other_commands(capsys, argv, says):
    assert cli.run(argv.split()) == 2
    assert says in complaint(capsys)


def test_no_command_says_so(capsys):
    assert cli.run([]) == 2
    assert "command" in complaint(capsys).lower()


def test_a_taken_port_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.run(["bootstrap", "--port", str(taken.getsockname()[1])]) == 2
    assert "another port" in complaint(capsys)


def test_help_lists_every_flag(capsys):
    assert cli.run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    flags = [
        spec.metadata["flag"]
        for cls in (ServeArgs, PDSettings)
        for spec in dataclasses.fields(cls)
        if spec.metadata
    ]
    assert len(flags) > 30 and all(f"--{flag}" in text for flag in flags)


def test_checking_flags_imports_no_jax():
    code = "import sys; from pdjax.serve import cli; print(cli.run(sys.argv[1:]), 'jax' in sys.modules)"
    argv = [sys.executable, "-c", code, "serve", "--model", "m", "--disaggregation-mode", "prefill"]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True).stdout
    assert out == "2 False\n"


IMPORTING = """
import signal, sys
from pdjax.serve import cli
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("pdjax.serve.process", "pdjax.engine.bootstrap.server"):
            print("importing", flush=True)
            signal.pause()
sys.meta_path.insert(0, Slow())
cli.main()
"""


@pytest.mark.parametrize("command", [["serve", "--model", "m"], ["bootstrap"]])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_imports_ends_it_with_0(command, number):
    with subprocess.Popen([sys.executable, "-c", IMPORTING, *command], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(number)
        assert process.wait(100) == 0


@pytest.mark.e2e
def test_a_taken_port_of_a_real_node_is_one_line_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [sys.executable, "-m", "pdjax.serve.cli", "serve", "--model", "nothing-here"]
        argv += ["--port", str(taken.getsockname()[1])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "another port" in done.stderr
