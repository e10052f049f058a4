"""The tokens that occurred in one sequence, and what the repetition, frequency and presence penalties make of them.

Only tokens that occurred are kept, never a dense row of the vocabulary: a step costs what the sequence has distinct tokens.
It does not touch logits; the sampler does, for all rows at once. Counts follow the sequence exactly, also back (`remove`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrt.request import SamplingParams


def wants_penalties(sampling: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Effect:
    """What penalties do to the logits of some tokens of one row: a positive one is divided, another multiplied, then both lose.

    Attributes:
        ids: int64 [n], each once.
        factor: float64 [n], above 0.
        loss: float64 [n].
    """

    ids: NDArray[np.int64]
    factor: NDArray[np.float64]
    loss: NDArray[np.float64]


class Penalties:
    """Occurrences of the tokens of one sequence."""

    def __init__(self, vocab_size: int, token_ids: Sequence[int], prompt_length: int) -> None:
        """Counts the tokens of a sequence.

        Args:
            vocab_size: Width of the logits; tokens beyond it (a model may read more than it writes) have no logit to change.
            token_ids: Prompt and output so far.
            prompt_length: How many of those are the prompt.
        """
        self._vocab_size = vocab_size
        prompt = np.unique(np.array(token_ids[:prompt_length], dtype=np.int64))
        prompt = prompt[prompt < vocab_size]
        # Growing arrays, filled up to len(self._places): token, occurrences in the output, whether it is in the prompt.
        self._ids = prompt
        self._counts = np.zeros(len(prompt), dtype=np.int64)
        self._in_prompt = np.ones(len(prompt), dtype=np.bool_)
        self._places = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        self.add(token_ids[prompt_length:])

    def add(self, token_ids: Sequence[int]) -> None:
        """Counts tokens of the output."""
        for token_id in token_ids:
            if token_id < self._vocab_size:
                place = self._place(token_id)  # may replace the arrays
                self._counts[place] += 1

    def remove(self, token_ids: Sequence[int]) -> None:
        """Uncounts tokens of the output (a rejected draft)."""
        for token_id in token_ids:
            if token_id < self._vocab_size:
                self._counts[self._places[token_id]] -= 1

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            more = max(64, place)
            self._ids = np.pad(self._ids, (0, more))
            self._counts = np.pad(self._counts, (0, more))
            self._in_prompt = np.pad(self._in_prompt, (0, more))
        self._ids[place] = token_id
        return place

    def effect(self, sampling: SamplingParams, later: Sequence[int] = ()) -> Effect:
        """What to do to the logits that predict one place.

        Args:
            sampling: The penalties. Repetition as in CTRL (Keskar et al. 2019), the others as OpenAI's API has them.
            later: Counted tokens that come after that place (guesses further on in a draft).
        """
        used = len(self._places)
        counts = self._counts[:used].copy()
        for token_id in later:
            if token_id in self._places:
                counts[self._places[token_id]] -= 1
        in_output = counts > 0
        factor = np.where(in_output | self._in_prompt[:used], sampling.repetition_penalty, 1.0)
        loss = sampling.frequency_penalty * counts + sampling.presence_penalty * in_output
        return Effect(self._ids[:used], factor, loss)
