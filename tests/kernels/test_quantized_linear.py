"""The linear layers of 4, 5, 6 and 8 bits: kernel and reference agree, and a row does not see its neighbours."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agentrt.kernels import quantized_linear as layer
from agentrt.kernels.cpu import build
from agentrt.kernels.quantized_linear import NativeLinear, QuantizedWeight, on_grid, quantized_linear, reference
from hypothesis import given, settings
from hypothesis import strategies as st

BITS = (4, 5, 6, 8)

native = pytest.mark.skipif(build.load("linear") is None, reason=build.built("linear").found)

def quantised(
    bits: int, outputs: int, inputs: int, dtype: torch.dtype, generator: torch.Generator, centred: bool = False
) -> QuantizedWeight:
    """A weight of every value that the format has, extremes too; centred: whose middle value means 0."""
    groups = -(-inputs // layer.GROUP)
    low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 1 << bits, torch.uint8)
    q = torch.randint(low, high, (outputs, groups, layer.GROUP), generator=generator).to(kind)
    q[torch.rand(outputs, groups, generator=generator) < 0.2] = high - 1
    scale = (torch.rand(outputs, groups, generator=generator) * 0.02).to(dtype)
    if bits == 6:
        factors = torch.randint(-128, 128, (outputs, groups, 2), generator=generator).to(torch.int8)
        return QuantizedWeight(inputs, bits, q, scale / 100, factors=factors)
    minimum = scale * -(1 << bits - 1) if centred else (torch.randn(outputs, groups, generator=generator) * 0.1).to(dtype)
    return QuantizedWeight(inputs, bits, q, scale, None if bits == 8 else minimum)


def exactly(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    y = on_grid(x).double() @ weight.dequantize().double().T
    return y if bias is None else y + bias.double()


@native
@given(
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    outputs=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 200), st.integers(500, 700)),  # some are more than the kernel sums at once
    rows=st.integers(1, 100),
    biased=st.booleans(),
    centred=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_the_kernel_computes_the_reference(bits, dtype, outputs, inputs, rows, biased, centred, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = quantised(bits, outputs, inputs, dtype, generator, centred)
    bias = torch.randn(outputs, generator=generator) if biased else None
    wide = torch.randn(rows, inputs + 5, generator=generator) * 10 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    x = wide[:, :inputs]  # rows apart by more than their length
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run = quantized_linear(weight, bias)
        assert isinstance(run, NativeLinear)
        y = run(x)
        for row in range(rows):
            assert torch.equal(run(x[row : row + 1])[0], y[row]), "a row alone differs from the row in company"
    finally:
        torch.set_num_threads(before)
    expected = exactly(x, weight, bias)
    apart = weight if weight.minimum is None else replace(weight, minimum=weight.minimum.abs())  # what is added may be small where its parts are not
    size = on_grid(x).double().abs() @ apart.dequantize().double().abs().T + (0 if bias is None else bias.double().abs())
    assert ((y - expected).abs() <= 1e-5 * size + 1e-30).all()
    assert ((reference(x, weight.dequantize(), bias) - expected).abs() <= 1e-5 * size + 1e-30).all()


@native
@pytest.mark.parametrize("bits", BITS)
def test_sums_at_their_largest_fit(bits):
    for q in (-127, 127) if bits == 8 else (0, (1 << bits) - 1):
        filled = torch.full((33, 2, layer.GROUP), q, dtype=torch.int8 if bits == 8 else torch.uint8)
        scale = torch.ones(33, 2)
        minimum = scale * -(1 << bits - 1) if bits < 6 else None
        weight = QuantizedWeight(64, bits, filled, scale, minimum, torch.full((33, 2, 2), -128, dtype=torch.int8) if bits == 6 else None)
        for x in (torch.full((9, 64), 1.0), torch.full((9, 64), -1.0)):
            expected = exactly(x, weight, None)
            assert ((quantized_linear(weight, None)(x) - expected).abs() <= 1e-5 * expected.abs()).all()


@native
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_prompt_is_its_rows(bits, threads):
    generator = torch.Generator().manual_seed(5)
    run = quantized_linear(quantised(bits, 50, 1600, torch.float16, generator, centred=True), None)
    x = torch.randn(331, 1600, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = run(x)
        assert torch.equal(y, torch.cat([run(part) for part in x.split((1, 2, 5, 31, 32, 33, 64, 65, 98))]))
    finally:
        torch.set_num_threads(before)


@native
@given(
    bits=st.sampled_from((4, 5, 6)),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    outputs=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 200), st.integers(1000, 1400)),
    rows=st.integers(1, 70),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_the_same_numbers_in_8_bits_give_the_same_bits(bits, dtype, outputs, inputs, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = quantised(bits, outputs, inputs, dtype, generator, centred=True)
    eight = QuantizedWeight(inputs, 8, weight.q.to(torch.int8) - (1 << bits - 1), weight.scale)
    if bits == 6:
        weight.factors.fill_(1)
    else:
        assert torch.equal(weight.in_8_bits(torch.empty(0)).q, eight.q)
    x = torch.randn(rows, inputs, generator=generator)
    assert torch.equal(quantized_linear(weight, None)(x), quantized_linear(eight, None)(x))


AVX512 = ("avx512f", "avx512bw", "avx512_vnni")
INSTRUCTIONS = {  # what the kernel says of itself: how it is compiled, and what a processor has to have
    "plain C": ("-march=x86-64", ()),
    "plain C and tiles in C": ("-march=x86-64 -DTILES_IN_C", ()),
    "AVX2": ("-march=x86-64-v3", ("avx2", "fma", "f16c")),
    "AVX-512 VNNI": ("-march=icelake-server", AVX512),
    "AVX-512 VNNI and AMX": ("-march=sapphirerapids", (*AVX512, "amx_tile", "amx_int8")),
}


@native
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86-64's instructions")
@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_every_instruction_set_computes_the_reference(isa, monkeypatch, tmp_path):
    target, needed = INSTRUCTIONS[isa]
    cpu = Path("/proc/cpuinfo")
    if not set(needed) <= set(cpu.read_text().split() if cpu.exists() else ()):
        pytest.skip(f"this processor has not all of {', '.join(needed)}")
    options = {"-march=native": target.split(), "-O3": ["-O1"]}
    monkeypatch.setattr(build, "_OPTIONS", tuple(one for option in build._OPTIONS for one in options.get(option, [option])))
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path))
    build.forget()
    try:
        assert layer.isa() == isa
        test_the_kernel_computes_the_reference()
        test_the_same_numbers_in_8_bits_give_the_same_bits()
        for bits in BITS:
            test_sums_at_their_largest_fit(bits)
            test_a_long_prompt_is_its_rows(bits, 2)
    finally:
        build.forget()


@native
@pytest.mark.parametrize("bits", BITS)
def test_odd_values_stay_in_their_row(bits):
    generator = torch.Generator().manual_seed(3)
    weight = quantised(bits, 40, 96, torch.float16, generator)
    run = quantized_linear(weight, None)
    x = torch.randn(7, 96, generator=generator)
    calm = run(x)
    x[1, 40], x[3, 0], x[4], x[5] = torch.nan, -torch.inf, 0.0, 1e-42
    y = run(x)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 6]], calm[[0, 2, 6]])
    assert (y[[4, 5]].abs() < 1e-30).all()
    assert reference(x, weight.dequantize(), None)[[1, 3]].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e8])
def test_quantising_loses_half_a_step_at_most(bits, size):
    weight = torch.randn(20, 100, generator=torch.Generator().manual_seed(1)) * size
    weight[3] = 0
    held = QuantizedWeight.of(weight, bits)
    assert held.bits == bits
    assert held.scale.dtype == (torch.float16 if size == 1.0 else torch.float32)
    step = held.scale.float().repeat_interleave(layer.GROUP, 1)[:, :100]
    error = (held.dequantize() - weight).abs()
    assert (error <= step * 0.51 + weight.abs() * 2e-3).all()
    assert torch.equal(held.dequantize()[3], weight[3])


def test_other_dtypes_come_back_as_they_came():
    weight = QuantizedWeight.of(torch.randn(6, 40), 4)
    x = torch.randn(3, 40).bfloat16()
    assert quantized_linear(weight, torch.randn(6).bfloat16())(x).dtype == torch.bfloat16


def test_without_a_compiler_the_reference_runs(monkeypatch):
    monkeypatch.setenv("AGENTRT_NATIVE", "0")
    build.forget()
    try:
        weight, x = QuantizedWeight.of(torch.randn(6, 40), 4), torch.randn(3, 40)
        run = quantized_linear(weight, None)
        assert not isinstance(run, NativeLinear)
        assert torch.equal(run(x), reference(x, weight.dequantize(), None))
    finally:
        build.forget()
