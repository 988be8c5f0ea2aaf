"""--config, PDJAX_… and flags: which value wins, how a wrong one is told, and what config show says of each."""

import dataclasses
import itertools
import json
import sys
import types

import pytest
from quick_settings import another_value

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.serve import cli, local
from pdjax.serve.args import ServeArgs
from pdjax.serve.config_file import Setting
from pdjax.serve.options import SERVE, options_of, variables


@pytest.fixture
def node(monkeypatch):
    calls = []

    def run_server(args):
        calls.append(args)
        return 0

    monkeypatch.setitem(sys.modules, "pdjax.serve.process", types.SimpleNamespace(run_server=run_server))
    for name in (name for flag in options_of(SERVE) for name in variables(flag)):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "pdjax.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def complaint(capsys):
    _out, err = capsys.readouterr()
    assert err.startswith("pdjax: ") and err.count("\n") == 1, err
    return err


def test_flag_before_environment_before_file_before_default(node, write, monkeypatch):
    file = write("model: of-file\npage-size: 8\nnum-pages: 99\nmax-queue: 7\n")
    monkeypatch.setenv("PDJAX_PAGE_SIZE", "32")
    monkeypatch.setenv("PDJAX_NUM_PAGES", "55")
    assert cli.run(["serve", "--config", file, "--num-pages", "11"]) == 0
    (args,) = node
    assert (args.model, args.page_size, args.num_pages, args.max_queue) == ("of-file", 32, 11, 7)
    assert args.chunked_prefill_size == ServeArgs("m").chunked_prefill_size


def test_the_order_of_flag_and_file_does_not_matter(node, write):
    file = write("model: of-file\npage-size: 8\n")
    assert cli.run(["serve", "--page-size", "4", "--config", file]) == 0
    assert node[0].page_size == 4


def test_every_flag_can_stand_in_the_file(node, write):
    values = {spec.metadata["flag"]: another_value(spec) for spec in dataclasses.fields(PDSettings)}
    lines = [f"{flag}: {'true' if value is True else value}" for flag, value in values.items()]
    assert cli.run(["serve", "--config", write("\n".join(["model: m", *lines]))]) == 0
    assert node[0].settings.lease_s == PDSettings().lease_s + 1 and node[0].settings.gated is True


def test_the_environment_can_name_the_file(node, write, monkeypatch):
    monkeypatch.setenv("PDJAX_CONFIG", write("model: m\npage-size: 8\n"))
    assert cli.run(["serve"]) == 0
    assert node[0].page_size == 8


def test_a_flag_can_take_back_what_the_file_turns_on(node, write):
    file = write("model: m\ndisable-radix-cache: true\n")
    assert cli.run(["serve", "--config", file]) == 0
    assert cli.run(["serve", "--config", file, "--no-disable-radix-cache"]) == 0
    assert [args.disable_radix_cache for args in node] == [True, False]


