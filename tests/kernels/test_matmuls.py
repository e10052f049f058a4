"""Quantised matrix products; the row and output counts do not divide their blocks."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
from agentrt.kernels.awq_matmul import awq_matmul, awq_weight
from agentrt.kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference, quantize_rows_fp8
from agentrt.kernels.int8_matmul import int8_matmul, int8_matmul_reference, quantize_reference, quantize_rows
from agentrt.kernels.q4_matmul import q4_matmul, q4_weight
from agentrt.kernels.q8_matmul import q8_matmul, q8_weight
from gguf import quants
from gguf.constants import GGMLQuantizationType

pytestmark = pytest.mark.slow

#: One of each block size, and both dtypes.
CASES = pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (40, torch.float32), (130, torch.float16)], ids=str)
OUT, IN = 72, 160


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def agree(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """To rounding of the dtype, measured by the largest number of the product."""
    scale = float(wanted.abs().max())
    assert float((ours.double() - wanted).abs().max()) <= scale * (2e-3 if ours.dtype == torch.float16 else 1e-5)


@CASES
def test_int8(rows, dtype, generator):
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    x[0] = 0
    weight = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8, generator=generator)
    scales, bias = torch.rand(OUT, generator=generator) / 100, torch.randn(OUT, generator=generator).to(dtype)
    for ours, wanted in zip(quantize_rows(x), quantize_reference(x), strict=True):
        assert torch.equal(ours, wanted)
    agree(int8_matmul(x, weight, scales, bias), int8_matmul_reference(x, weight, scales) + bias.double())


@CASES
def test_fp8(rows, dtype, generator):
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    x[0] = 0
    weight = torch.randn(OUT, IN, generator=generator).to(torch.float8_e4m3fn)
    scales, bias = torch.rand(OUT, generator=generator), torch.randn(OUT, generator=generator).to(dtype)
    quantized, row_scales = quantize_rows_fp8(x)
    exact = x.float() / row_scales.where(row_scales > 0, torch.ones(()))[:, None]
    error = (quantized.float() - exact).abs()
    # Half a step of three bits. Triton's interpreter (3.9) halves what rounds up to a power of two; benchmarks/gpu_check.py spares nothing.
    nearest = exact.to(torch.float8_e4m3fn).float().abs().clamp(min=2.0**-9)
    assert bool(((error <= exact.abs().clamp(min=2.0**-6) / 16) | (nearest.log2() % 1 == 0)).all())
    agree(fp8_matmul(x, weight, scales, bias), fp8_matmul_reference(quantized, row_scales, weight, scales) + bias.double())


@CASES
def test_q4(rows, dtype, generator):
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    codes = torch.randint(0, 256, (OUT, IN // 2), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(OUT, IN // 32, generator=generator) / 10).to(dtype)
    lows, bias = -scales * 7.5, torch.randn(OUT, generator=generator).to(dtype)
    agree(q4_matmul(x, codes, scales, lows, bias), x.double() @ q4_weight(codes, scales, lows).T + bias.double())


@CASES
def test_q8(rows, dtype, generator):
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    codes = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8, generator=generator)
    scales, bias = (torch.rand(OUT, IN // 32, generator=generator) / 100).half(), torch.randn(OUT, generator=generator).to(dtype)
    agree(q8_matmul(x, codes, scales, bias), x.double() @ q8_weight(codes, scales).T + bias.double())


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1], ids=str)
def test_a_gguf_block_as_it_lies_in_the_file_is_the_q4_layout(kind):
    weight = np.random.default_rng(0).standard_normal((OUT, IN), dtype=np.float32)
    packed = quants.quantize(weight, kind)
    blocks = packed.reshape(OUT, IN // 32, -1)
    heads = 1 if kind == GGMLQuantizationType.Q4_0 else 2
    floats = torch.from_numpy(blocks[..., : 2 * heads].copy().view(np.float16).astype(np.float32))
    scales = floats[..., 0].contiguous()
    lows = -8 * scales if heads == 1 else floats[..., 1].contiguous()
    codes = torch.from_numpy(blocks[..., 2 * heads :].reshape(OUT, -1).copy())
    np.testing.assert_allclose(q4_weight(codes, scales, lows).numpy(), quants.dequantize(packed, kind), atol=1e-6)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(0))
    agree(q4_matmul(x, codes, scales, lows), x.double() @ torch.from_numpy(quants.dequantize(packed, kind)).double().T)


@CASES
@pytest.mark.parametrize("group", [32, 160])
def test_awq(rows, dtype, group, generator):
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    codes, zeros = (
        torch.randint(-(2**31), 2**31 - 1, (n, OUT // 8), dtype=torch.int32, generator=generator) for n in (IN, IN // group)
    )
    scales = (torch.rand(IN // group, OUT, generator=generator) / 10).to(dtype)
    agree(awq_matmul(x, codes, zeros, scales), x.double() @ awq_weight(codes, zeros, scales))


def test_the_awq_order_is_that_of_its_checkpoints():
    # AutoAWQ packs outputs 0 2 4 6 1 3 5 7, from the lowest bits on.
    packed = sum(output << (4 * place) for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    codes = torch.tensor([[packed - 2**32 if packed >= 2**31 else packed]] * 32, dtype=torch.int32)
    weight = awq_weight(codes, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8))
    assert weight[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
