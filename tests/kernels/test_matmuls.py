"""Products with few-bit weights against float64, in Triton's interpreter: shapes that divide no block, NaN in whatever may not be read or stay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
from agentrt.kernels.awq_matmul import awq_matmul, awq_weight
from agentrt.kernels.q4_matmul import q4_matmul, q4_weight
from agentrt.kernels.q8_matmul import q8_matmul, q8_weight
from agentrt.kernels.quantize_rows import quantize_rows, quantize_rows_reference
from agentrt.kernels.scaled_matmul import scaled_matmul, scaled_matmul_reference
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

NAN = float("nan")

#: x and bias to the product; x to what it should be without bias, in float64.
Product = tuple[Callable[[Tensor, Tensor | None], Tensor], Callable[[Tensor], Tensor]]


def q4(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    codes = torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8, generator=generator)
    scales, lows = ((torch.rand(inputs // 32, out, generator=generator) - 0.5).to(dtype) for _ in range(2))
    return lambda x, bias: q4_matmul(x, codes, scales, lows, bias), lambda x: x.double() @ q4_weight(codes, scales, lows).T


def q8(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    codes = torch.randint(-127, 128, (out, inputs), dtype=torch.int8, generator=generator)
    scales = (torch.rand(inputs // 32, out, generator=generator) / 10).to(dtype)
    return lambda x, bias: q8_matmul(x, codes, scales, bias), lambda x: x.double() @ q8_weight(codes, scales).T


def awq(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator, group: int | None = None) -> Product:
    out, groups = -(-out // 8) * 8, inputs // (group or 32)
    words = torch.randint(-(2**31), 2**31 - 1, (inputs + groups, out // 8), dtype=torch.int32, generator=generator)
    codes, zeros, scales = words[:inputs], words[inputs:], (torch.rand(groups, out, generator=generator) / 10).to(dtype)
    return lambda x, bias: awq_matmul(x, codes, zeros, scales, bias), lambda x: x.double() @ awq_weight(codes, zeros, scales)


def awq_in_one_group(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    return awq(out, inputs, dtype, generator, inputs)


def scaled(weight: Tensor, generator: torch.Generator) -> Product:
    scales = torch.rand(len(weight), generator=generator) / 100
    return lambda x, bias: scaled_matmul(x, weight, scales, bias), lambda x: scaled_matmul_reference(*quantize_rows(x, weight.dtype), weight, scales)


def int8(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    return scaled(torch.randint(-127, 128, (out, inputs), dtype=torch.int8, generator=generator), generator)


def fp8(out: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Product:
    return scaled(torch.randn(out, inputs, generator=generator).to(torch.float8_e4m3fn), generator)


LAYOUTS = pytest.mark.parametrize("layout", [q4, q8, awq, awq_in_one_group, int8, fp8], ids=lambda layout: layout.__name__)


def agree(ours: Tensor, wanted: Tensor) -> None:
    """To rounding of the dtype, measured by the largest number of the product."""
    assert ours.shape == wanted.shape
    scale = float(wanted.abs().max())
    assert float((ours.double() - wanted).abs().max()) <= scale * (2e-3 if ours.dtype == torch.float16 else 1e-5)


def rows_in_nan(rows: int, inputs: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random rows [rows, inputs], with NaN before, between and behind them; the first is zeros."""
    wide = torch.full((rows + 2, inputs + 16), NAN, dtype=dtype)
    wide[1:-1, :inputs] = torch.randn(rows, inputs, generator=generator).to(dtype)
    wide[1, :inputs] = 0
    return wide[1:-1, :inputs]


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("rows", [1, 16, 17, 65, 130])  # one block and several, of each size
def test_any_shape(layout, rows):
    choice, generator = random.Random(f"{layout.__name__} {rows}"), torch.Generator().manual_seed(rows)
    dtype, out, inputs = choice.choice((torch.float16, torch.float32)), choice.choice((1, 8, 33, 72, 130)), choice.choice((32, 96, 160, 288))
    run, wanted = layout(out, inputs, dtype, generator)
    x = rows_in_nan(rows, inputs, dtype, generator)
    product = wanted(x)
    bias = torch.randn(product.shape[1], generator=generator).to(dtype) if choice.random() < 0.5 else None
    agree(run(x, bias), product if bias is None else product + bias.double())


@pytest.mark.slow
@LAYOUTS
def test_no_rows_and_rows_that_are_not_finite(layout):
    generator = torch.Generator().manual_seed(0)
    run, _ = layout(40, 160, torch.float32, generator)
    x = rows_in_nan(5, 160, torch.float32, generator)
    assert run(x[:0], None).shape == (0, 40)
    calm = run(x, None)
    x[1, 40], x[3, 159] = NAN, -torch.inf
    with np.errstate(invalid="ignore"):
        ours = run(x, None)
    assert not bool(ours[[1, 3]].isfinite().any())
    assert torch.equal(ours[[0, 2, 4]], calm[[0, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_in_8_bits(dtype):
    x = rows_in_nan(4, 144, torch.float32, torch.Generator().manual_seed(0))
    x[2] *= 1e-30
    quantized, scales = quantize_rows(x, dtype)
    wanted, same = quantize_rows_reference(x, dtype)
    assert torch.equal(scales, same)
    if dtype == torch.int8:
        assert torch.equal(quantized, wanted)
    else:  # Triton's interpreter (3.9) halves what rounds up to a power of two; benchmarks/gpu_check.py spares nothing
        spared = wanted.float().abs().clamp(min=2.0**-9).log2() % 1 == 0
        assert torch.equal(quantized.float().where(~spared, 0), wanted.float().where(~spared, 0))
        assert float(spared[1:].float().mean()) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1], ids=str)
def test_a_gguf_block_as_it_lies_in_the_file_is_the_q4_layout(kind):
    weight = np.random.default_rng(0).standard_normal((72, 160), dtype=np.float32)
    packed = quants.quantize(weight, kind)
    blocks = packed.reshape(72, 5, -1)
    heads = 1 if kind == GGMLQuantizationType.Q4_0 else 2
    floats = torch.from_numpy(blocks[..., : 2 * heads].copy().view(np.float16).astype(np.float32))
    scales = floats[..., 0].T.contiguous()
    lows = -8 * scales if heads == 1 else floats[..., 1].T.contiguous()
    codes = torch.from_numpy(blocks[..., 2 * heads :].reshape(72, -1).copy())
    np.testing.assert_allclose(q4_weight(codes, scales, lows).numpy(), quants.dequantize(packed, kind), atol=1e-6)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0))
    agree(q4_matmul(x, codes, scales, lows), x.double() @ torch.from_numpy(quants.dequantize(packed, kind)).double().T)


def test_the_awq_order_is_that_of_its_checkpoints():
    # AutoAWQ packs outputs 0 2 4 6 1 3 5 7, from the lowest bits on.
    packed = sum(output << (4 * place) for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    codes = torch.tensor([[packed - 2**32 if packed >= 2**31 else packed]] * 32, dtype=torch.int32)
    weight = awq_weight(codes, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8))
    assert weight[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