def test_a_value_is_the_text_that_stands_there(node, write):
    """YAML would read null, off, 010 and 1_0 as something else."""
    file = write(
        "model: 0123\ndisaggregation-mode: null\ndisaggregation-verify: off\nserved-model-name: yes\n"
        'page-size: "8"\nhost: 127.0.0.1 # a comment\n'
    )
    assert cli.run(["serve", "--config", file]) == 0
    (args,) = node
    assert (args.model, args.disaggregation_mode, args.verify) == ("0123", "null", "off")
    assert (args.served_model_name, args.page_size, args.host) == ("yes", 8, "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: m\nnonsense: 1\n", "line 2: nonsense: no such key"),
        ("--model: m\n", "line 1: --model: no such key; the keys are this command's flags (write it without"),
        ("model: m\nport: 1\nport: 2\n", "line 3: port: is there twice, first in line 2"),
        ("model: m\npage-size: many\n", "line 2: page-size: must be a whole number, is 'many'"),
        ("model: m\npage-size: 1.5\n", "line 2: page-size: must be a whole number"),
        ("model: m\npage-size:\n", "line 2: page-size: must be a whole number, is ''"),
        ("model: m\ndisaggregation-lease: soon\n", "line 2: disaggregation-lease: must be a number"),
        ("model: m\nwith-bootstrap: maybe\n", "line 2: with-bootstrap: must be true or false"),
        ("model: m\ndtype: int4\n", "line 2: dtype: is 'int4', choose one of auto"),
        ("model: [a, b]\n", "line 1: model: must be a single value"),
        ("model: {a: b}\n", "line 1: model: must be a single value"),
        ("? [a]\n: b\n", "line 1: a key must be a flag's name"),
        ("- model\n", "must be a mapping"),
        ("model: m\n  port: [\n", "is not YAML"),
        (b"model: \xff\n", "is not UTF-8"),
        ("config: other.yaml\n", "config: no such key"),
        ("json: true\n", "json: no such key"),
        ("model: m\ndisaggregation-mode: prefill\n", "--with-bootstrap"),
        ("model: " + "[" * 5000 + "\n", "is nested too deeply"),
        ('model: m\n"port\\n": 1\n', "line 2: the key 'port\\n' is no flag's name"),
        ('model: "a\\0b"\n', "line 1: model: holds a line break or a control character"),
        ("model: a\x07b\n", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(node, write, capsys, text, says):
    file = write(text)
    assert cli.run(["serve", "--config", file]) == 2
    told = complaint(capsys)
    assert says in told and node == []
    assert file in told or says == "--with-bootstrap"


def test_a_file_that_is_not_there_or_too_long_is_one_line(node, write, capsys):
    assert cli.run(["serve", "--config", "/nowhere/x.yaml"]) == 2
    assert "/nowhere/x.yaml: No such file" in complaint(capsys)
    assert cli.run(["serve", "--config", write("#" * (1 << 20) + "\nmodel: m")]) == 2
    assert "is longer than" in complaint(capsys)


def test_an_empty_file_sets_nothing(node, write):
    assert cli.run(["serve", "--model", "m", "--config", write("# nothing yet\n")]) == 0
    assert node == [ServeArgs("m")]


def test_a_wrong_environment_variable_is_named(node, monkeypatch, capsys):
    monkeypatch.setenv("PDJAX_PORT", "tcp://10.0.0.1:30000")  # what Kubernetes sets for a service named pdjax
    assert cli.run(["serve", "--model", "m"]) == 2
    assert "PDJAX_PORT" in complaint(capsys)


@pytest.mark.parametrize(
    ("command", "line"), [("bootstrap", "port: 70000"), ("bootstrap", "model: m"), ("up", "port: 1")]
)
def test_the_other_commands_take_their_own_keys(write, capsys, command, line):
    argv = [command, "--config", write(line + "\n"), *(["--model", "m"] if command == "up" else [])]
    assert cli.run(argv) == 2
    assert line.split(":")[0] in complaint(capsys)


# ---------------------------------------------------------------- config show


def shown(capsys, *argv):
    code = cli.run(["config", "show", "--json", *argv])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_config_show_says_where_each_value_is_from(node, write, monkeypatch, capsys):
    file = write("# first\nmodel: m\npage-size: 8\n")
    monkeypatch.setenv("PDJAX_NUM_PAGES", "55")
    monkeypatch.setenv("TPU_ENABLE_D2H_TRANSFER", "1")
    code, found, _ = shown(capsys, "--config", file, "--port", "1")
    assert code == 0 and node == []
    assert found["page-size"] == {"value": 8, "origin": f"file {file}:3"}
    assert found["num-pages"] == {"value": 55, "origin": "environment PDJAX_NUM_PAGES"}
    shared = {"value": True, "origin": "environment TPU_ENABLE_D2H_TRANSFER"}
    assert found["disaggregation-host-staging"] == shared
    assert found["port"] == {"value": 1, "origin": "flag"}
    assert found["host"] == {"value": "127.0.0.1", "origin": "default"}
    assert set(found) == set(options_of(SERVE))


def test_config_show_is_a_table_and_needs_no_model(node, capsys):
    assert cli.run(["config", "show"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["model"] == ["not", "set", "not", "set"]
    assert rows["page-size"] == ["16", "default"]


def test_config_show_tells_what_serve_would_refuse(node, capsys):
    code, found, err = shown(capsys, "--model", "m", "--disaggregation-mode", "prefill")
    assert code == 2 and "--with-bootstrap" in err and found["disaggregation-mode"]["value"] == "prefill"


def test_config_show_prints_no_secret(node, tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text("do-not-print-me\n")
    argv = ["--model", "m", "--disaggregation-mode", "decode", "--disaggregation-secret-file", str(secret)]
    code, found, err = shown(capsys, *argv)
    assert code == 0 and "do-not-print-me" not in json.dumps(found) + err
    assert found["disaggregation-secret-file"]["value"] == str(secret)


# ---------------------------------------------------------------- up


def test_up_gives_its_children_what_its_file_says_unless_the_environment_does(monkeypatch):
    settings = {
        "model": Setting("m", 1),
        "prefill": Setting(2, 2),
        "page-size": Setting(8, 3),
        "num-pages": Setting(99, 4),
        "disable-radix-cache": Setting(True, 5),
    }
    got = local.from_file(settings, {"PDJAX_NUM_PAGES": "5"})
    assert got == ("--page-size", "8", "--disable-radix-cache")
    staging = {"disaggregation-host-staging": Setting(True, 1)}
    assert local.from_file(staging, {"TPU_ENABLE_D2H_TRANSFER": "0"}) == ()
    assert local.from_file({"disable-radix-cache": Setting(False, 1)}, {}) == ("--no-disable-radix-cache",)
    with pytest.raises(ConfigError, match="pdjax up chooses it itself"):
        local.from_file({"instance-id": Setting("x", 1)}, {})


def test_up_reads_its_own_keys_and_flags_still_win(monkeypatch, write):
    plans = []

    def remember(plan, as_json):
        plans.append(plan)
        return 0

    monkeypatch.setattr(cli, "up", remember)
    file = write("model: m\nprefill: 3\ndecode: 2\nrouter: none\nprefill-chips: 0;1;2\npage-size: 8\n")
    assert cli.run(["up", "--config", file, "--decode", "5", "--page-size", "4"]) == 0
    (plan,) = plans
    assert (plan.model, plan.prefill, plan.decode, plan.router) == ("m", 3, 5, "none")
    assert plan.prefill_chips == ("0", "1", "2")
    assert plan.extra == ("--page-size", "8", "--page-size", "4"), "the last one wins"


def test_children_of_up_do_not_inherit_what_up_decides(monkeypatch):
    made = []
    monkeypatch.setattr(local, "Child", lambda name, command, environ, forward: made.append(environ))
    monkeypatch.setenv("PDJAX_DISAGGREGATION_MODE", "decode")
    monkeypatch.setenv("PDJAX_CONFIG", "x.yaml")
    monkeypatch.setenv("PDJAX_PAGE_SIZE", "8")
    fleet = local.Fleet(local.Plan("m"))
    fleet._spawn("plain-0", ["x"])
    (environ,) = made
    assert "PDJAX_DISAGGREGATION_MODE" not in environ and "PDJAX_CONFIG" not in environ
    assert environ["PDJAX_PAGE_SIZE"] == "8"


@pytest.mark.parametrize(
    ("extra", "environ", "lingers"),
    [
        ((), {}, [["0"]]),
        (("--drain-linger", "3"), {}, [["3"]]),
        (("--drain-linger=3",), {}, [[]]),
        ((), {"PDJAX_DRAIN_LINGER": "3"}, [[]]),
    ],
)
def test_servers_of_up_do_not_linger_unless_they_are_told_to(monkeypatch, extra, environ, lingers):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    fleet = local.Fleet(local.Plan("m", prefill=0, decode=0, plain=1, router="none", extra=extra))
    spawned = []
    monkeypatch.setattr(fleet, "_spawn", lambda name, command, **environ: spawned.append(command))
    fleet._spawn_nodes(None)
    fleet.close()
    assert [
        [after for one, after in itertools.pairwise(command) if one == "--drain-linger"]
        for command in spawned
    ] == lingers
