"""The native decoder: one implementation for every family it knows, steered by the flags of `DecoderConfig`.

It turns a step's tokens into hidden states and hidden states into logits. It keeps no state between steps: KV lives in
the store, attention is handed in, matrices stand behind `agentrt.models.linear`. Rows of a step never mix but in
attention, so a sequence's answer does not depend on its neighbours. Gradients are nobody's business here; whoever calls holds torch's
inference mode, once for a whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.models.config import DecoderConfig, ModelConfig
from agentrt.models.linear import Linear, LinearFactory, dense
from agentrt.models.native_layers import Ends, LayerParts, native_layers
from agentrt.models.native_rows import NativeRows
from agentrt.models.rotary import Rotary, rotate
from agentrt.models.row_ops import Norm, RowOps, row_ops


class LayeredStore(Protocol):
    """Keys and values by layer, each [slots, kv_heads, head_dim]; `agentrt.engine.kv_store.KVStore` is one."""

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's parts, ready to call; norms that the family lacks are None."""

    spec: AttentionSpec
    local: bool
    before_attention: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Linear
    down: Linear
    after_mlp: Norm | None


class Decoder:
    """A decoder-only transformer.

    Attributes:
        config: The model's shape and flags.
        dtype: Of weights and activations.
        device: Where it runs.
        native: Runs all layers in one call, if this model and this machine are such.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], linear: LinearFactory = dense, rows: RowOps | None = None
    ) -> None:
        """Builds the layers; dense weights are used as they are, without a copy.

        Args:
            config: With `decoder` set.
            weights: Tensors by name, in the fused layout that `weight_shapes` lists.
            linear: How to hold matrices.
            rows: Norms and activations; None: what suits the device.
        """
        if config.decoder is None:
            raise ValueError(f"{config.architecture} has no native decoder")
        self.config = config
        self._flags = flags = config.decoder
        self._embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._rope = Rotary(flags.rope, config.head_dim, self.device)
        self._local_rope = Rotary(flags.local_rope, config.head_dim, self.device) if flags.local_rope else None
        # The factor is rounded to the weights' dtype, as the models were trained with.
        self._embedding_scale = float(torch.tensor(flags.embedding_scale, dtype=self.dtype))
        self._rows = rows = rows or row_ops(self.device)
        self._rotated = config.heads + config.kv_heads
        self._layers = tuple(_layer(config, flags, weights, linear, rows, index) for index in range(config.layers))
        self._norm = _norm(flags, weights["model.norm.weight"], rows)
        plain = isinstance(rows, NativeRows) and self.dtype == torch.float32
        ends = Ends(self._embedding, self._embedding_scale, self._rope, self._local_rope or self._rope, self._norm.weight, flags.eps)
        self.native = native_layers(config, [_plain(layer) for layer in self._layers], ends) if plain else None
        head = self._embedding if flags.tied else weights["lm_head.weight"]
        self._head = linear("lm_head", head, None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        store: LayeredStore,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Runs one step; writes the new tokens' KV to their slots.

        Args:
            token_ids: int64 [tokens], run after run.
            positions: int64 [tokens], each token's place in its sequence.
            batch: The runs.
            attention: How to attend.
            store: Keys and values by layer.
            wanted: int64 [rows]: the tokens that are asked about, in any order; None: all. The last layer computes no more of
                the others than their KV.

        Returns:
            Hidden states behind the last norm, [rows, width], in the order of `wanted`.
        """
        kept = wanted if wanted is not None and len(wanted) < len(token_ids) else None  # None: there is nothing to leave out
        done = None if self.native is None else self.native.forward(token_ids, positions, batch, attention, store, kept)
        if done is None:
            done = self._layer_by_layer(token_ids, positions, batch, attention, store, kept)
        return done if wanted is None or kept is not None else done.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            hidden: Rows of what `forward` returned, [rows, width].

        Returns:
            float32 [rows, vocab_size], soft-capped if the model does that.
        """
        logits = self._head(hidden).float()
        cap = self._flags.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _layer_by_layer(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        store: LayeredStore,
        wanted: Tensor | None,
    ) -> Tensor:
        hidden = self._embedding.index_select(0, token_ids)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        angles = self._rope.angles(positions, self.dtype)
        local = angles if self._local_rope is None else self._local_rope.angles(positions, self.dtype)
        changed: Tensor | None = None  # what the layer before adds; added where it is normed next
        for index, layer in enumerate(self._layers):
            normed = layer.before_attention(hidden) if changed is None else layer.before_attention.after_adding(hidden, changed)
            kept = wanted if layer is self._layers[-1] else None
            if kept is not None and kept.is_cpu:  # elsewhere, to look at them would be to wait for the device
                batch = batch.only(kept)
            attended = self._attend(layer, normed, local if layer.local else angles, batch, attention, store[index])
            if kept is not None:
                attended, hidden = attended.index_select(0, kept), hidden.index_select(0, kept)
                if not len(kept):
                    return hidden
            attended = layer.output(attended)
            if layer.after_attention is not None:
                attended = layer.after_attention(attended)
            changed = self._mlp(layer, layer.before_mlp.after_adding(hidden, attended))
            if layer.after_mlp is not None:
                changed = layer.after_mlp(changed)
        return self._norm(hidden) if changed is None else self._norm.after_adding(hidden, changed)

    def _attend(
        self,
        layer: _Layer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        attention: Attention,
        store: tuple[Tensor, Tensor],
    ) -> Tensor:
        heads = self.config.heads
        qkv = layer.qkv(normed).view(normed.shape[0], -1, self.config.head_dim)
        fused = getattr(attention, "from_qkv", None)  # of a FusedAttention; isinstance would take microseconds a layer
        if fused is not None and layer.q_norm is None:
            fused_answer: Tensor = fused(qkv, angles, heads, store, batch, layer.spec)
            return fused_answer.view(normed.shape[0], -1)
        qk = qkv[:, : self._rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :heads]), layer.k_norm(qk[:, heads:])), 1)
        qk = rotate(qk, *angles)  # q and k turn alike, so one call does both
        attended = attention(qk[:, :heads], qk[:, heads:], qkv[:, self._rotated :], store, batch, layer.spec)
        return attended.view(normed.shape[0], -1)

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        return layer.down(self._rows.gate(layer.gate_up(normed), self._flags.activation))


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `Decoder` reads.

    Rows of `qkv_proj` are q's, then k's, then v's; rows of `gate_up_proj` are the gate's, then up's.
    """
    flags = config.decoder
    if flags is None:
        raise ValueError(f"{config.architecture} has no native decoder")
    width, head_dim = flags.width, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not flags.tied:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    linears = (
        ("self_attn.qkv_proj", (config.heads + 2 * config.kv_heads) * head_dim, width, flags.qkv_bias),
        ("self_attn.o_proj", width, config.heads * head_dim, flags.output_bias),
        ("mlp.gate_up_proj", 2 * flags.mlp_width, width, flags.mlp_bias),
        ("mlp.down_proj", width, flags.mlp_width, flags.mlp_bias),
    )
    norms = ["input_layernorm", "post_attention_layernorm"]
    if flags.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes.update({f"{prefix}{name}.weight": (width,) for name in norms})
        if flags.qk_norm:
            shapes.update({f"{prefix}self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")})
    return shapes


