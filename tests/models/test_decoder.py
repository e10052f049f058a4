"""The native decoder's logits are transformers' at every position, for every family and every rope scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrt.attention.torch_cpu import TorchAttention
from agentrt.models.decoder import Decoder
from agentrt.models.loader import load_model

FAMILIES = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3 with biases": (
        "Qwen3",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 17,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
        "long_factor": [4.0] * 5,
    },
}


def native(model: Any, folder: Path) -> Decoder:
    model.save_pretrained(folder)
    loaded = load_model(folder)
    assert isinstance(loaded.decoder, Decoder)
    return loaded.decoder


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = tiny(family, **changes)
    equal(native(model, tmp_path), model)


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(name: str, tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path) -> None:
    model = tiny("Llama", rope_parameters={"rope_theta": 500.0, **SCALINGS[name]})
    equal(native(model, tmp_path), model)


def test_gemma3_scales_only_its_full_layers(
    tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path
) -> None:
    model = tiny(
        "Gemma3",
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    )
    equal(native(model, tmp_path), model)


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "gemma2", "gemma3"])
def test_rows_that_are_not_wanted_are_left_out(name: str, tiny: Callable[..., Any], wanted_alike: Callable[..., None], tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    wanted_alike(native(tiny(family, **changes), tmp_path), TorchAttention(), nearly)


def nearly(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
