"""Every quantised kind of GGUF comes into the kernels' format: exactly; in 8 bits as near as those can."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from agentrt.models.gguf_blocks import from_blocks

BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}


@pytest.mark.parametrize("kind", BITS)
def test_blocks_mean_what_gguf_says(kind):
    ggml = gguf.GGMLQuantizationType[kind]
    values_a_block, bytes_a_block = gguf.GGML_QUANT_SIZES[ggml]
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (6, 512 // values_a_block, bytes_a_block), np.uint8)
    # Any bits are a block, but for the float16 scales, which must be finite.
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q5_1": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves[kind]:
        raw[..., at : at + 2] = rng.normal(0, 0.1, raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    raw = raw.reshape(6, -1)
    values = torch.from_numpy(gguf.dequantize(raw, ggml))
    weight = from_blocks(kind, torch.from_numpy(raw))
    assert weight.bits == BITS[kind]
    assert torch.equal(weight.dequantize(), values)
    eight = weight.in_8_bits(values)
    largest = values.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    assert eight.bits == 8
    assert ((eight.dequantize() - values).abs() <= largest / 253).all()
