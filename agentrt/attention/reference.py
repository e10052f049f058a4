"""The slow, obviously right attention: one query token at a time, in float64. It is what every other backend is tested
against, and nothing else. It keeps the interface's rule word for word: a token sees its sequence's slots up to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec


class ReferenceAttention:
    """Attention by its definition; see `agentrt.attention.base.Attention` for shapes."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Writes k and v to the store and attends, token by token."""
        keys, values = store
        keys[batch.new_slots] = k
        values[batch.new_slots] = v
        out = torch.empty_like(q)
        row = 0
        for length, context, slots in zip(batch.query_lengths, batch.context_lengths, batch.slots, strict=True):
            for position in range(context, context + length):
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                seen = slots[first : position + 1]
                out[row] = _attend_one(q[row], keys[seen], values[seen], spec)
                row += 1
        return out


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """Shapes: q [heads, head_dim], keys and values [seen, kv_heads, head_dim] -> [heads, head_dim]."""
    group = q.shape[0] // keys.shape[1]
    heads = []
    for head in range(q.shape[0]):
        scores = keys[:, head // group].double() @ q[head].double() * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        heads.append(scores.softmax(0) @ values[:, head // group].double())
    return torch.stack(heads).to(q.dtype)
