"""The tokenizer that a GGUF file carries, as Hugging Face's tokenizer of the same model has it.

Must never guess: how a text is cut before the merges is named by ``tokenizer.ggml.pre``, and a name that is not known
here would give other tokens without a word (facts/model §1). Must never import JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pdjax.core.errors import ConfigError
from pdjax.model.gguf_model import special_id

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of the GGUF format
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _smollm() -> Any:
    """Every digit on its own."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])


def _words(digits: str) -> Callable[[], Any]:
    """Llama 3 and Qwen: words, and numbers of as many digits as the regular expression says."""

    def make() -> Any:
        split = pre_tokenizers.Split(Regex(WORDS % digits), behavior="isolated")
        return pre_tokenizers.Sequence([split, _bytes(use_regex=False)])

    return make


def _bytes(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


CUTS: dict[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "gpt-2": lambda: _bytes(use_regex=True),
    "llama-bpe": _words("{1,3}"),
    "qwen2": _words(""),
}


def make_tokenizer(fields: dict[str, Any], path: Path) -> Tokenizer:
    """Byte-level BPE from tokens and merges. Raises ConfigError for any other kind."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in CUTS:
        raise ConfigError(
            f"{path}: GGUF tokenizer {(model, pre)} is not supported: only 'gpt2' with one of {sorted(CUTS)} is"
        )
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    unknown = set(kinds) - {NORMAL, CONTROL, USER_DEFINED, UNUSED}
    if unknown or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"{path}: GGUF token types {sorted(unknown)}, or a token without one, are not supported"
        )
    try:
        bpe = BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: its tokens and merges do not fit: {error}") from None
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = CUTS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        special = kind == CONTROL
        named = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
        add([AddedToken(token, special=special, normalized=False) for token in named])
    bos = special_id(fields, "bos")
    if fields.get("tokenizer.ggml.add_bos_token"):
        if bos is None:
            raise ConfigError(f"{path}: a text is to begin with a token, which the file does not name")
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        except ValueError as error:  # the library's templates have marks of their own
            raise ConfigError(
                f"{path}: a text cannot begin with the token {tokens[bos]!r}: {error}"
            ) from None
    return tokenizer


def tokenizer_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json would say."""
    tokens = fields.get("tokenizer.ggml.tokens", [])
    named = {name: special_id(fields, name) for name in ("bos", "eos", "pad")}
    return {
        **{f"{k}_token": tokens[i] for k, i in named.items() if i is not None and 0 <= i < len(tokens)},
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get(f"{fields.get('general.architecture')}.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def eos_ids(fields: dict[str, Any]) -> list[int]:
    """Tokens that end a generation: of a text, of a turn and of a message."""
    found = (special_id(fields, name) for name in ("eos", "eot", "eom"))
    return sorted({i for i in found if i is not None})