def _plain(layer: _Layer) -> LayerParts | None:
    """The layer, if it has no more than two norms."""
    if not (layer.q_norm is layer.k_norm is layer.after_attention is layer.after_mlp is None):
        return None
    norms = (layer.before_attention.weight, layer.before_mlp.weight)
    return LayerParts(layer.spec, layer.local, norms, (layer.qkv, layer.output, layer.gate_up, layer.down))


def _norm(flags: DecoderConfig, weight: Tensor, rows: RowOps) -> Norm:
    return Norm(weight.float().add(1.0).to(weight.dtype) if flags.norm_plus_one else weight, flags.eps, rows)


def _layer(
    config: ModelConfig, flags: DecoderConfig, weights: Mapping[str, Tensor], linear: LinearFactory, rows: RowOps, index: int
) -> _Layer:
    prefix = f"model.layers.{index}."

    def matrix(name: str, bias: bool) -> Linear:
        name = prefix + name
        return linear(name, weights[f"{name}.weight"], weights[f"{name}.bias"] if bias else None)

    def norm(name: str, present: bool) -> Norm | None:
        return _norm(flags, weights[f"{prefix}{name}.weight"], rows) if present else None

    window = config.windows[index]
    # With norms on both sides the names shift: "post_attention" then stands behind attention, not before the MLP.
    before_mlp = "pre_feedforward_layernorm" if flags.post_norms else "post_attention_layernorm"
    return _Layer(
        spec=AttentionSpec(flags.attention_scale, window, flags.attention_softcap),
        local=window is not None and flags.local_rope is not None,
        before_attention=_norm(flags, weights[f"{prefix}input_layernorm.weight"], rows),
        qkv=matrix("self_attn.qkv_proj", flags.qkv_bias),
        q_norm=norm("self_attn.q_norm", flags.qk_norm),
        k_norm=norm("self_attn.k_norm", flags.qk_norm),
        output=matrix("self_attn.o_proj", flags.output_bias),
        after_attention=norm("post_attention_layernorm", flags.post_norms),
        before_mlp=_norm(flags, weights[f"{prefix}{before_mlp}.weight"], rows),
        gate_up=matrix("mlp.gate_up_proj", flags.mlp_bias),
        down=matrix("mlp.down_proj", flags.mlp_bias),
        after_mlp=norm("post_feedforward_layernorm", flags.post_norms),
    )
