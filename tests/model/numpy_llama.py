"""A plain numpy Llama, Qwen2 and Qwen3 in float64, written from the paper, without pages, buckets or chunks: what tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


class NumpyLlama:
    """Whole-sequence forward pass. raw: config.json as a dict with transformers 4 keys."""

    def __init__(self, directory: Path, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.w = {
            k: v.astype(np.float64) for f in directory.glob("*.safetensors") for k, v in load_file(f).items()
        }

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [len(ids), vocab_size]."""
        raw, w, n = self.raw, self.w, len(ids)
        heads, kv_heads, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
        causal = np.tril(np.ones((n, n), bool))
        h = w["model.embed_tokens.weight"][ids]
        for layer in range(raw["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = self._norm(h, w[at + "input_layernorm.weight"])
            q = self._project(x, at + "self_attn.q_proj").reshape(n, heads, dim)
            k = self._project(x, at + "self_attn.k_proj").reshape(n, kv_heads, dim)
            v = self._project(x, at + "self_attn.v_proj").reshape(n, kv_heads, dim)
            if raw["architectures"] == ["Qwen3ForCausalLM"]:
                q = self._norm(q, w[at + "self_attn.q_norm.weight"])
                k = self._norm(k, w[at + "self_attn.k_norm.weight"])
            q, k = self._rope(q), self._rope(k)
            mixed = np.zeros((n, heads, dim))
            for head in range(heads):
                kv = head * kv_heads // heads
                score = np.where(causal, q[:, head] @ k[:, kv].T / np.sqrt(dim), -np.inf)
                p = np.exp(score - score.max(-1, keepdims=True))
                mixed[:, head] = p / p.sum(-1, keepdims=True) @ v[:, kv]
            h = h + self._project(mixed.reshape(n, -1), at + "self_attn.o_proj")
            x = self._norm(h, w[at + "post_attention_layernorm.weight"])
            gate = self._project(x, at + "mlp.gate_proj")
            h = h + self._project(
                gate / (1 + np.exp(-gate)) * self._project(x, at + "mlp.up_proj"), at + "mlp.down_proj"
            )
        h = self._norm(h, w["model.norm.weight"])
        return h @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T

    def greedy(self, ids: list[int], n: int) -> list[int]:
        ids = list(ids)
        for _ in range(n):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-n:]

    def _project(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + self.raw["rms_norm_eps"])

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """Rotate pairs (i, i + dim/2) by position · frequency."""
        dim = x.shape[-1]
        out = np.empty_like(x)
        for i in range(dim // 2):
            angle = np.arange(x.shape[0]) * self._frequency(i, dim)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            out[..., i] = x[..., i] * cos - x[..., i + dim // 2] * sin
            out[..., i + dim // 2] = x[..., i + dim // 2] * cos + x[..., i] * sin
        return out

    def _frequency(self, i: int, dim: int) -> float:
        frequency = float(self.raw["rope_theta"]) ** (-2 * i / dim)
        scaling = self.raw.get("rope_scaling")
        if scaling is None:
            return frequency
        slow = frequency / scaling["factor"]
        if scaling["rope_type"] == "linear":
            return slow
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if turns < low:
            return slow
        if turns > high:
            return frequency
        share = (turns - low) / (high - low)
        return (1 - share) * slow + share * frequency
