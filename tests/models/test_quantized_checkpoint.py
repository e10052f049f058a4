"""Checkpoints in GPTQ, AWQ and fp8: tiny ones, packed here as their makers pack them, load as the float model they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrt.errors import ModelError
from agentrt.models.loader import holds_few_bits, load_model

KINDS = ("gptq", "gptq in act order", "gptq of 8 bits", "gptq version 2", "awq", "fp8", "compressed-tensors", "compressed-tensors of int8")


def logits(folder: Path, paged: Any, bits: int | None = None) -> torch.Tensor:
    ids = list(range(5, 45))
    return paged(load_model(folder, bits=bits).decoder, scattered=False).run({0: ids}, lambda _: 64)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_the_model_it_means(kind: str, quantised: Callable[..., Any], paged: Any, tmp_path: Path) -> None:
    quantised(tmp_path, kind)
    assert holds_few_bits(tmp_path / "stored") == (kind == "awq" or "gptq" in kind)
    assert not holds_few_bits(tmp_path / "meant")
    meant = logits(tmp_path / "meant", paged)
    torch.testing.assert_close(logits(tmp_path / "stored", paged), meant)
    # In 4 bits what is stored in 4 is used as it is; only activations are rounded. Other kinds are put into 8 or 4 bits.
    error = (logits(tmp_path / "stored", paged, 4) - meant).norm() / meant.norm()
    assert error < (0.7 if kind == "fp8" or "compressed" in kind else 0.1)


def test_other_ways_are_refused_by_name(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("Qwen2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for config in ({"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "bits": 4, "version": "gemv"}, {"quant_method": "bitsandbytes"}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
        with pytest.raises(ModelError, match=config["quant_method"]):
            load_model(tmp_path)
