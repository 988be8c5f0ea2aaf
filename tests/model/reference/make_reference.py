"""Write smollm2.json: what another implementation (PyTorch and transformers, float32) says of SmolLM2.

Not part of the test run: it needs `pip install torch transformers` in an environment of its own, then

    python make_reference.py DIRECTORY_OF_THE_MODEL smollm2.json

It imports nothing of this project, so that no mistake is on both sides of the comparison.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

N_TOKENS = 32
STORY = (
    "Once upon a time there was a lighthouse keeper who lived alone on a small island. Every evening he climbed the "
    "one hundred and twelve steps to the lamp, and every morning he wrote down the ships that had passed. One winter "
    "the sea froze, no ship came for forty days, and he began to write down the birds instead. "
)
RAW = {
    "capital": "The capital of France is",
    "count": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "one_token": "Water",
    "unicode": "Übersetzung: „Guten Morgen“ means 早上好 in Chinese and",
    "long_story": STORY * 6 + "When the ice broke,",
}
CHAT = {
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_plants": [{"role": "user", "content": "Explain photosynthesis in two sentences."}],
    "chat_system": [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": "Which planet is the largest?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, how can I help you?"},
        {"role": "user", "content": "Name three prime numbers."},
    ],
}


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> dict[str, list[Any]]:
    """N_TOKENS greedy tokens, each with its log-probability and its logit's lead over the second best."""
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    step, cache = torch.tensor([ids]), None
    for _ in range(N_TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        best = logits.topk(2)
        token = int(best.indices[0])
        tokens.append(token)
        logprobs.append(round(float(logits.log_softmax(-1)[token]), 5))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        step = torch.tensor([[token]])
    return {"tokens": tokens, "logprobs": logprobs, "margins": margins}


def main(directory: str, target: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cases = []
    for name, text in RAW.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cases.append({"name": name, "text": text, "ids": ids, **greedy(model, ids)})
    for name, messages in CHAT.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cases.append({"name": name, "messages": messages, "prompt": text, "ids": ids, **greedy(model, ids)})
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    Path(target).write_text(
        json.dumps({"made_with": made_with, "cases": cases}, ensure_ascii=False, indent=1) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
