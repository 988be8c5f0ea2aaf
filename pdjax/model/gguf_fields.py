"""The types of those metadata fields of a GGUF file that are read, checked once for everybody who reads them.

The file is untrusted and states the type of each field itself. Must never change a value.
"""

from __future__ import annotations

from typing import Any

TOKEN_IDS = ("bos", "eos", "eot", "eom", "padding")
# Of the architecture: these are divided or rounded before the config is checked as a whole.
NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor")
TEXT_FIELDS = (
    *("general.architecture", "tokenizer.chat_template"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre"),
)
LIST_FIELDS = {"tokenizer.ggml.tokens": str, "tokenizer.ggml.merges": str, "tokenizer.ggml.token_type": int}


def wrong_field(fields: dict[str, Any]) -> str | None:
    """What is wrong with the first field that is not of the type that the format gives it."""
    arch = fields.get("general.architecture")
    for name in (*TEXT_FIELDS, f"{arch}.rope.scaling.type"):
        if name in fields and not _all_of(str, [fields[name]]):
            return f"{name} is no text"
    for name, kind in LIST_FIELDS.items():
        value = fields.get(name, [])
        if not isinstance(value, list) or not _all_of(kind, value):
            return f"{name} is no list of {'texts' if kind is str else 'integers'}"
    for name in (f"{arch}.{number}" for number in NUMBERS):
        if not _all_of(float, [fields.get(name, 1.0)]):
            return f"{name} is no number"
    return _wrong_token(fields)


def _wrong_token(fields: dict[str, Any]) -> str | None:
    n_tokens = len(fields.get("tokenizer.ggml.tokens", []))
    for name in (f"tokenizer.ggml.{token}_token_id" for token in TOKEN_IDS):
        value = fields.get(name, 0)
        # Of padding some files name a token that is not there; none is ever put in.
        if not _all_of(int, [value]) or (
            name in fields and "padding" not in name and not 0 <= value < n_tokens
        ):
            return f"{name} is none of its {n_tokens} tokens"
    return None


def _all_of(kind: type, values: list[Any]) -> bool:
    """An array of a GGUF file has one type, but no list is trusted to be one. A text must be UTF-8."""
    if kind is float:
        return all(type(value) in (int, float) for value in values)
    if any(type(value) is not kind for value in values):
        return False
    if kind is str:
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            return False
    return True
