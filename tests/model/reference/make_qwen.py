"""Write qwen.json: what another implementation (PyTorch and transformers, float32) says of tiny Qwen2 and Qwen3 models.

Not part of the test run. Make the models with this project, one directory for each name in model_variants.QWEN,

    make_tiny_model(Path("qwen2"), seed=7, **QWEN["qwen2"])

and then, in an environment of its own with `pip install torch transformers`,

    python make_qwen.py qwen.json DIRECTORY ...

It imports nothing of this project, so that no mistake is on both sides of the comparison.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

N_TOKENS = 12
PROMPTS = {
    "short": [17],
    "middle": [(7 * i * i + 3) % 512 for i in range(23)],
    "long": [i * 37 % 512 for i in range(90)],
}


def main(out: Path, directories: list[Path]) -> None:
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for directory in directories:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        models[directory.name] = {name: answer(model, ids) for name, ids in PROMPTS.items()}
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    out.write_text(json.dumps({"made_with": made_with, "models": models}) + "\n", encoding="utf-8")


@torch.no_grad()
def answer(model: Any, ids: list[int]) -> dict[str, Any]:
    """The logits after the prompt, and N_TOKENS greedy tokens with their log-probabilities."""
    logits = model(torch.tensor([ids])).logits[0, -1]
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(N_TOKENS):
        row = model(torch.tensor([ids + tokens])).logits[0, -1]
        tokens.append(int(row.argmax()))
        logprobs.append(round(float(row.log_softmax(-1)[tokens[-1]]), 5))
    return {
        "ids": ids,
        "logits": [round(float(x), 5) for x in logits],
        "tokens": tokens,
        "logprobs": logprobs,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
