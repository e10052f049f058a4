"""config.json in the forms that it has had over the years; what is not known exactly is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agentrt.errors import ModelError
from agentrt.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def rope(**changes: Any) -> Any:
    decoder = read(**changes).decoder
    assert decoder is not None
    return decoder.rope


def test_old_and_new_rope_say_the_same() -> None:
    old = rope(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = rope(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old == new
    assert (new.kind, new.factor, new.theta) == ("linear", 2.0, 5e5)


def test_gemma3_old_and_new_say_the_same() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16}
    old = read(
        **gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )  # fmt: skip
    new = read(
        **gemma,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
    )
    assert old == new
    assert new.windows == ((16,) * 5 + (None,)) * 2
    assert new.decoder is not None
    assert new.decoder.local_rope is not None
    assert (new.decoder.local_rope.theta, new.decoder.local_rope.kind) == (1e4, "default")


def test_null_turns_a_cap_off_and_absence_means_the_default() -> None:
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    absent = read(**gemma).decoder
    null = read(**gemma, attn_logit_softcapping=None, final_logit_softcapping=None).decoder
    assert absent is not None
    assert null is not None
    assert (absent.attention_softcap, absent.logit_softcap) == (50.0, 30.0)
    assert (null.attention_softcap, null.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, (None,) * 12),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9,) * 12),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 12),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, (None,) * 12),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 10,
            },
            (None,) * 10 + (9,) * 2,
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 9}, (9, None) * 6),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(**changes).windows == windows


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 2048, "short_factor": [1.0] * 4}, 2048),
    ],
)
def test_context_ends_where_a_cached_key_would_have_to_turn(scaling: dict[str, Any], context: int) -> None:
    assert read(rope_parameters=scaling).max_context == context


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"type": "su"}}, "'su' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' has no 'factor'"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"num_key_value_heads": 4}, "6 heads over 4 KV heads"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM.*recurrent state"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
            "encoder-decoder",
        ),
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM is not a native architecture"),
        ({"architectures": None, "model_type": None}, "neither 'architectures' nor 'model_type'"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 12,
            },
            "chunked_attention",
        ),
    ],
)
def test_refusals_say_what_is_wrong(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read(**changes)


def test_reading_a_config_needs_no_torch() -> None:
    program = "import sys, agentrt.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
