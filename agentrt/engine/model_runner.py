"""Runs the model on a batch: hidden states and logits of the wanted rows, scores of given tokens.

The caller holds torch's inference mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch, HostPlanned
from agentrt.engine.batch import ForwardBatch
from agentrt.engine.kv_store import KVStore
from agentrt.engine.sampler import token_logprob
from agentrt.engine.step_graphs import StepGraphs
from agentrt.models.loader import LoadedModel
from agentrt.request import TokenLogprob

#: Rows of logits made at once when scoring; bounds memory to this many times the vocabulary.
SCORE_ROWS = 64


class ModelRunner:
    """A model, its KV store and its attention."""

    def __init__(
        self, model: LoadedModel, store: KVStore, attention: Attention, device: torch.device, graphs: StepGraphs | None = None
    ) -> None:
        """Puts them together; all on `device`.

        Args:
            model, store, attention: As they are.
            device: Where they are.
            graphs: Captured steps of this very model, store and attention; None: every step is launched anew.
        """
        self.device = device
        self._decoder = model.decoder
        self._store = store
        self._attention = attention
        self._graphs = graphs
        self._wants_slots = not isinstance(attention, HostPlanned)
        self._windows = tuple(dict.fromkeys(model.config.windows))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the batch's tokens and writes their KV; returns the hidden states of `logits_rows`: [rows, width]."""
        if self._graphs is not None and self._graphs.cover(batch):
            return self._graphs.forward(batch)
        if self.device.type == "cuda":
            batch = batch.on(self.device, slots=self._wants_slots)
        wanted = None if batch.every else batch.logits_rows
        return self._decoder.forward(batch.token_ids, batch.positions, batch.attention, self._attention, self._store, wanted)

    def foresee(self, batch: AttentionBatch) -> None:
        """Lets an attention that works steps out on the host do so for a step to come, but for where its tokens will go."""
        if isinstance(self._attention, HostPlanned):
            for window in self._windows:
                self._attention.foresee(batch, window)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, width] to float32 logits [rows, vocab]."""
        return self._decoder.logits(hidden)

    def score(self, hidden: Tensor, targets: list[tuple[int, int]]) -> list[TokenLogprob]:
        """Log-probability of given tokens.

        Args:
            hidden: [rows, width].
            targets: For each row, the token that follows and how many alternatives to give.
        """
        scores: list[TokenLogprob] = []
        for start in range(0, len(targets), SCORE_ROWS):
            logprobs = self.logits(hidden[start : start + SCORE_ROWS]).log_softmax(-1)
            for row, (token_id, count) in zip(logprobs, targets[start : start + SCORE_ROWS], strict=True):
                scores.append(token_logprob(row, token_id, count))
        return scores
