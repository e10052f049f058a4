"""Logits made ready to be chosen from: kernel and torch's operators give the same, and both what a mask says token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from agentrt.kernels import logit_blocks
from agentrt.kernels.cpu import build
from agentrt.kernels.logit_blocks import BLOCK, LogitBlocker, block_weights
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
    decimals=st.sampled_from([0, 6]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_kernel_and_reference_forbid_what_masks_forbid(vocab, densities, words, spoilt, threads, decimals, seed):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy((random.standard_normal((len(densities), vocab)) * 9).round(decimals).astype(np.float32))
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
        found = [int(row.argmax()) if row.max() > -np.inf else -1 for row in one.values[first:].flatten(1).numpy()]  # numpy's is the first
        assert one.likeliest[first:].tolist() == found
        for row in range(first, len(masks)):
            may = allowed(masks[row], vocab) & valid.numpy()
            wanted = np.full(one.values[row].numel(), -np.inf, dtype=np.float32)
            wanted[:vocab][may] = logits[row].numpy()[may]
            np.testing.assert_array_equal(one.values[row].flatten().numpy(), wanted)


@native
@given(
    vocab=st.sampled_from([1, 64, 700, 5_000]),
    temperatures=st.lists(st.sampled_from([0.02, 0.7, 1.0, 30.0]), min_size=1, max_size=5),
    share=st.sampled_from([0.002, 0.3, 1.0]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_weights_of_blocks_are_sums_of_exponentials(vocab, temperatures, share, seed):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy((random.standard_normal((6, vocab)) * 9).astype(np.float32))
    masks = [np.packbits(random.random(-(-vocab // 32) * 32) < share, bitorder="little").view(np.int32) for _ in logits]
    blocks = LogitBlocker(torch.ones(vocab, dtype=torch.bool)).blocks(logits, masks)
    able = np.flatnonzero(blocks.likeliest.numpy() >= 0)
    if not len(able):
        return
    index = torch.from_numpy(random.choice(able, len(temperatures)))
    peaks, colds = blocks.tops.amax(-1)[index], torch.tensor(temperatures)
    made = block_weights(blocks.values, blocks.tops, index, peaks, colds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_blocks, "_native", lambda: None)
        reference = block_weights(blocks.values, blocks.tops, index, peaks, colds)
    wanted = ((blocks.values[index].double() - peaks[:, None, None].double()) / colds[:, None, None].double()).exp().sum(-1).float()
    for one in (made, reference):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-35)
