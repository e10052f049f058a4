"""Norms and gates: Triton's kernels, in their interpreter, do what torch's operators do."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from agentrt.models.row_ops import Norm, TorchRows, TritonRows, row_ops


def test_both_ways_are_one():
    generator = torch.Generator().manual_seed(0)
    rows, added, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 48), (3, 48), (48,)))
    torch_norm, triton_norm = Norm(weight, 1e-5, TorchRows()), Norm(weight, 1e-5, TritonRows())
    torch.testing.assert_close(triton_norm(rows), torch_norm(rows))
    heads = rows.view(3, 1, 48)
    assert torch.equal(triton_norm(heads), torch_norm(heads))
    ours, theirs = rows.clone(), rows.clone()
    torch.testing.assert_close(triton_norm.after_adding(ours, added), torch_norm.after_adding(theirs, added))
    assert torch.equal(ours, rows + added)
    assert torch.equal(theirs, rows + added)
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(TritonRows().gate(rows, activation), TorchRows().gate(rows.clone(), activation))


def test_a_cpu_without_native_kernels_runs_torchs_operators(monkeypatch):
    monkeypatch.setattr("agentrt.models.native_rows.load", lambda name: None)
    assert type(row_ops(torch.device("cpu"))) is TorchRows
