"""Rotary position embedding: wavelengths by the model's scaling method, cosines and sines for a step's positions.

Everything is float32 until the end, as in transformers, whose numbers these are. A token's rotation depends on its
position alone, never on how long its sequence is: keys are cached and shared (`RopeConfig.context`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentrt.errors import ModelError
from agentrt.models.config import RopeConfig


class Rotary:
    """Rotation of the two halves of each head against each other (Su et al., RoFormer, 2021, in NeoX's order).

    Attributes:
        frequencies: Radians a token, float32 [head_dim / 2].
        scale: Factor on cosines and sines.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        if head_dim % 2:
            raise ModelError(f"head_dim is {head_dim}; rotary embedding needs an even one")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, self.scale = _scaled(config, 1.0 / config.theta**exponents, head_dim)
        self.frequencies = frequencies.to(device)
        self._table = self._angles(torch.arange(0, device=device))

    def table(self, reach: int) -> tuple[Tensor, Tensor]:
        """The angles of all positions below `reach`, and perhaps more, in float32: what was worked out once is kept.

        Returns:
            Cosines, and sines whose first half is negated: two tensors [at least reach, 1, head_dim], positions one after the other.
        """
        known = len(self._table[0])
        if reach > known:
            more = self._angles(torch.arange(known, max(reach, 2 * known), device=self.frequencies.device))
            self._table = torch.cat((self._table[0], more[0])), torch.cat((self._table[1], more[1]))
        return self._table

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines whose first half is negated, of a step.

        Args:
            positions: int64 [tokens].
            dtype: Of the answer.

        Returns:
            Two tensors [tokens, 1, head_dim].
        """
        if positions.is_cpu:  # a look costs less than the functions, and every step finds the same bits
            cos, sin = (table.index_select(0, positions) for table in self.table(int(positions.max()) + 1))
        else:
            cos, sin = self._angles(positions)
        return cos.to(dtype), sin.to(dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos.mul_(self.scale), sin.mul_(self.scale)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [tokens, heads, head_dim] by `Rotary.angles`; three operators, no view kept."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos).addcmul_(swapped, sin)


def _scaled(config: RopeConfig, frequencies: Tensor, head_dim: int) -> tuple[Tensor, float]:
    if config.kind == "linear":
        return frequencies / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, frequencies), 1.0
    if config.kind == "yarn":
        return _yarn(config, frequencies, head_dim), _yarn_scale(config)
    if config.kind == "longrope":
        return _longrope(config, frequencies)
    return frequencies, 1.0  # Dynamic NTK is the identity up to the context at which agentrt ends it.


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((config.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023): interpolates dimensions that turn seldom in the original context, keeps the others."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(config.original_context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp)


def _yarn_scale(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope(config: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024), its factors for contexts up to the original one."""
    if len(config.short_factor) != frequencies.shape[0]:
        raise ModelError(
            f"rope scaling 'longrope' has {len(config.short_factor)} short factors; this model needs {frequencies.shape[0]}"
        )
    scale = config.attention_factor
    if scale is None:
        stretched = config.factor > 1.0
        scale = math.sqrt(1 + math.log(config.factor) / math.log(config.original_context)) if stretched else 1.0
    return frequencies / torch.tensor(config.short_factor), scale
