"""Native norms and activations against torch's operators, at any width, in rows that lie apart."""

from __future__ import annotations

import pytest
import torch
from agentrt.kernels.cpu.build import load
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import functional

from agentrt.models.config import Activation
from agentrt.models.native_rows import NativeRows, native_rows
from agentrt.models.row_ops import TorchRows

pytestmark = pytest.mark.skipif(load("fused") is None, reason="no native kernels here: no compiler, or AGENTRT_NATIVE=0")

counts, widths = st.sampled_from([1, 2, 33]), st.sampled_from([1, 7, 8, 48, 576, 1000, 1536])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def rows(count: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows that lie apart, with NaN between them; their sizes differ."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((count, width + 5), float("nan"), dtype=dtype)
    memory[:, :width] = torch.randn(count, width, generator=generator) * 10 ** torch.linspace(-2, 3, count)[:, None]
    return memory[:, :width]


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 3e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}


@hypothesis_settings(max_examples=30)
@given(counts, widths, dtypes, st.booleans(), st.integers(0, 2**20))
def test_norms_and_sums_are_torchs(count: int, width: int, dtype: torch.dtype, adds: bool, seed: int) -> None:
    mine, added = rows(count, width, dtype, seed), rows(count, width, dtype, seed + 1)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    native, torchs = native_rows(), TorchRows()
    before = mine.clone()
    if adds:
        theirs = before + added
        got = native.add_and_norm(mine, added, weight, 1e-5)
        assert torch.equal(mine, theirs)
    else:
        theirs = before
        got = native.norm(mine, weight, 1e-5)
        assert torch.equal(mine, before)
    torch.testing.assert_close(got, torchs.norm(theirs.float(), weight.float(), 1e-5).to(dtype), **near(dtype))
    alone = native.norm(theirs[-1:], weight, 1e-5)
    assert torch.equal(got[-1:], alone)


@hypothesis_settings(max_examples=30)
@given(counts, widths, dtypes, st.sampled_from(["silu", "gelu_tanh"]), st.integers(0, 2**20))
def test_gates_are_torchs(count: int, width: int, dtype: torch.dtype, activation: Activation, seed: int) -> None:
    fused = rows(count, 2 * width, dtype, seed)
    got = native_rows().gate(fused, activation)
    torch.testing.assert_close(got, TorchRows().gate(fused.double(), activation).to(dtype), **near(dtype))
    assert torch.equal(got[-1:], native_rows().gate(fused[-1:], activation))


def test_what_the_kernels_do_not_know_goes_to_the_operators() -> None:
    fused, weight = rows(3, 20, torch.float32, 1), torch.ones(20)
    assert torch.equal(native_rows().gate(fused, "gelu"), TorchRows().gate(fused, "gelu"))
    assert torch.equal(native_rows().norm(fused.half(), weight.half(), 1e-5), TorchRows().norm(fused.half(), weight.half(), 1e-5))
    heads = fused.view(3, 2, 10)
    assert torch.equal(native_rows().norm(heads, weight[:10], 1e-5), TorchRows().norm(heads, weight[:10], 1e-5))


def test_extremes_and_faults_stay_what_they_are() -> None:
    fused = torch.tensor([[-1e30, -90.0, 90.0, 1e30, float("nan"), 0.0, *[1.0] * 6]])
    got = native_rows().gate(fused, "silu")
    torch.testing.assert_close(got, functional.silu(fused[:, :6]), equal_nan=True, atol=1e-6, rtol=1e-6)
    bad = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    normed = native_rows().norm(bad, torch.ones(3), 1e-5)
    assert normed[0].isnan().all()
    assert normed[1].isfinite().all()


def test_the_operators_run_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(native_rows(), NativeRows)
    monkeypatch.setattr("agentrt.models.native_rows.load", lambda name: None)
    assert not isinstance(native_rows(), NativeRows)
