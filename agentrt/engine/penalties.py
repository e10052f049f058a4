"""How often each token occurred in one sequence, and what the repetition, frequency and presence penalties make of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrt.request import SamplingParams


def wants_penalties(sampling: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


class Penalties:
    """Occurrences of every token; dense, since the logits they apply to are."""

    def __init__(self, vocab_size: int, token_ids: Sequence[int], prompt_length: int) -> None:
        """Counts the tokens of a sequence.

        Args:
            vocab_size: Width of the logits.
            token_ids: Prompt and output so far.
            prompt_length: How many of those are the prompt.
        """
        self._vocab_size = vocab_size
        self._prompt = self._count(token_ids[:prompt_length]) > 0  # [vocab]
        self._output = self._count(token_ids[prompt_length:])  # [vocab]

    def _count(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        return torch.bincount(ids, minlength=self._vocab_size).float()

    def add(self, token_ids: Sequence[int]) -> None:
        """Counts tokens of the output."""
        for token_id in token_ids:
            self._output[token_id] += 1

    def remove(self, token_ids: Sequence[int]) -> None:
        """Uncounts tokens of the output (a rejected draft)."""
        for token_id in token_ids:
            self._output[token_id] -= 1

    def apply(self, logits: Tensor, sampling: SamplingParams, later: Sequence[int]) -> None:
        """Changes one row of logits in place.

        Args:
            logits: float32 [vocab].
            sampling: The penalties. Repetition as in CTRL (Keskar et al. 2019), the others as OpenAI's API has them.
            later: Counted tokens that come after the place this row predicts (guesses further on in a draft).
        """
        counts = self._output
        if later:
            counts = counts.clone()
            for token_id in later:
                counts[token_id] -= 1
        counts = counts.to(logits.device)
        if sampling.repetition_penalty != 1:
            seen = self._prompt.to(logits.device) | (counts > 0)
            penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
            logits.copy_(torch.where(seen, penalised, logits))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
