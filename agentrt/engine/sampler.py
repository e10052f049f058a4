"""From logits to tokens, for all rows of a step at once; what a row gets never depends on its neighbours.

Randomness is counter-based: one number per (seed, position), so the same seed gives the same text whatever else runs, in
whatever order, preempted or not. A token is drawn by inverting the cumulative distribution at that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.engine.penalties import Penalties
from agentrt.request import SamplingParams, TokenLogprob

_MASK64 = (1 << 64) - 1
#: Candidates that top-p looks at before it sorts the whole vocabulary.
_FIRST_LOOK = 512


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one token: SplitMix64 (Steele et al. 2014) of seed and position."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Row:
    """How to choose the token of one row.

    Attributes:
        sampling: As the request has it.
        seed: Of the sample.
        position: Of the token to be chosen, in the sequence.
        output_length: Tokens generated before it.
        penalties: Occurrences so far, if any penalty is on.
        later: Counted tokens that come after this place.
        mask: int32 [words], bit i of word w set if token 32 w + i is allowed; None: all are.
    """

    sampling: SamplingParams
    seed: int
    position: int
    output_length: int
    penalties: Penalties | None = None
    later: tuple[int, ...] = ()
    mask: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a row gave: a token, its log-probability if asked for, or what was wrong with its logits."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str = ""


class Sampler:
    """Chooses tokens. Holds what is the same for all rows."""

    def __init__(self, valid: Tensor, eos_ids: Sequence[int]) -> None:
        """Makes a sampler.

        Args:
            valid: bool [vocab]: ids that stand for a token; the others are never chosen.
            eos_ids: The model's end tokens.
        """
        self._invalid = None if bool(valid.all()) else ~valid
        self._eos_ids = tuple(eos_ids)

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """Chooses a token for each row.

        Args:
            logits: float32 [rows, vocab]; changed in place.
            rows: How to choose, one per row.
        """
        errors = self._errors(logits)
        if self._invalid is not None:
            logits.masked_fill_(self._invalid, -torch.inf)
        _apply_masks(logits, rows)
        logprobs = _Logprobs(logits, rows)
        for index, row in enumerate(rows):
            self._bias(logits[index], row)
        tokens = _choose(logits, rows)
        return [
            Choice(token, logprobs.of(index, token)) if not error else Choice(-1, error=error)
            for index, (token, error) in enumerate(zip(tokens, errors, strict=True))
        ]

    @staticmethod
    def _errors(logits: Tensor) -> list[str]:
        finite = logits.sum(1).isfinite().tolist()  # one NaN or infinity is enough to spoil a sum
        return ["" if ok else "the model gave NaN or infinite logits for this request" for ok in finite]

    def _bias(self, logits: Tensor, row: Row) -> None:
        """Penalties, logit_bias and min_tokens: what only some rows ask for, on one row [vocab]."""
        sampling = row.sampling
        if row.penalties is not None:
            row.penalties.apply(logits, sampling, row.later)
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if row.output_length < sampling.min_tokens:
            ends = (*self._eos_ids, *sampling.stop_token_ids)
            banned = logits.clone()
            banned[list(ends)] = -torch.inf
            if banned.amax() > -torch.inf:  # a grammar may leave nothing else
                logits.copy_(banned)


def _apply_masks(logits: Tensor, rows: Sequence[Row]) -> None:
    masked = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    packed = np.stack([mask for _, mask in masked])
    bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    banned = torch.from_numpy(bits == 0).to(logits.device)
    if len(masked) == len(rows):
        logits.masked_fill_(banned, -torch.inf)
    else:
        where = torch.tensor([index for index, _ in masked], device=logits.device)
        logits[where] = logits[where].masked_fill_(banned, -torch.inf)


class _Logprobs:
    """Log-probabilities at temperature 1 of the rows that ask for them, taken before penalties and biases."""

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        wanting = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        self._rows = rows
        self._at = {index: place for place, index in enumerate(wanting)}
        self._logprobs = logits[wanting].log_softmax(-1) if wanting else logits.new_empty(0)

    def of(self, index: int, token_id: int) -> TokenLogprob | None:
        place = self._at.get(index)
        if place is None:
            return None
        return token_logprob(self._logprobs[place], token_id, self._rows[index].sampling.logprobs or 0)


def token_logprob(logprobs: Tensor, token_id: int, count: int) -> TokenLogprob:
    """The token's log-probability and the `count` likeliest ones of a row [vocab]; those that are impossible are left out."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple((i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf)
    return TokenLogprob(token_id, max(float(logprobs[token_id]), -1e30), top)


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Greedy rows by argmax; the others by inverting their distribution, truncated or not."""
    tokens = logits.argmax(-1).tolist()
    plain: list[int] = []
    truncated: list[int] = []
    for index, row in enumerate(rows):
        sampling = row.sampling
        if sampling.temperature > 0 and sampling.top_k != 1:
            (truncated if sampling.top_k or sampling.top_p < 1 else plain).append(index)
    for group, draw in ((plain, _draw_plain), (truncated, _draw_truncated)):
        if group:
            chosen = draw(_scaled(logits, rows, group), [rows[index] for index in group])
            for index, token in zip(group, chosen, strict=True):
                tokens[index] = token
    return tokens


def _scaled(logits: Tensor, rows: Sequence[Row], group: list[int]) -> Tensor:
    picked = logits[group]
    picked.nan_to_num_(nan=0.0, posinf=0.0)  # rows in error; their choice is thrown away
    temperature = picked.new_tensor([rows[index].sampling.temperature for index in group])
    return picked.sub_(picked.amax(-1, keepdim=True)).div_(temperature[:, None])


def _draw_plain(scaled: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draws from softmax(scaled [rows, vocab]), without tokens below min_p of the likeliest."""
    weights = scaled.exp_()  # the likeliest has weight 1
    min_p = weights.new_tensor([row.sampling.min_p for row in rows])
    weights.masked_fill_(weights < min_p[:, None], 0)
    return _invert(weights, rows).tolist()


def _draw_truncated(scaled: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draws from the top-k, then top-p, then min-p part of softmax(scaled [rows, vocab])."""
    tokens: list[int] = []
    for values, row in zip(scaled, rows, strict=True):
        sampling = row.sampling
        k = min(sampling.top_k or len(values), len(values))
        candidates, ids = _candidates(values, k, sampling.top_p)
        weights = candidates.exp()
        if sampling.top_p < 1:
            total = weights.sum() if sampling.top_k else values.exp().sum()
            before = weights.cumsum(-1) - weights  # a token stays if those before it do not reach top_p
            weights = torch.where(before < sampling.top_p * total, weights, 0)
        weights = torch.where(weights >= sampling.min_p, weights, 0)
        tokens.append(int(ids[_invert(weights[None], [row])[0]]))
    return tokens


def _candidates(values: Tensor, k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The k likeliest of a row [vocab], in order; fewer if the first ones hold top_p of everything already."""
    if k <= _FIRST_LOOK or top_p >= 1:
        return values.topk(k)
    first, ids = values.topk(_FIRST_LOOK)
    if first.exp().sum() >= top_p * values.exp().sum():
        return first, ids
    return values.topk(k)


def _invert(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """For each row of weights [rows, n], the index at which their running sum passes the row's own random number."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    numbers = sums.new_tensor([uniform(row.seed, row.position) for row in rows])
    index = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
    return index.clamp_(max=weights.shape[1] - 1)
