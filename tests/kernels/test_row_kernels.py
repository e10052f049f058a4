"""The kernels that work row by row: norm, gate, rotary with the KV write, masks."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from agentrt.kernels.gate_up import gate_up, gate_up_reference
from agentrt.kernels.rms_norm import rms_norm, rms_norm_reference
from agentrt.kernels.rotary_kv import rotate_and_write, rotate_reference, write_kv
from agentrt.kernels.token_mask import mask_reference, mask_tokens

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

NAN = float("nan")
TOLERANCE = {dtype: {"atol": step, "rtol": step} for dtype, step in ((torch.float32, 5e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2))}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, with NaN between their rows and behind them."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), NAN, dtype=dtype)
    wide[..., : shape[-1]] = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return wide[..., : shape[-1]]


@DTYPES
@pytest.mark.parametrize("width", [48, 576, 2048])
def test_rms_norm_adds_in_place_and_norms_the_sum(dtype, width):
    rows, added, weight = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(((3, width), (3, width), (width,))))
    alone = rms_norm(rows, weight, 1e-5)
    torch.testing.assert_close(alone.double(), rms_norm_reference(rows, weight, 1e-5), **TOLERANCE[dtype])
    total = rows + added
    normed = rms_norm(rows, weight, 1e-5, added)
    torch.testing.assert_close(rows, total, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)  # which Triton's interpreter (3.9) cuts, not rounds
    torch.testing.assert_close(normed.double(), rms_norm_reference(rows, weight, 1e-5), **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_up(dtype, activation):
    fused = normal(0, 3, 2 * 1100, dtype=dtype)
    torch.testing.assert_close(gate_up(fused, activation).double(), gate_up_reference(fused, activation), **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 9, 3), (80, 4, 4), (96, 5, 5), (128, 7, 1), (256, 4, 1)])
def test_rotary_and_the_write_of_new_keys(dtype, head_dim, heads, kv_heads):
    qkv = normal(0, 4, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cos, sin = normal(1, 4, 1, head_dim, dtype=dtype), normal(2, 4, 1, head_dim, dtype=dtype)
    slots = torch.tensor([5, -1, 0, 7])
    keys, values = torch.full((9, kv_heads, head_dim), NAN, dtype=dtype), torch.full((9, kv_heads, head_dim), NAN, dtype=dtype)
    q = rotate_and_write(qkv, cos, sin, slots, keys, values, heads)
    wanted = rotate_reference(qkv[:, : heads + kv_heads], cos, sin)
    torch.testing.assert_close(q.double(), wanted[:, :heads], **TOLERANCE[dtype])
    written = slots[slots >= 0]
    torch.testing.assert_close(keys[written].double(), wanted[slots >= 0, heads:], **TOLERANCE[dtype])
    assert torch.equal(values[written], qkv[slots >= 0, heads + kv_heads :])
    untouched = torch.tensor([slot for slot in range(9) if slot not in written])
    assert bool(keys[untouched].isnan().all())
    assert bool(values[untouched].isnan().all())

    again = torch.full_like(keys, NAN), torch.full_like(values, NAN)
    write_kv(wanted[:, heads:].to(dtype), qkv[:, heads + kv_heads :], slots, *again)
    torch.testing.assert_close(again[0], keys, equal_nan=True, **TOLERANCE[dtype])
    assert torch.equal(again[1].nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize(("vocab", "words"), [(100, 3), (9000, 300), (9000, 200)])  # one block of tokens and several, a mask too long and too short
def test_masks_forbid_in_their_rows_only_and_beyond_their_words(vocab, words):
    logits = normal(0, 3, vocab, dtype=torch.float32)
    masks = torch.randint(-(2**31), 2**31 - 1, (2, words), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    mask_tokens(logits, masks[:0], torch.zeros(0, dtype=torch.int32))
    assert torch.equal(logits, before)
    mask_tokens(logits, masks, torch.tensor([2, 0], dtype=torch.int32))
    assert torch.equal(logits[2], mask_reference(before[2], masks[0]))
    assert torch.equal(logits[0], mask_reference(before[0], masks[1]))
    assert torch.equal(logits[1], before[1])
    assert bool((logits[0, 32 * words :] == -torch.inf).all())


def test_steps_without_rows_are_nothing():
    none = torch.zeros(0, 64)
    assert rms_norm(none, torch.ones(64), 1e-5).shape == (0, 64)
    assert gate_up(none, "silu").shape == (0, 32)
    store = torch.zeros(4, 1, 8)
    assert rotate_and_write(torch.zeros(0, 4, 8), none, none, torch.zeros(0, dtype=torch.int64), store, store, 2).shape == (0, 2, 8)
