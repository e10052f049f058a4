"""The sampler for a GPU: steps whose rows ask for nothing unusual are masked and sampled there by two kernels, and the host waits
once, for the tokens.

A step in which a row wants log-probabilities, penalties, a bias or a least length goes the common way, in torch's operators. Both
follow one rule; their sums differ by rounding, so a token whose random number falls within rounding of a boundary may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrt.engine.sampler import NOT_FINITE, NOTHING_ALLOWED, Choice, Row, Sampler, is_biased, uniform
from agentrt.errors import AgentrtError, ConstraintError, NumericalError
from agentrt.kernels.sample import NOTHING_ALLOWED as NO_TOKEN
from agentrt.kernels.sample import sample
from agentrt.kernels.token_mask import mask_tokens

#: In place of a token where the model's logits were not finite; the kernel's own code for "none is allowed" is another.
_BROKEN = -3


class DeviceSampler(Sampler):
    """As `Sampler`, on the device that the logits are on."""

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """Chooses a token for each row; as `Sampler.sample`."""
        if any(row.sampling.logprobs is not None or is_biased(row) for row in rows):
            return super().sample(logits, rows)
        finite = logits.isfinite().all(1)
        self._forbid(logits, rows)
        tokens = sample(logits, _sent(_ways(rows), logits.device))
        return [_choice(token) for token in torch.where(finite, tokens, _BROKEN).tolist()]

    def _forbid(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Minus infinity for ids that stand for no token, and for what masks forbid."""
        if len(self.invalid_ids):
            logits.index_fill_(1, self.invalid_ids.to(logits.device), -torch.inf)
        masks = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
        if masks:
            words = _sent(torch.from_numpy(np.stack([mask for _, mask in masks])), logits.device)
            mask_tokens(logits, words, _sent(torch.tensor([index for index, _ in masks], dtype=torch.int32), logits.device))


def _ways(rows: Sequence[Row]) -> Tensor:
    """As `agentrt.kernels.sample.sample` wants them."""
    ways = [
        (row.sampling.temperature, row.sampling.top_k or 0, row.sampling.top_p, row.sampling.min_p, uniform(row.seed, row.position)) for row in rows
    ]
    return torch.from_numpy(np.array(ways, dtype=np.float64).T.copy())


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _choice(token: int) -> Choice:
    error: AgentrtError | None = None
    if token == _BROKEN:
        error = NumericalError(NOT_FINITE)
    elif token == NO_TOKEN:
        error = ConstraintError(NOTHING_ALLOWED)
    return Choice(token) if error is None else Choice(-1, error=error)
