"""Attention over keys and values that lie in one tensor: torch's fused kernel where it can, by hand where it cannot.

It knows nothing of slots or runs. Both functions sum in float32, and the second also gives each row's log-sum-exp, by
which results over parts of a sequence are merged exactly (Dao et al., FlashAttention, 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrt.attention.base import AttentionSpec

_fused_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec) -> Tensor:
    """Softmax attention.

    Args:
        q: [runs, new, heads, head_dim].
        k: [runs, seen, kv_heads, head_dim].
        v: Like k.
        mask: Added to the scores, broadcast to [runs, 1, new, seen], in q's dtype; None: nothing.
        causal: Each row sees as many keys as there are rows up to it; only if new == seen, and without a mask.
        spec: Scale and soft cap; the window is in the mask.

    Returns:
        Like q.
    """
    if spec.softcap is not None:
        return _by_hand(q, k, v, mask, causal, spec)[0]
    runs, new, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    # With one token, the heads that share a KV head become rows of one query matrix: no key is read twice.
    rows = q.view(runs, kv_heads, heads // kv_heads, head_dim) if new == 1 else q.transpose(1, 2)
    grouped = rows.shape[1] != kv_heads
    out = scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
    )
    return out.reshape(runs, 1, heads, head_dim) if new == 1 else out.transpose(1, 2)


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """As `attend`, and the log-sum-exp of each row's scores, float32 [runs, new, heads]."""
    if spec.softcap is not None or q.device.type != "cpu":
        return _by_hand(q, k, v, mask, causal, spec)
    out, lse = _fused_on_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=mask, scale=spec.scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The same in float32, for what the fused kernel lacks: soft caps, and log-sum-exps off the CPU."""
    runs, new, heads, head_dim = q.shape
    seen, kv_heads = k.shape[1:3]
    rows = q.transpose(1, 2).reshape(runs, kv_heads, -1, head_dim).float()
    scores = rows.matmul(k.permute(0, 2, 3, 1).float()).mul_(spec.scale)
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.view(runs, heads, new, seen)
    if causal:
        scores.masked_fill_(torch.ones(new, seen, dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().view(runs, kv_heads, -1, seen)
    out = weights.matmul(v.transpose(1, 2).float()).view(runs, heads, new, head_dim)
    return out.to(q.dtype).transpose(1, 2), lse.transpose(1, 2)
