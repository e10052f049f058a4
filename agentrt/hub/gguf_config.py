"""GGUF metadata to Hugging Face's ``config.json`` and ``generation_config.json``; tensors are not touched here.

Invariant: everything that changes a logit is either in the result or a `ModelError` that names the key; nothing that
the file states is silently dropped. What llama.cpp holds in its code and not in the file (Gemma's local rope base, its
attention scale, its layer pattern) stands here as constants with their reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import ModelError

#: GGUF architecture -> (model_type, class name) of Hugging Face.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}

#: Control tokens that end an answer in one chat format or another.
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
)
_CONTROL = 3  # tokenizer.ggml.token_type

_GEMMA3_LOCAL_ROPE_BASE = 10_000.0  # of its sliding layers; the file has only that of the others
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these scale attention by the width a head, not by head_dim
_SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}  # every n-th layer sees everything


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.arch = str(metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the file lacks the metadata key {self.arch}.{key}", param="model")
        return value

    def uniform(self, key: str) -> int:
        """A value that must be the same for every layer."""
        value = self.need(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.arch}.{key} differs from layer to layer, which is not supported", param="model")
            value = value[0]
        return int(value)


def model_config(
    metadata: Mapping[str, Any], tensor_names: frozenset[str], rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Builds ``config.json``, but for ``vocab_size``, which is the number of rows of the embedding.

    Args:
        metadata: The file's header.
        tensor_names: Names of the file's tensors.
        rope_factors: float32 [head_dim / 2], the divisors of the rotary frequencies (``rope_freqs.weight``), or None.

    Raises:
        ModelError: An architecture or a setting that is not supported.
    """
    keys = _Keys(metadata)
    if keys.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"the architecture {keys.arch!r} is not supported; supported: {known}", param="model")
    config = _shape(keys, metadata, tensor_names) | _rope(keys, rope_factors)
    if keys.arch.startswith("gemma"):
        config |= _gemma(keys, config)
    elif (window := keys.get("attention.sliding_window")) and keys.arch in ("llama", "mistral"):
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": int(window)}
    return config


def _shape(keys: _Keys, metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> dict[str, Any]:
    model_type, class_name = ARCHITECTURES[keys.arch]
    hidden, heads = int(keys.need("embedding_length")), keys.uniform("attention.head_count")
    head_dim = int(keys.get("attention.key_length", hidden // heads))
    value_dim = int(keys.get("attention.value_length", head_dim))
    if value_dim != head_dim or int(keys.get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("keys, values and rotary dimensions of different sizes are not supported", param="model")
    if keys.get("expert_count"):
        raise ModelError("a mixture of experts in a GGUF file is not supported; use the model's folder", param="model")
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": hidden,
        "intermediate_size": keys.uniform("feed_forward_length"),
        "num_hidden_layers": int(keys.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.uniform("attention.head_count_kv") if keys.get("attention.head_count_kv") else heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short_float(keys.need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(keys.need("context_length")),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _rope(keys: _Keys, factors: NDArray[np.float32] | None) -> dict[str, Any]:
    base = float(keys.get("rope.freq_base", 10_000.0))
    rope: dict[str, Any] = {"rope_theta": base}
    kind = keys.get("rope.scaling.type", "none")
    factor = float(keys.get("rope.scaling.factor", 1.0))
    original = keys.get("rope.scaling.original_context_length")
    if factors is not None:
        rope["rope_scaling"] = llama3_scaling(base, factors)
    elif kind == "linear" or (kind == "none" and keys.get("rope.scale_linear")):
        rope["rope_scaling"] = {"rope_type": "linear", "factor": float(keys.get("rope.scale_linear", factor))}
    elif kind == "yarn":
        rope["rope_scaling"] = _yarn(keys, factor, original)
    elif kind != "none":
        raise ModelError(f"{keys.arch}.rope.scaling.type is {kind!r}, which is not supported", param="model")
    return rope


def _yarn(keys: _Keys, factor: float, original: int | None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = int(original or keys.need("context_length"))
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "attn_factor": "attention_factor"}
    for name, theirs in names.items():
        if (value := keys.get(f"rope.scaling.{name}")) is not None:
            scaling[theirs] = float(value)
    return scaling


def llama3_scaling(base: float, factors: NDArray[np.float32]) -> dict[str, Any]:
    """Finds the Llama 3 rope scaling that gives these frequency divisors.

    The file has the divisors and not the four numbers that they were worked out from. Between its two bounds the
    inverse of the divisor is linear in the frequency, so two of them give the line; of the numbers that give the same
    line, those with the usual lower bound of 1 are chosen.

    Args:
        base: The rotary base.
        factors: float32 [head_dim / 2].

    Raises:
        ModelError: The divisors are not of that form.
    """
    count = len(factors)
    turns = base ** -(np.arange(count) / count) / (2 * math.pi)  # turns a token, of each frequency
    factor = float(factors.max())
    between = (factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4))
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    candidates = [(4.0, 8192.0)]
    if between.sum() >= 2:
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(turns[between], smooth, 1)
        if intercept < 0:
            candidates.append((1.0 - 1.0 / intercept, -slope / intercept))
    for high, original in candidates:
        scaling |= {"high_freq_factor": high, "original_max_position_embeddings": round(original)}
        if np.allclose(_llama3_divisors(turns, scaling), factors, rtol=1e-4):
            return scaling
    raise ModelError("the file's rope_freqs are not of Llama 3's form, which is the only one supported", param="model")


def _llama3_divisors(turns: NDArray[np.float64], scaling: Mapping[str, Any]) -> NDArray[np.float64]:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] * turns - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors


def _gemma(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scale = keys.get("attention.scale")
    wide = layers == _GEMMA_27B_LAYERS[keys.arch]
    pattern = keys.get("attention.sliding_window_pattern", _SLIDING_PATTERN[keys.arch])
    sliding = pattern if isinstance(pattern, list) else [bool((i + 1) % int(pattern)) for i in range(layers)]
    gemma: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2) if scale else config["hidden_size"] // heads if wide else config["head_dim"],
        "sliding_window": int(keys.get("attention.sliding_window", 4096)),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "attn_logit_softcapping": _cap(keys, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(keys, "final_logit_softcapping", 30.0),
    }
    if keys.arch == "gemma3":
        gemma["rope_theta"] = float(keys.get("rope.freq_base", 1_000_000.0))
        gemma["rope_local_base_freq"] = float(keys.get("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_BASE))
    return gemma


def _cap(keys: _Keys, name: str, default: float) -> float | None:
    """Gemma 2 caps its logits even where the file does not say so; Gemma 3 only where it does."""
    value = keys.get(name, default if keys.arch == "gemma2" else None)
    return float(value) if value else None


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds ``generation_config.json``: every id that ends an answer, and the sampling defaults if the file has any."""
    config: dict[str, Any] = {"eos_token_id": end_token_ids(metadata)}
    for key in ("bos", "padding"):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config["pad_token_id" if key == "padding" else "bos_token_id"] = value
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    for name, theirs in names.items():
        if (value := metadata.get(f"general.sampling.{name}")) is not None:
            config[theirs] = _short_float(value) if isinstance(value, float) else value
    return config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: those the file names, then control tokens whose text is a known end of turn or text."""
    ids: list[int] = []
    for key in ("eos", "eot", "eom"):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            ids.append(int(value))
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL and token in _END_TOKENS:
            ids.append(token_id)
    return list(dict.fromkeys(ids))


def _short_float(value: float) -> float:
    """The shortest decimal that is this float32: files hold 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
