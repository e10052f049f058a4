"""Parts of attention put together, against a softmax over all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from agentrt.kernels.merge_parts import merge_parts, merge_reference

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_parts_of_any_weight_in_any_order(head_dim, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    heads = 3
    parts, lse = torch.randn(12, heads, head_dim, generator=generator), torch.randn(12, heads, generator=generator) * 60
    members = [[7], [11, 0, 4], [3, 9], [], [1, 2, 5, 6, 8]]
    tokens = [4, 0, 6, 1, 3]
    lse[9] = -torch.inf  # saw nothing
    lse[2, 1] = 1e4  # outweighs all others
    parts[10], lse[10] = NAN, NAN  # nobody's
    starts = torch.tensor([0, *(len(own) for own in members)]).cumsum(0).int()
    out = torch.full((8, heads, head_dim), NAN, dtype=dtype)
    flat = [part for own in members for part in own]
    merge_parts(parts, lse, torch.tensor(tokens, dtype=torch.int32), starts, torch.tensor(flat, dtype=torch.int32), out)
    step = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for token, own in zip(tokens, members, strict=True):
        if own:
            torch.testing.assert_close(out[token].double(), merge_reference(parts[own], lse[own]), atol=step, rtol=step)
    unwritten = [row for row in range(8) if row not in tokens or not members[tokens.index(row)]]
    assert bool(out[unwritten].isnan().all())
