"""Any other causal model, run by transformers with our attention in its attention interface.

The model's own code computes everything but attention; the runs of a step go through it as one row, each token with its
position, and transformers' cache stays off. Nothing is taken on trust: when a model is loaded it tells its shape by
what it hands to attention, and it must give the same logits through our store, in two runs, as by transformers alone;
one that keeps state elsewhere, masks in ways of its own or counts positions by itself is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.torch_cpu import TorchAttention
from agentrt.errors import ModelError
from agentrt.models.config import ModelConfig, RopeConfig, eos_ids
from agentrt.models.decoder import LayeredStore

NAME = "agentrt"  #: Under which our attention is registered with transformers.
_PROBE = (5, 3)  #: Runs of the check at loading.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  #: of the logits' spread

_attend: ContextVar[Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]] = ContextVar("attend")


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    if others.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} attends in a way that agentrt does not (sinks, or both directions)")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _attend.get()(q, k, v, AttentionSpec(scale, sliding_window, softcap)).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _interface)


class AdaptedModel:
    """A model of transformers behind the native decoder's face.

    Attributes:
        config: Its shape; `decoder` is None.
        dtype: Of weights, activations and KV.
        device: Where it runs.
    """

    def __init__(self, model: Any, config: ModelConfig) -> None:
        """Args: model: set to our attention; config: its shape."""
        self.config = config
        self.dtype, self.device = model.dtype, model.device
        self._body = model.base_model
        self._head = _head_alone(model)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        store: LayeredStore,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Runs one step; arguments and result are those of `agentrt.models.decoder.Decoder.forward`."""
        layer = -1

        def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            nonlocal layer
            layer += 1  # Layers call in order; not every model numbers them.
            return attention(q, k, v, store[layer], batch, spec)

        hidden: Tensor = _run(self._body, token_ids, positions, attend).last_hidden_state
        return hidden[0] if wanted is None else hidden[0].index_select(0, wanted)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [rows, vocab_size] in float32 of hidden states [rows, width], capped and scaled as the model does."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(inputs_embeds=None, input_ids=ids, hidden=hidden[None], use_cache=False).logits
        return logits[0].float()


def load_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> AdaptedModel:
    """Loads a folder through transformers.

    Raises:
        ModelError: If transformers cannot load it, or the model does not run on a paged store.
    """
    model = _from_pretrained(folder, dtype).to(device).eval()
    _refuse(model)
    try:
        with torch.inference_mode():
            return _adapt(model)
    except ModelError:
        raise
    except Exception as error:  # Code of any model runs here, and may stumble over anything.
        raise ModelError(f"{type(model).__name__} cannot run on agentrt: {type(error).__name__}: {error}") from error


def _adapt(model: Any) -> AdaptedModel:
    probe = torch.arange(sum(_PROBE), device=model.device) * 7 % model.config.vocab_size
    expected = model(input_ids=probe[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(NAME)
    adapted = AdaptedModel(model, _shape(model, probe))
    _compare(adapted, probe, expected)
    return adapted


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    factory: Any = transformers.AutoModelForCausalLM
    try:
        model, report = factory.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder} cannot be loaded by transformers: {error}") from error
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ModelError(f"{folder} lacks {len(wrong)} tensors, or has them in the wrong shape: {', '.join(wrong[:4])}")
    return model


def _refuse(model: Any) -> None:
    """Raises ModelError for what transformers itself says does not fit a paged store."""
    config = model.config
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    reason = ""
    if getattr(model, "_is_stateful", False):
        reason = "it keeps a recurrent state, which a cache of prefixes cannot cut at any token"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "it does not support transformers' attention interface"
    elif odd or getattr(config, "attention_chunk_size", None):
        reason = f"it has layers of other kinds than full and sliding attention: {', '.join(odd) or 'chunked'}"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        reason = "it counts positions by itself"
    if reason:
        raise ModelError(f"{type(model).__name__} cannot run on agentrt: {reason}")


@dataclass(slots=True)
class _Recorder:
    """Plain causal attention over one run, which notes what each layer hands in."""

    seen: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], AttentionSpec]] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), spec))
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _shape(model: Any, probe: Tensor) -> ModelConfig:
    """The model's shape, from what its layers hand to attention."""
    config, name = model.config, type(model).__name__
    recorder = _Recorder()
    _run(model.base_model, probe, torch.arange(len(probe), device=probe.device), recorder)
    shapes = {seen[:3] for seen in recorder.seen}
    if len(shapes) != 1:
        raise ModelError(f"{name} cannot run on agentrt: its layers have {len(shapes)} shapes of attention, not one")
    q, k, v = next(iter(shapes))
    if not q[2] == k[2] == v[2]:
        raise ModelError(f"{name} cannot run on agentrt: heads of its keys and values differ in size ({k[2]}, {v[2]})")
    windows = tuple(seen[3].window for seen in recorder.seen)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    if any(kind == "sliding_attention" and window is None for kind, window in zip(kinds, windows, strict=False)):
        raise ModelError(f"{name} cannot run on agentrt: it does not tell its attention how wide its windows are")
    return ModelConfig(
        architecture=name,
        layers=len(windows),
        heads=q[1],
        kv_heads=k[1],
        head_dim=q[2],
        vocab_size=config.vocab_size,
        max_context=_context(config, name),
        windows=windows,
        eos_ids=eos_ids({"eos_token_id": config.eos_token_id}),
    )


def _context(config: Any, name: str) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ModelError(f"{name}: config.json does not say max_position_embeddings")
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in given.values() if isinstance(rope, dict)] or [given]
    ropes = (RopeConfig.from_hf(rope, theta=1.0, max_position=longest, outer_original=None) for rope in kinds)
    return min(rope.context(longest) for rope in ropes)


def _compare(adapted: AdaptedModel, probe: Tensor, expected: Tensor) -> None:
    """Raises ModelError unless the probe's logits through a paged store, run after run, are the model's own."""
    shape = (len(probe), adapted.config.kv_heads, adapted.config.head_dim)
    options = {"dtype": adapted.dtype, "device": adapted.device}
    store = [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(adapted.config.layers)]
    slots = torch.arange(len(probe), device=adapted.device).flip(0)
    rows, context = [], 0
    for new in _PROBE:
        end = context + new
        batch = AttentionBatch((new,), (context,), (slots[:end],), slots[context:end])
        positions = torch.arange(context, end, device=adapted.device)
        rows.append(adapted.logits(adapted.forward(probe[context:end], positions, batch, TorchAttention(), store)))
        context = end
    difference = (torch.cat(rows) - expected).abs().max() / expected.std()
    if not difference <= _TOLERANCE[adapted.dtype]:
        raise ModelError(
            f"{adapted.config.architecture} cannot run on agentrt: through the paged store its logits differ by"
            f" {float(difference):.2g} of their spread, so it computes attention or positions in ways of its own"
        )


def _run(body: Any, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Any:
    """The model's body over one row of tokens, with `attend` as its attention."""
    token = _attend.set(attend)
    try:
        return body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    finally:
        _attend.reset(token)


class _Given(nn.Module):
    """Stands where a model's body was, and answers with hidden states that were computed before."""

    def forward(self, *args: object, hidden: Tensor, **kwargs: object) -> _GivenOutput:
        del args, kwargs
        return _GivenOutput(hidden)


@dataclass(slots=True)
class _GivenOutput:
    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and the like: there are none."""


def _head_alone(model: Any) -> Any:
    """The causal model with its body replaced: its own code from hidden states to logits, whatever that does."""
    head = copy.copy(model)
    head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _Given()}
    return head
