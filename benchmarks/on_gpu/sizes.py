"""What is measured, and how large: the shape of Llama 3.2 1B, and toy sizes that test the scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SEED = 0
PAGE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how large."""

    device: torch.device
    dtype: torch.dtype
    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    mlp: int = 8192
    vocab: int = 128_256
    context: int = 1024
    batches: tuple[int, ...] = (1, 8, 64, 256)
    branches: int = 64
    prompt: int = 4096
    prefill: int = 2048
    repeats: int = 20

    def config(self) -> dict[str, Any]:
        """As the model's config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.width, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
            "vocab_size": self.vocab, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
            "tie_word_embeddings": True,
        }  # fmt: skip


SMALL = {
    "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128, "vocab": 320, "context": 40, "batches": (1, 3),
    "branches": 3, "prompt": 144, "prefill": 40, "repeats": 1,
}  # fmt: skip
