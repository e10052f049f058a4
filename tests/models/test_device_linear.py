"""Few-bit checkpoints on Triton's products, in the interpreter: each layout finds its kernel, and the model is the one that is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from agentrt.kernels.quantize_rows import quantize_rows
from agentrt.kernels.quantized_linear import QuantizedWeight
from agentrt.kernels.scaled_matmul import scaled_matmul_reference

from agentrt.models.device_linear import AwqLinear, DeviceLinears, Q4Linear, Q8Linear, RowScaledLinear
from agentrt.models.loader import load_model
from agentrt.models.quantized_checkpoint import AwqWeight, RowScaled

CPU = torch.device("cpu")
#: Kind, bits asked for, what multiplies the layers, and how far logits may be from those of the float model that is meant.
CASES = [
    ("gptq", 4, Q4Linear, 2e-3),
    ("gptq in act order", 4, Q8Linear, 0.03),
    ("gptq of 8 bits", 8, Q8Linear, 1e-4),
    ("awq", 4, AwqLinear, 1e-4),
    ("awq", 8, Q8Linear, 0.03),
    ("fp8", 8, Q8Linear, 0.05),
    ("compressed-tensors", 8, RowScaledLinear, 0.4),  # activations keep 3 bits, and Triton's interpreter (3.9) halves what rounds up to a power of two
    ("compressed-tensors of int8", 8, RowScaledLinear, 0.06),
]


def logits(model: Any, paged: Any) -> torch.Tensor:
    return paged(model.decoder, scattered=False).run({0: list(range(5, 25))}, lambda _: 64)[0]


def off(ours: Any, meant: Any, paged: Any) -> float:
    """How far the logits are, under one head, as a share of those that are meant."""
    ours.decoder._head = meant.decoder._head
    wanted = logits(meant, paged)
    return float((logits(ours, paged) - wanted).norm() / wanted.norm())


def layers_of(model: Any) -> set[type]:
    """What multiplies in the layers."""
    return {type(matrix) for layer in model.decoder._layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits", "layout", "limit"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_checkpoint_is_the_model_it_means(
    kind: str, bits: int, layout: type, limit: float, quantised: Callable[..., Any], paged: Any, tmp_path: Path
) -> None:
    quantised(tmp_path, kind)
    model = load_model(tmp_path / "stored", bits=bits, triton=True)
    assert layers_of(model) == {layout}
    assert type(model.decoder._head) is Q8Linear  # the checkpoint has it in float
    assert off(model, load_model(tmp_path / "meant"), paged) < limit


@pytest.mark.slow
def test_gguf_blocks_are_multiplied_as_they_are(in_blocks: Callable[..., Any], paged: Any, tmp_path: Path) -> None:
    in_blocks(tmp_path, lambda own: {"q_proj": "Q4_0", "k_proj": "Q5_0", "v_proj": "Q8_0", "o_proj": "Q5_1"}.get(own, "Q4_1"))
    model = load_model(tmp_path, bits=4, triton=True)
    layer = model.decoder._layers[0]
    assert [type(part) for part in layer.qkv.parts] == [Q4Linear, Q8Linear]  # 5 bits become 8, and so one matrix with v's
    assert [type(matrix) for matrix in (layer.output, layer.gate_up, layer.down)] == [Q8Linear, Q4Linear, Q4Linear]
    assert off(model, load_model(tmp_path), paged) < 0.03  # Q5_1 is rounded to 8 bits
    in_blocks(tmp_path, lambda own: {"q_proj": "Q4_0", "k_proj": "Q5_0", "v_proj": "Q8_0"}.get(own, "Q4_1"))
    assert off(load_model(tmp_path, bits=4, triton=True), load_model(tmp_path), paged) < 1e-4


@pytest.mark.slow
def test_inputs_that_are_no_multiple_of_a_group_are_padded() -> None:
    weight, x, bias = torch.randn(24, 50), torch.randn(3, 50), torch.randn(24)
    for bits in (4, 8):
        held = QuantizedWeight.of(weight, bits)
        run = DeviceLinears(bits, lambda name, held=held: [held], lambda name: [], CPU)("a", weight, bias)
        torch.testing.assert_close(run(x), x @ held.dequantize().T + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_parts_are_put_together_in_their_own_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(3, 64, generator=generator), torch.randn(24, generator=generator)
    words = [torch.randint(-(2**31), 2**31 - 1, (66, out // 8), dtype=torch.int32, generator=generator) for out in (8, 16)]
    awq = [AwqWeight(both[:64], both[64:], torch.rand(2, both.shape[1] * 8, generator=generator)) for both in words]
    fp8 = [RowScaled(torch.randn(out, 64, generator=generator).to(torch.float8_e4m3fn), torch.rand(out, generator=generator)) for out in (8, 16)]

    def run(bits: int, parts: Any, own_bias: torch.Tensor | None) -> torch.Tensor:
        return DeviceLinears(bits, lambda name: [], lambda name: parts, CPU)("a", torch.zeros(0), own_bias)(x)

    singly = torch.cat([run(4, [part], None) for part in awq], 1) + bias
    torch.testing.assert_close(run(4, awq, bias), singly)
    wanted = scaled_matmul_reference(*quantize_rows(x, torch.float8_e4m3fn), torch.cat([part.q.double() for part in fp8]), torch.cat([part.scale for part in fp8]))
    torch.testing.assert_close(run(8, fp8, bias).double(), wanted + bias, atol=1e-4, rtol=1e-4)
