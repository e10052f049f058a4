"""Logits made ready to be chosen from: kernel and torch's operators give the same, and both what a mask says token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from agentrt.kernels import logit_blocks
from agentrt.kernels.cpu import build
from agentrt.kernels.logit_blocks import BLOCK, LogitBlocker
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.mark.skipif(build.load("logits") is None, reason=build.built("logits").found)


def allowed(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    if mask is None:
        return np.ones(vocab, dtype=bool)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)[:vocab]
    return np.pad(bits, (0, vocab - len(bits)))


@native
@given(
    vocab=st.sampled_from([1, 63, 64, 100, 700, 50_257]),
    densities=st.lists(st.sampled_from([None, 0.0, 0.001, 0.5, 0.999, 1.0]), min_size=1, max_size=6),
    words=st.integers(-2, 2),
    spoilt=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_kernel_and_reference_forbid_what_masks_forbid(vocab, densities, words, spoilt, threads, seed):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy((random.standard_normal((len(densities), vocab)) * 9).astype(np.float32))
    valid = torch.from_numpy(random.random(vocab) < 0.9)
    width = max(1, -(-vocab // 32) + words)  # a tokenizer may know fewer or more ids than the model has logits
    masks = [None if share is None else np.packbits(random.random(width * 32) < share, bitorder="little").view(np.int32) for share in densities]
    if spoilt is not None:
        logits[0, int(random.integers(vocab))] = spoilt
    blocker, before = LogitBlocker(valid), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = blocker.blocks(logits.clone(), masks)
    finally:
        torch.set_num_threads(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_blocks, "_native", lambda: None)
        reference = blocker.blocks(logits.clone(), masks)
    first = 0 if spoilt is None else 1
    assert made.finite.tolist() == reference.finite.tolist() == [spoilt is None, *[True] * (len(masks) - 1)]
    for one in (made, reference):
        assert one.values.shape == (len(masks), -(-vocab // BLOCK), BLOCK)
        assert torch.equal(one.tops[first:], one.values[first:].amax(-1))
        for row in range(first, len(masks)):
            may = allowed(masks[row], vocab) & valid.numpy()
            wanted = np.full(one.values[row].numel(), -np.inf, dtype=np.float32)
            wanted[:vocab][may] = logits[row].numpy()[may]
            np.testing.assert_array_equal(one.values[row].flatten().numpy(), wanted)
