"""Models of transformers on our attention: the same logits at every position; what cannot run is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrt.attention.torch_cpu import TorchAttention
from agentrt.errors import ModelError
from agentrt.models.loader import load_model

PLAIN: dict[str, Any] = {"num_key_value_heads": None, "head_dim": 8}
MODELS = {
    "gpt-neox": (
        "GPTNeoX",
        {
            **PLAIN,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "hidden_size": 60,
            "attention_bias": True,
        },
    ),
    "phi-3": ("Phi3", {**PLAIN, "num_key_value_heads": 2, "sliding_window": 7}),
    "olmo": ("Olmo", {**PLAIN, "num_key_value_heads": 2, "clip_qkv": 1.5}),
    "olmo 2": ("Olmo2", {**PLAIN, "num_key_value_heads": 3}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    "gemma": ("Gemma", {}),
    "cohere, which scales its logits": ("Cohere", {**PLAIN, "num_key_value_heads": 2, "logit_scale": 0.37}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_logits_are_transformers(
    name: str, tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path
) -> None:
    family, changes = MODELS[name]
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path)
    equal(load_model(tmp_path).decoder, model)


def test_only_wanted_rows_are_answered(tiny: Callable[..., Any], wanted_alike: Callable[..., None], tmp_path: Path) -> None:
    tiny("Gemma").save_pretrained(tmp_path)
    wanted_alike(load_model(tmp_path).decoder, TorchAttention(), lambda got, expected: torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4))


@pytest.mark.parametrize(
    ("family", "why"),
    [("Mamba", "recurrent"), ("Bloom", "ALiBi"), ("Falcon", "attention interface"), ("Jamba", "recurrent")],
)
def test_refused_by_name(family: str, why: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{family}ForCausalLM.*{why}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("GptOss", {"num_local_experts": 4}, "sinks"),
        ("OPT", {"num_key_value_heads": None, "word_embed_proj_dim": 48, "ffn_dim": 72}, "AttributeError"),
        ("DeepseekV3", {}, "DeepseekV3ForCausalLM"),
    ],
)
def test_refused_once_transformers_has_loaded_it(
    family: str, changes: dict[str, Any], why: str, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    tiny(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path)
