"""Weights in 4 and 8 bits behind the seam: what is stored is used as it is, and a model on them is near the float one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrt.kernels.cpu import build
from agentrt.kernels.quantized_linear import QuantizedWeight, reference

from agentrt.errors import ModelError
from agentrt.models import loader
from agentrt.models.linear import Quantized, parts
from agentrt.models.loader import load_model


def test_stored_parts_are_used_as_they_are():
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(5, 64)
    parts = [QuantizedWeight.of(weight[:8], 4), QuantizedWeight.of(weight[8:24], 4), QuantizedWeight.of(weight[24:], 8)]
    run = Quantized(4, lambda name: parts if name == "a.weight" else [])("a", torch.zeros(40, 64), bias)
    expected = reference(x, torch.cat([part.dequantize() for part in parts]), bias)
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize(("bits", "name", "held"), [(4, "a", 4), (8, "a", 8), (4, "lm_head", 8), (8, "stored", 8)])
def test_what_is_not_stored_so_is_quantised(bits, name, held):
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    four = [QuantizedWeight.of(weight, 4)]
    run = Quantized(bits, lambda asked: four if asked == "stored.weight" else [])(name, weight, None)
    torch.testing.assert_close(run(x), reference(x, QuantizedWeight.of(weight, held).dequantize(), None))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_on_them_is_near_the_float_one(bits: int, tiny: Callable[..., Any], tmp_path: Path, paged: Any) -> None:
    tiny("Qwen2").save_pretrained(tmp_path)
    prompts = {0: list(range(3, 40)), 1: list(range(60, 90))}
    exact = paged(load_model(tmp_path).decoder, scattered=False).run(prompts, lambda _: 64)
    near = paged(load_model(tmp_path, bits=bits).decoder, scattered=False).run(prompts, lambda _: 64)
    alone = paged(load_model(tmp_path, bits=bits).decoder, scattered=False).run({1: prompts[1]}, lambda _: 1)
    for sequence, rows in exact.items():
        assert (near[sequence] - rows).norm() < {4: 0.7, 8: 0.1}[bits] * rows.norm()
    # Not equal: torch's attention sums in another order, and that may move an activation to the next step of its grid.
    assert (alone[1] - near[1]).norm() < 0.1 * near[1].norm()


@pytest.mark.skipif(build.load("linear") is None, reason=build.built("linear").found)
def test_a_gguf_runs_in_its_own_bits(in_blocks: Callable[..., Any], tmp_path: Path, paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks(tmp_path, lambda own: {"v_proj": "Q8_0", "o_proj": "Q5_1", "down_proj": "Q6_K"}.get(own, "Q5_0"))
    prompts = {0: list(range(3, 40)), 1: list(range(60, 90))}

    def run(decoder: Any) -> torch.Tensor:
        return torch.cat(list(paged(decoder, scattered=False).run(prompts, lambda _: 16).values()))

    model = load_model(tmp_path, bits=4).decoder
    layer = model._layers[0]
    assert [part.weight.bits for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down) for part in parts(matrix)] == [5, 8, 5, 5, 6]
    own = run(model)
    exact = run(load_model(tmp_path).decoder)
    assert (own - exact).norm() < 0.1 * exact.norm()
    in_blocks(tmp_path, lambda own: {"v_proj": "Q8_0", "down_proj": "Q4_1"}.get(own, "Q5_0"))
    own = run(load_model(tmp_path, bits=4).decoder)
    monkeypatch.setattr(loader, "Quantized", partial(Quantized, held=(4, 8)))
    assert torch.equal(run(load_model(tmp_path, bits=4).decoder), own), "the same numbers in 8 bits"


def test_models_of_transformers_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("GPTNeoX").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="leave out dtype"):
        load_model(tmp_path, bits=4)
