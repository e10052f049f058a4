"""What a model is made of, read from a Hugging Face ``config.json``: its shape, and the flags of the native decoder.

It knows nothing of tensors, and it reads both forms that transformers has written over the years (``rope_scaling`` and
``rope_parameters``, window flags and ``layer_types``). A model it does not know exactly is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrt.errors import ModelError

HF = Mapping[str, Any]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

_ROPE_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; the numbers mean what transformers' `rope_parameters` say.

    Attributes:
        theta: Base of the wavelengths.
        kind: How they are stretched.
        factor: By how much.
        original_context: Context of the pre-training.
        attention_factor: Factor on cos and sin (yarn, longrope); None: what the method's paper says.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, truncate, mscale, mscale_all_dim: yarn.
        short_factor: longrope, a factor for each wavelength.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, rope: HF, *, theta: float, max_position: int, outer_original: int | None) -> RopeConfig:
        """Reads one rope dictionary.

        Args:
            rope: `rope_parameters` (of one layer type) or `rope_scaling`; may be empty.
            theta: Base, if `rope` does not say.
            max_position: The model's max_position_embeddings.
            outer_original: `original_max_position_embeddings` beside the dictionary, which goes before the one in it.

        Raises:
            ModelError: For a kind of scaling that is not known, or one that lacks a number it needs.
        """
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind not in _ROPE_KINDS:
            raise ModelError(f"rope scaling {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
        if kind in ("linear", "dynamic", "llama3") and rope.get("factor") is None:
            raise ModelError(f"rope scaling {kind!r} has no 'factor' in config.json")
        original = outer_original or rope.get("original_max_position_embeddings") or max_position
        return cls(
            theta=float(rope.get("rope_theta") or theta),
            kind=_ROPE_KINDS[kind],
            factor=float(rope.get("factor") or max_position / original),
            original_context=int(original),
            attention_factor=rope.get("attention_factor"),
            low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
            high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            mscale=float(rope.get("mscale") or 0.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            short_factor=tuple(float(value) for value in rope.get("short_factor") or ()),
        )

    def context(self, max_position: int) -> int:
        """The longest context in which a token's rotation depends on its position alone, which cached KV needs.

        Dynamic NTK and LongRoPE rotate every key anew when a sequence outgrows the original context; keys that are
        cached and shared cannot follow, so those end there.
        """
        if self.kind == "longrope":
            return min(max_position, self.original_context)
        if self.kind == "yarn":
            return max(max_position, int(self.original_context * self.factor))
        return max_position


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Flags of the native decoder, and the sizes that only it needs.

    Attributes:
        width: Of the hidden states.
        mlp_width: Of the gated MLP.
        eps: Of the RMS norms.
        activation: Of the gate.
        rope: Rotary embedding of full layers, and of sliding ones unless `local_rope` is set.
        local_rope: Rotary embedding of sliding layers, where it differs.
        attention_scale: Factor on q.k.
        attention_softcap, logit_softcap: Soft caps of scores and logits; None: off.
        qkv_bias, output_bias, mlp_bias: Which linears have biases.
        qk_norm: RMS norm of each head's q and k before the rotation.
        norm_plus_one: Norm weights are stored minus one.
        post_norms: Norms behind attention and MLP too, before the residual sum.
        embedding_scale: Factor on the embeddings.
        tied: The output head is the embedding.
        weight_prefix: What the tensors' names begin with, "model." as a rule.
        head_name: Name of the output head's weight.
        other_layouts: (prefix, head name) under which the same tensors have been saved too.
        ignored_prefixes: Tensors of other parts (a vision tower) that are not read.
        fused: The file has qkv_proj and gate_up_proj already fused (agentrt's own conversion).
    """

    width: int
    mlp_width: int
    eps: float
    activation: Activation
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    weight_prefix: str = "model."
    head_name: str = "lm_head.weight"
    other_layouts: tuple[tuple[str, str], ...] = ()
    ignored_prefixes: tuple[str, ...] = ()
    fused: bool = False

    def renamed(self, weight_prefix: str, head_name: str) -> DecoderConfig:
        """The same with other names of tensors."""
        return replace(self, weight_prefix=weight_prefix, head_name=head_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape, as the engine needs it.

    Attributes:
        architecture: Its name in transformers, such as "LlamaForCausalLM".
        layers: Layers that keep KV.
        heads, kv_heads, head_dim: Of attention.
        vocab_size: Width of the logits; a tokenizer may know fewer ids.
        max_context: Tokens of the longest sequence.
        windows: For each layer, how many tokens a token sees, itself included; None: all.
        eos_ids: End tokens that config.json names.
        decoder: Flags of the native decoder; None: the model runs through transformers.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    windows: tuple[int | None, ...]
    eos_ids: tuple[int, ...] = ()
    decoder: DecoderConfig | None = None

    @classmethod
    def from_hf(cls, hf: HF) -> ModelConfig:
        """Reads a `config.json` of a model that the native decoder runs.

        Args:
            hf: The parsed file.

        Raises:
            ModelError: If the architecture is refused, or is not one of the native ones, or its config asks for
                something that the native decoder does not do.
        """
        architecture = architecture_of(hf)
        refuse_unsupported(hf)
        family = FAMILIES.get(architecture)
        if family is None:
            raise ModelError(f"{architecture} is not a native architecture; those are {', '.join(FAMILIES)}")
        return _read(architecture, family, {**family.defaults, **_present(hf.get("text_config") or hf)}, hf)


@dataclass(frozen=True, slots=True)
class _Family:
    """How one architecture differs: what its config.json may leave out, and flags that no config.json says."""

    defaults: HF
    flags: HF = field(default_factory=dict)
    gemma: bool = False


_COMMON: HF = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False}
_QWEN: HF = {**_COMMON, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: HF = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2: HF = {
    **_GEMMA,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3: HF = {
    **_GEMMA,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA_FLAGS: HF = {"norm_plus_one": True, "post_norms": True}
_VISION = ("vision_tower.", "multi_modal_projector.")

FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family({**_COMMON, "max_position_embeddings": 2048}),
    "MistralForCausalLM": _Family({**_COMMON, "max_position_embeddings": 131_072, "sliding_window": 4096}),
    "Qwen2ForCausalLM": _Family(_QWEN, {"qkv_bias": True, "output_bias": False, "mlp_bias": False}),
    "Qwen3ForCausalLM": _Family({**_QWEN, "head_dim": 128}, {"qk_norm": True}),
    "Gemma2ForCausalLM": _Family(_GEMMA2, _GEMMA_FLAGS, gemma=True),
    "Gemma3ForCausalLM": _Family(_GEMMA3, {**_GEMMA_FLAGS, "qk_norm": True}, gemma=True),
    "Gemma3ForConditionalGeneration": _Family(
        _GEMMA3,
        {
            **_GEMMA_FLAGS,
            "qk_norm": True,
            "weight_prefix": "model.language_model.",
            "other_layouts": (("language_model.model.", "language_model.lm_head.weight"),),
            "ignored_prefixes": _VISION + tuple(f"model.{part}" for part in _VISION),
        },
        gemma=True,
    ),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}

_NULL_IS_OFF = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

_RECURRENT = "it keeps a recurrent state, which a cache of prefixes cannot cut at any token"
_ALIBI = "its attention adds a bias for distance (ALiBi) outside transformers' attention interface"
#: model_type -> why it cannot run. What transformers itself marks as stateful or closed is refused when it is loaded.
REFUSED = {
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "rwkv": _RECURRENT,
    "jamba": _RECURRENT,
    "bamba": _RECURRENT,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "xlstm": _RECURRENT,
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": "it does not support transformers' attention interface (and older ones use ALiBi)",
}


def architecture_of(hf: HF) -> str:
    """The architecture that a config.json names.

    Raises:
        ModelError: If it names none.
    """
    names = hf.get("architectures") or ()
    if names:
        return str(names[0])
    model_type = str(hf.get("model_type") or "")
    if not model_type:
        raise ModelError("config.json names neither 'architectures' nor 'model_type'")
    return _MODEL_TYPES.get(model_type, model_type)


def refuse_unsupported(hf: HF) -> None:
    """Raises ModelError, with the reason, for a model that agentrt cannot run at all."""
    reason = REFUSED.get(str(hf.get("model_type") or ""))
    if reason is None and hf.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder"
    if reason is not None:
        raise ModelError(f"{architecture_of(hf)} cannot run on agentrt: {reason}")


def is_native(hf: HF) -> bool:
    """Whether the native decoder runs this model."""
    return architecture_of(hf) in FAMILIES


def eos_ids(hf: HF) -> tuple[int, ...]:
    """`eos_token_id` of a config, whether one, many or none."""
    value = hf.get("eos_token_id")
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)


def _present(hf: HF) -> HF:
    """What the file says; null means "the default", but for what null turns off."""
    return {key: value for key, value in hf.items() if value is not None or key in _NULL_IS_OFF}


def _number(hf: HF, name: str) -> int:
    value = hf.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {name} = {value!r}; a number above 0 is needed")
    return value


def _read(architecture: str, family: _Family, hf: HF, outer: HF) -> ModelConfig:
    """Args: hf: the language model's part, with the family's defaults filled in; outer: the whole file."""
    layers, heads = _number(hf, "num_hidden_layers"), _number(hf, "num_attention_heads")
    width, max_position = _number(hf, "hidden_size"), _number(hf, "max_position_embeddings")
    head_dim = hf.get("head_dim") or width // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"config.json has {heads} heads over {kv_heads} KV heads, which do not divide them")
    rope, local_rope = _ropes(family, hf, max_position)
    decoder = DecoderConfig(
        **{
            "width": width,
            "mlp_width": _number(hf, "intermediate_size"),
            "eps": float(hf["rms_norm_eps"]),
            "activation": _activation(hf),
            "rope": rope,
            "local_rope": local_rope,
            "tied": bool(outer.get("tie_word_embeddings", hf["tie_word_embeddings"])),
            "attention_scale": float(hf["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5,
            # transformers' Gemma 3 never hands the scores' cap to its attention, and no released model sets it.
            "attention_softcap": hf.get("attn_logit_softcapping") if architecture == "Gemma2ForCausalLM" else None,
            "logit_softcap": hf.get("final_logit_softcapping") if family.gemma else None,
            "qkv_bias": bool(hf.get("attention_bias")),
            "output_bias": bool(hf.get("attention_bias")),
            "mlp_bias": bool(hf.get("mlp_bias")),
            "embedding_scale": width**0.5 if family.gemma else 1.0,
            "fused": bool(outer.get("agentrt_fused")),
            **family.flags,
        }
    )
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_number(hf, "vocab_size"),
        max_context=rope.context(max_position),
        windows=_windows(hf, layers, architecture),
        eos_ids=eos_ids(outer) or eos_ids(hf),
        decoder=decoder,
    )


def _activation(hf: HF) -> Activation:
    name = str(hf.get("hidden_activation") or hf.get("hidden_act"))
    if name not in _ACTIVATIONS:
        raise ModelError(f"config.json has activation {name!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _ropes(family: _Family, hf: HF, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embeddings of full layers and, where they have their own, of sliding ones."""
    given: HF = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if float(given.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ModelError("config.json has a partial_rotary_factor, which this architecture does not use")
    outer = hf.get("original_max_position_embeddings")
    local_theta = hf.get("rope_local_base_freq")

    def read(rope: HF, theta: float) -> RopeConfig:
        return RopeConfig.from_hf(rope, theta=theta, max_position=max_position, outer_original=outer)

    if "full_attention" in given or "sliding_attention" in given:
        full, sliding = given.get("full_attention") or {}, given.get("sliding_attention") or {}
        return read(full, hf["rope_theta"]), read(sliding, local_theta or hf["rope_theta"])
    return read(given, hf["rope_theta"]), read({}, local_theta) if local_theta else None


def _windows(hf: HF, layers: int, architecture: str) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types` or from the flags that stood in its place before."""
    window = hf.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if architecture.startswith("Qwen") and not hf.get("use_sliding_window"):
        return (None,) * layers
    kinds = hf.get("layer_types") or _layer_types(hf, layers, architecture)
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if odd or len(kinds) != layers:
        raise ModelError(
            f"config.json has {len(kinds)} layer_types for {layers} layers{f', among them {odd}' if odd else ''};"
            " there must be one a layer, full_attention or sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(hf: HF, layers: int, architecture: str) -> list[str]:
    if architecture.startswith("Qwen"):  # The first layers are full, the others slide.
        sliding = [layer >= hf["max_window_layers"] for layer in range(layers)]
    else:  # Every pattern-th layer is full.
        sliding = [bool((layer + 1) % hf["sliding_window_pattern"]) for layer in range(layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]
