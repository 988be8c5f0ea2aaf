"""Loading a model directory: dtypes, shards, and a refusal of everything that does not fit its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint
from pdjax.model.checkpoint import INDEX, SINGLE, load_model
from pdjax.model.runner import JaxRunner
from pdjax.model.tiny import make_tiny_model

F32 = np.dtype(np.float32)


def shard(directory: Path, names: tuple[str, str]) -> None:
    """Turn the single file into two shards with these file names in the index."""
    tensors = load_file(directory / SINGLE)
    keys = sorted(tensors)
    halves = {names[0]: keys[::2], names[1]: keys[1::2]}
    for name, part in halves.items():
        save_file({k: tensors[k] for k in part}, directory / Path(name).name)
    (directory / SINGLE).unlink()
    weight_map = {k: name for name, part in halves.items() for k in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    whole = load_model(make_tiny_model(tmp_path / "a"), F32)
    shard(make_tiny_model(tmp_path / "b"), ("model-1.safetensors", "model-2.safetensors"))
    parts = load_model(tmp_path / "b", F32)
    assert np.array_equal(whole.params["embed"], parts.params["embed"])
    for one, two in zip(whole.params["layers"], parts.params["layers"], strict=True):
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "x.bin"])
def test_a_shard_outside_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    shard(make_tiny_model(tmp_path), ("model-1.safetensors", name))
    with pytest.raises(ConfigError, match=r"must be a plain \*\.safetensors file name"):
        load_model(tmp_path, F32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_weights_load_as_float32(dtype: type, tmp_path: Path) -> None:
    exact = load_model(make_tiny_model(tmp_path), F32).params["embed"]

    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({k: v.astype(dtype) for k, v in tensors.items()})

    rewrite(tmp_path, halve)
    loaded = load_model(tmp_path, F32).params["embed"]
    assert loaded.dtype == np.float32
    assert np.array_equal(loaded, exact.astype(dtype).astype(np.float32))
    assert not np.array_equal(loaded, exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"is missing model\.layers\.1\.mlp\.up_proj\.weight$",
        ),
        (lambda t: [t.pop(k) for k in list(t)[:-1]], "is missing .* and 14 more"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            r"call for: .*q_proj\.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)}),
            r"model\.norm\.weight is \[63\] but",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)}), r"model\.norm\.weight is int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, np.ndarray]], object], message: str, tmp_path: Path
) -> None:
    rewrite(make_tiny_model(tmp_path), change)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, F32)


def test_what_exporters_add_without_effect_is_no_obstacle(tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    rewrite(make_tiny_model(tmp_path), add)
    load_model(tmp_path, F32)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path, F32)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ConfigError, match="has neither"):
        load_model(tmp_path, F32)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone\.safetensors cannot be read"):
        load_model(tmp_path, F32)


def test_the_digest_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    digests = {
        "same": load_model(make_tiny_model(tmp_path / "a"), F32).digest,
        "again": load_model(make_tiny_model(tmp_path / "b"), F32).digest,
        "seed": load_model(make_tiny_model(tmp_path / "c", seed=1), F32).digest,
    }
    rewrite(make_tiny_model(tmp_path / "d"), lambda t: t["model.norm.weight"].__setitem__(0, 2.0))
    digests["bit"] = load_model(tmp_path / "d", F32).digest
    directory = make_tiny_model(tmp_path / "e")
    (directory / "tokenizer.json").write_text((directory / "tokenizer.json").read_text() + " ")
    digests["tokenizer"] = load_model(directory, F32).digest
    assert digests["same"] == digests["again"]
    assert len(set(digests.values())) == 4


def test_the_fingerprint_names_what_differs(make_runner: Callable[..., JaxRunner], tmp_path: Path) -> None:
    def of(runner: JaxRunner, protocol: int = 1) -> Fingerprint:
        return runner.fingerprint(protocol=protocol, transfer_size=4 << 20, transport_addresses=1)

    mine = of(make_runner())
    assert mine.hash == of(make_runner(num_pages=99)).hash, "the size of the pool is each side's own affair"
    assert mine.differences(of(make_runner(page_size=16))) == ["page_size: 8 here, 16 there"]
    assert mine.differences(of(make_runner(dtype="bfloat16"))) == [
        "kv_dtype: 'float32' here, 'bfloat16' there"
    ]
    assert mine.differences(of(make_runner(), protocol=2)) == ["protocol: 1 here, 2 there"]
    [difference] = mine.differences(of(make_runner(make_tiny_model(tmp_path, seed=1))))
    assert difference.startswith("weights: ")
