"""A model of random weights, its matrices in 16 bits or in a layout of few bits."""

from __future__ import annotations

import torch
from agentrt.kernels.quantized_linear import QuantizedWeight

from agentrt.models.config import ModelConfig
from agentrt.models.decoder import Decoder, weight_shapes
from agentrt.models.device_linear import DeviceLinears
from agentrt.models.linear import dense
from agentrt.models.quantized_checkpoint import AwqWeight, RowScaled

from .sizes import SEED, Sizes

#: Bits of a weight, scales included, in the layouts that a checkpoint may have.
LAYOUTS = {"q4": 5.0, "q8": 8.5, "awq": 4.16, "int8": 8.0, "fp8": 8.0}


def few_bits(layout: str, config: ModelConfig, device: torch.device) -> DeviceLinears:
    """Holds random matrices in that layout, and the head in groups of 8 bits."""
    shapes = weight_shapes(config)

    def grouped(name: str) -> list[QuantizedWeight]:
        out, inputs = shapes["model.embed_tokens.weight" if "lm_head" in name else name]
        scale = torch.full((out, inputs // 32), inputs**-0.5 / (40 if layout == "q8" or "lm_head" in name else 5), device=device)
        if layout == "q8" or "lm_head" in name:
            return [QuantizedWeight(inputs, 8, torch.randint(-80, 81, (out, inputs // 32, 32), dtype=torch.int8, device=device), scale)]
        return [QuantizedWeight(inputs, 4, torch.randint(0, 16, (out, inputs // 32, 32), dtype=torch.uint8, device=device), scale, -7.5 * scale)]

    def packed(name: str) -> list[AwqWeight] | list[RowScaled]:
        if "lm_head" in name or layout in ("q4", "q8"):
            return []
        out, inputs = shapes[name]
        if layout == "awq":
            groups = max(inputs // 128, 1)
            words = torch.randint(-(2**31), 2**31 - 1, (inputs, out // 8), dtype=torch.int32, device=device)
            return [AwqWeight(words, words[:groups].clone(), torch.full((groups, out), inputs**-0.5 / 5, device=device).half())]
        numbers = torch.randn(out, inputs, device=device)
        codes = (numbers * 40).clamp(-127, 127).to(torch.int8) if layout == "int8" else numbers.to(torch.float8_e4m3fn)
        return [RowScaled(codes, torch.full((out,), inputs**-0.5 / (40 if layout == "int8" else 1), device=device))]

    return DeviceLinears(4 if layout in ("q4", "awq") else 8, grouped, packed, device)


def make_model(sizes: Sizes, layout: str | None = None) -> Decoder:
    """Random weights; matrices in a layout of few bits, if one is named."""
    config = ModelConfig.from_hf(sizes.config())
    generator = torch.Generator(sizes.device).manual_seed(SEED)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if layout is not None and "_proj" in name:
            weights[name] = torch.zeros(1).expand(shape)  # made below, not from this
            continue
        weight = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
        weights[name] = weight.fill_(1.0) if len(shape) == 1 else weight.normal_(0, shape[1] ** -0.5, generator=generator)
    return Decoder(config, weights, dense if layout is None else few_bits(layout, config, sizes.device))
