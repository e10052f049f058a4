"""Checkpoints in GPTQ, AWQ and fp8: tiny ones, packed here as their makers pack them, load as the float model they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrt.errors import ModelError
from agentrt.models.loader import holds_few_bits, load_model

#: GPTQ and AWQ pack eight outputs or inputs, and a group has 32 inputs.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def pack(values: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """[rows, values] to int32 [rows, words]; the i-th of a word's values goes to places[i], counted from the lowest bits."""
    words = torch.zeros(values.shape[0], values.shape[1] // len(places), dtype=torch.int64)
    for i, place in enumerate(places):
        words |= values[:, i :: len(places)].long() << (place * bits)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(weight: torch.Tensor, bits: int, *, group: int, plus: int, shuffled: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantises a matrix [out, in]; returns what is stored, and the values that it means."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs)
    groups = inputs // group
    q = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zero = torch.full((groups, outputs), 128) if bits == 8 else torch.randint(1, 16, (groups, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.01).half()
    g_idx = torch.arange(inputs) // group
    if shuffled:
        g_idx = g_idx[torch.randperm(inputs, generator=generator)]
    places = tuple(range(32 // bits))
    stored = {
        "qweight": pack(q.T, bits, places).T.contiguous(),
        "qzeros": pack(zero - plus, bits, places),
        "scales": scale,
        "g_idx": g_idx.to(torch.int32),
    }
    return stored, ((q - zero[g_idx]) * scale.float()[g_idx]).T.contiguous()


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stored, meant = gptq(weight, 4, group=32, plus=0, shuffled=False)
    # The same values, packed along the output, in AWQ's order: outputs 0 2 4 6 1 3 5 7 from the lowest bits upwards.
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    nibbles = torch.arange(8, dtype=torch.int32) * 4
    q = ((stored["qweight"].unsqueeze(1) >> nibbles[:, None]) & 15).flatten(0, 1)
    zero = ((stored["qzeros"].unsqueeze(-1) >> nibbles) & 15).flatten(1)
    return {"qweight": pack(q, 4, places), "qzeros": pack(zero, 4, places), "scales": stored["scales"]}, meant


def fp8(weight: torch.Tensor, block: tuple[int, int] | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = block or (1, weight.shape[1])
    scale = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) * 0.01 + 0.01
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    held = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": held, "weight_scale_inv" if block else "weight_scale": scale, "input_scale": torch.ones(1)}, held.float() * spread


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "gptq": (lambda w: gptq(w, 4, group=32, plus=1, shuffled=False), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq in act order": (lambda w: gptq(w, 4, group=32, plus=1, shuffled=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "gptq of 8 bits": (lambda w: gptq(w, 8, group=32, plus=1, shuffled=False), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "gptq version 2": (lambda w: gptq(w, 4, group=32, plus=0, shuffled=False), {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8": (lambda w: fp8(w, (64, 64)), {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "compressed-tensors": (lambda w: fp8(w, None), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
}


def write(folder: Path, model: Any, kind: str) -> None:
    """Saves the model quantised in `folder`/stored, and what that means in `folder`/meant."""
    pack_one, config = KINDS[kind]
    for name in ("stored", "meant"):
        model.save_pretrained(folder / name)
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "meant" / "model.safetensors").items():
        meant[name] = stored[name] = tensor
        if name.endswith("_proj.weight"):
            parts, meant[name] = pack_one(tensor)
            del stored[name]
            stored |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(meant, folder / "meant" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "stored" / "model.safetensors", metadata={"format": "pt"})
    file = folder / "stored" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def logits(folder: Path, paged: Any, bits: int | None = None) -> torch.Tensor:
    ids = list(range(5, 45))
    return paged(load_model(folder, bits=bits).decoder, scattered=False).run({0: ids}, lambda _: 64)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_the_model_it_means(kind: str, tiny: Callable[..., Any], paged: Any, tmp_path: Path) -> None:
    write(tmp_path, tiny("Qwen2", **SHAPE), kind)
    assert holds_few_bits(tmp_path / "stored") == (kind == "awq" or "gptq" in kind)
    assert not holds_few_bits(tmp_path / "meant")
    meant = logits(tmp_path / "meant", paged)
    torch.testing.assert_close(logits(tmp_path / "stored", paged), meant)
    # In 4 bits what is stored in 4 is used as it is; only activations are rounded. Other kinds are put into 8 or 4 bits.
    error = (logits(tmp_path / "stored", paged, 4) - meant).norm() / meant.norm()
    assert error < (0.7 if kind in ("fp8", "compressed-tensors") else 0.1)


def test_other_ways_are_refused_by_name(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("Qwen2", **SHAPE)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for config in ({"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "bits": 4, "version": "gemv"}, {"quant_method": "bitsandbytes"}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
        with pytest.raises(ModelError, match=config["quant_method"]):
            load_model(tmp_path)
