"""Weights in 4 and 8 bits behind the seam: what is stored is used as it is, and a model on them is near the float one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrt.kernels.quantized_linear import QuantizedWeight, reference

from agentrt.errors import ModelError
from agentrt.models.linear import Quantized
from agentrt.models.loader import load_model


def test_stored_parts_are_used_as_they_are():
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(5, 64)
    parts = [QuantizedWeight.of(weight[:8], 4), QuantizedWeight.of(weight[8:24], 4), QuantizedWeight.of(weight[24:], 8)]
    run = Quantized(4, lambda name, values: parts if name == "a.weight" else [])("a", torch.zeros(40, 64), bias)
    expected = reference(x, torch.cat([part.dequantize() for part in parts]), bias)
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize(("bits", "name", "held"), [(4, "a", 4), (8, "a", 8), (4, "lm_head", 8), (8, "stored", 8)])
def test_what_is_not_stored_so_is_quantised(bits, name, held):
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    four = [QuantizedWeight.of(weight, 4)]
    run = Quantized(bits, lambda asked, values: four if asked == "stored.weight" else [])(name, weight, None)
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


def test_models_of_transformers_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("GPTNeoX").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="leave out dtype"):
        load_model(tmp_path, bits=4)
