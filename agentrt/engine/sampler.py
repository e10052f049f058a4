"""From logits to tokens, for all rows of a step at once; what a row gets never depends on its neighbours.

Randomness is counter-based: one number per (seed, position), so the same seed gives the same text whatever else runs, in
whatever order, preempted or not. A token is drawn by inverting the cumulative distribution at that number: over all tokens
in the order of their ids, or, with top-k, top-p or min-p, over the likeliest tokens in the order of their logits, equal ones
in the order of their ids.

Speed comes from reading a row seldom. It is seen as blocks of 64, and the largest logit of each block is kept beside it: the
k likeliest tokens of a row lie in the k blocks with the largest such logits. How many tokens are looked at depends on the
neighbours; what is concluded does not, since nothing is concluded from tokens that are tied with the last one looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.engine.penalties import Penalties
from agentrt.errors import AgentrtError, ConstraintError, NumericalError
from agentrt.kernels.logit_blocks import BLOCK, LogitBlocker, block_weights, likeliest
from agentrt.request import SamplingParams, TokenLogprob

_MASK64 = (1 << 64) - 1
#: How many of the likeliest tokens are looked at before all are sorted.
_LOOKS = (64, 512)
#: Tokens looked at beyond those asked for: a tie across the edge would cost a second look.
_SLACK = 8
#: Below this temperature the likeliest token is taken: float32 logits divided by less say nothing more.
_COLDEST = 1e-5
_LARGEST = torch.finfo(torch.float32).max

NOT_FINITE = "the model gave NaN or infinite logits for this request"
NOTHING_ALLOWED = "no token is allowed next: the request's constraint leaves none that the model has"


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
    """What a row gave: a token, its log-probability if asked for; or -1 and why there is none."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: AgentrtError | None = None


class Sampler:
    """Chooses tokens. Holds what is the same for all rows."""

    def __init__(self, valid: Tensor, eos_ids: Sequence[int]) -> None:
        """Makes a sampler.

        Args:
            valid: bool [vocab]: ids that stand for a token; the others are never chosen.
            eos_ids: The model's end tokens.
        """
        self.invalid_ids = (~valid).nonzero()[:, 0]
        self._valid_words = _words(np.packbits(valid.cpu().numpy(), bitorder="little"))
        self._blocker = LogitBlocker(valid)
        self._eos_ids = tuple(eos_ids)

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """Chooses a token for each row.

        Args:
            logits: float32 [rows, vocab]; changed in place.
            rows: How to choose, one per row.
        """
        blocks = self._blocker.blocks(logits, [row.mask for row in rows])
        if all(map(_is_likeliest, rows)) and min(first := blocks.likeliest.tolist()) >= 0:
            return [Choice(token) for token in first]
        grid = _Grid(blocks.values, blocks.tops)
        errors = _neutralised(grid, blocks.finite, NumericalError, NOT_FINITE)
        errors |= _neutralised(grid, grid.peaks() > -torch.inf, ConstraintError, NOTHING_ALLOWED)
        logprobs = _Logprobs(grid, rows)
        self._bias(grid, rows)
        tokens = _choose(grid, rows)
        scores = logprobs.of(tokens)
        return [
            Choice(-1, error=errors[index]) if index in errors else Choice(token, scores.get(index))
            for index, token in enumerate(tokens)
        ]

    def _bias(self, grid: _Grid, rows: Sequence[Row]) -> None:
        """Penalties, logit_bias and min_tokens, in this order, on the tokens they name only."""
        effects = [(index, row.penalties.effect(row.sampling, row.later)) for index, row in enumerate(rows) if row.penalties is not None]
        if effects:
            factor, loss = (torch.from_numpy(np.concatenate([getattr(e, name) for _, e in effects])).to(grid.values.device) for name in ("factor", "loss"))
            at = grid.at((index, effect.ids) for index, effect in effects)
            before = grid.read(at)
            grid.write(at, torch.where(before > 0, before / factor, before * factor) - loss)
        biased = [(index, row.sampling.logit_bias) for index, row in enumerate(rows) if row.sampling.logit_bias]
        if biased:
            at = grid.at((index, np.array([*bias], dtype=np.int64)) for index, bias in biased)
            added = torch.tensor([number for _, bias in biased for number in bias.values()], dtype=torch.float64)
            grid.write(at, grid.read(at) + added.to(at.device))
        early = [(index, self._ends(row)) for index, row in enumerate(rows) if row.output_length < row.sampling.min_tokens]
        if early:
            grid.ban(grid.at(early))

    def _ends(self, row: Row) -> NDArray[np.int64]:
        """The end tokens that come too early in this row; none if a grammar leaves nothing else."""
        ends = np.array([*self._eos_ids, *row.sampling.stop_token_ids], dtype=np.int64)
        ends = ends[ends < 32 * len(self._valid_words)]
        left = self._valid_words.copy()
        if row.mask is not None:
            shared = min(len(left), len(row.mask))
            left[:shared] &= row.mask[:shared].view(np.uint32)
            left[shared:] = 0
        np.bitwise_and.at(left, ends // 32, ~(np.uint32(1) << (ends % 32).astype(np.uint32)))
        return ends if left.any() else ends[:0]


def _words(packed: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)


@dataclass(frozen=True, slots=True)
class _Leaders:
    """The likeliest tokens of some rows, in order: by logit, equal ones by id.

    Attributes:
        values: float32 [rows, k]: their logits.
        ids: int64 [rows, k].
        edge: float32 [rows, 1]: no other token has a larger logit than this.
        sure: int64 [rows, 1]: so many of them are the row's likeliest; the rest are tied with the edge.
        complete: bool [rows, 1]: there are no other tokens that can be chosen.
    """

    values: Tensor
    ids: Tensor
    edge: Tensor
    sure: Tensor
    complete: Tensor


@dataclass(frozen=True, slots=True)
class _Grid:
    """Logits as blocks, and the largest of each block.

    Attributes:
        values: float32 [rows, blocks, 64]; -inf for tokens that cannot be chosen.
        tops: float32 [rows, blocks]: always the largest of each block.
    """

    values: Tensor
    tops: Tensor

    @property
    def width(self) -> int:
        """Logits in a row."""
        return self.tops.shape[1] * BLOCK

    def peaks(self) -> Tensor:
        """The largest logit of each row [rows]."""
        return self.tops.amax(-1)

    def at(self, tokens: Iterable[tuple[int, NDArray[np.int64]]]) -> Tensor:
        """Places int64 [n] in the flattened grid of (row, token ids of it)."""
        flat = np.concatenate([index * self.width + ids for index, ids in tokens])
        return torch.from_numpy(flat).to(self.values.device)

    def read(self, at: Tensor) -> Tensor:
        """Logits at places, float64 [n]."""
        return self.values.view(-1)[at].double()

    def write(self, at: Tensor, logits: Tensor) -> None:
        """Puts logits, float64 [n], at places, within the range of float32; what cannot be chosen stays so."""
        before = self.values.view(-1)[at]
        self._put(at, torch.where(before > -torch.inf, logits.clamp(-_LARGEST, _LARGEST).float(), before))

    def ban(self, at: Tensor) -> None:
        """Makes tokens impossible."""
        self._put(at, self.values.new_full((len(at),), -torch.inf))

    def _put(self, at: Tensor, logits: Tensor) -> None:
        self.values.view(-1)[at] = logits
        if len(at) > self.tops.numel() // 8:  # reading everything in order is faster than much of it at random
            torch.amax(self.values, -1, out=self.tops)
        else:
            blocks = at // BLOCK
            self.tops.view(-1)[blocks] = self.values.view(-1, BLOCK)[blocks].amax(-1)

    def likeliest(self) -> Tensor:
        """The likeliest token of each row [rows]; of equal ones, the first."""
        return likeliest(self.values, self.tops)

    def weights(self, index: Tensor, block: Tensor, temperature: Tensor) -> Tensor:
        """exp((logit - largest of the row) / temperature [n]) in one block [n] of each row at `index` [n]: float32 [n, 64]."""
        peaks = self.peaks()[index, None]
        return (self.values[index, block] - peaks).div_(temperature.float()[:, None]).exp_()

    def sums(self, index: Tensor, temperature: Tensor) -> Tensor:
        """The same weights summed in every block of the rows at `index` [n]: float64 [n, blocks]."""
        return block_weights(self.values, self.tops, index, self.peaks()[index], temperature.float()).double()

    def leaders(self, index: Tensor, k: int) -> _Leaders:
        """The k likeliest tokens of the rows at `index` [n]."""
        blocks = self.tops[index].topk(min(k, self.tops.shape[1]), sorted=False).indices
        flat = (index[:, None] * self.tops.shape[1] + blocks).view(-1)
        values, places = self.values.view(-1, BLOCK).index_select(0, flat).view(len(index), -1).topk(k)
        ids = blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK
        edge = values[:, -1:]
        sure = (values > edge).sum(-1, keepdim=True)
        order = _keys(values, ids).argsort(-1)
        return _Leaders(values.gather(1, order), ids.gather(1, order), edge, sure, edge == -torch.inf)

    def sorted(self, row: int, floor: float) -> _Leaders:
        """All tokens of a row whose logit is at least `floor`, for whom does not need the others."""
        values = self.values[row].view(-1)
        kept = values >= max(floor, -_LARGEST)
        ids = torch.from_numpy(np.flatnonzero(kept.cpu().numpy())).to(values.device)  # torch's nonzero is slow on a CPU
        ids = _ascending(_keys(values.index_select(0, ids), ids)) & 0xFFFFFFFF
        ids, values = ids[None], values.index_select(0, ids)[None]
        ones = torch.ones_like(ids[:, :1])
        return _Leaders(values, ids, values[:, -1:], ones * ids.shape[1], ones > 0)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64: ascending where float32 values descend, and equal values' ids ascend; the id is the lower half."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats ascend as their bits descend
    return (~ascending).long() << 32 | ids


def _neutralised(grid: _Grid, good: Tensor, kind: type[AgentrtError], message: str) -> dict[int, AgentrtError]:
    """The error of each row that is not `good` [rows]; such a row becomes zeros, so that it can go along with the others."""
    errors: dict[int, AgentrtError] = {}
    for index in (~good).nonzero()[:, 0].tolist():
        grid.values[index] = 0
        grid.tops[index] = 0
        errors[index] = kind(message)
    return errors


def _is_likeliest(row: Row) -> bool:
    """Whether the row takes the token with the largest of its logits as they are, and wants nothing else."""
    return _is_greedy(row.sampling) and row.sampling.logprobs is None and not is_biased(row)


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _COLDEST or sampling.top_k == 1


def is_biased(row: Row) -> bool:
    """Whether the row changes single logits: by penalties, a bias, or a least length."""
    return row.penalties is not None or bool(row.sampling.logit_bias) or row.output_length < row.sampling.min_tokens


def _ascending(keys: Tensor) -> Tensor:
    """Keys [n] in order. On a CPU by numpy, several times faster than torch (it sorts in vector registers, and moves no indices)."""
    return keys.sort().values if keys.is_cuda else torch.from_numpy(np.sort(keys.cpu().numpy())).to(keys.device)


class _Logprobs:
    """Log-probabilities at temperature 1 of the rows that ask for them, taken before penalties and biases."""

    def __init__(self, grid: _Grid, rows: Sequence[Row]) -> None:
        counts = [(index, row.sampling.logprobs) for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        self._rows = [index for index, _ in counts]
        if not self._rows:
            return
        index = torch.tensor(self._rows, device=grid.values.device)
        sums = grid.sums(index, torch.ones_like(index)).sum(-1)
        self._norms = (grid.peaks()[index].double() + sums.log()).tolist()
        self._values = grid.values.clone() if any(is_biased(rows[row]) for row in self._rows) else grid.values
        self._tops = _tops(grid, dict(counts))

    def of(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """For each row that asks, by its index: the log-probability of its token, and the likeliest ones."""
        if not self._rows:
            return {}
        chosen = self._values.flatten(1)[self._rows, [tokens[row] for row in self._rows]]
        scores = {}
        for row, value, norm in zip(self._rows, chosen.tolist(), self._norms, strict=True):
            top = tuple((token_id, logit - norm) for token_id, logit in self._tops[row])
            scores[row] = TokenLogprob(tokens[row], max(value - norm, -1e30), top)
        return scores


def _tops(grid: _Grid, counts: dict[int, int]) -> dict[int, list[tuple[int, float]]]:
    """For each row of `counts`, that many likeliest tokens and their logits; those that are impossible are left out."""
    tops: dict[int, list[tuple[int, float]]] = {row: [] for row in counts}
    needs = {row: count + _SLACK for row, count in counts.items() if count}
    for rows, leaders in _looks(grid, needs, {}):
        sure, complete = leaders.sure[:, 0].tolist(), leaders.complete[:, 0].tolist()
        for row, ids, values, number, everything in zip(rows, leaders.ids.tolist(), leaders.values.tolist(), sure, complete, strict=True):
            if number >= counts[row] or everything:
                pairs = zip(ids[: counts[row]], values, strict=False)
                tops[row] = [(token_id, value) for token_id, value in pairs if value > -math.inf]
                del needs[row]
            else:
                needs[row] = _wider(len(ids), grid.width)
    return tops


def _looks(grid: _Grid, needs: dict[int, int], floors: dict[int, float]) -> Iterator[tuple[list[int], _Leaders]]:
    """Looks at ever more of the likeliest tokens of the rows in `needs`, which are so many, until the caller has removed all.

    One look serves every row that may be content with it. Where that would be too many, a row's tokens are sorted, except
    those below its logit in `floors`; row by row, since many at once would take gigabytes.
    """
    while needs:
        widest = next((look for look in _LOOKS if look >= min(needs.values()) and look < grid.width), None)
        if widest is not None:
            now = [row for row, need in needs.items() if need <= widest]
            yield now, grid.leaders(torch.tensor(now, device=grid.values.device), max(needs[row] for row in now))
        else:
            row = next(iter(needs))
            yield [row], grid.sorted(row, floors.get(row, -math.inf))


def _wider(k: int, most: int) -> int:
    return next((look for look in _LOOKS if look > k), most)


def token_logprob(logprobs: Tensor, token_id: int, count: int) -> TokenLogprob:
    """The token's log-probability and the `count` likeliest ones of a row [vocab]; those that are impossible are left out."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple((i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf)
    return TokenLogprob(token_id, max(float(logprobs[token_id]), -1e30), top)


def _choose(grid: _Grid, rows: Sequence[Row]) -> list[int]:
    """Greedy rows take the likeliest token; the others invert their distribution, truncated or not."""
    tokens: list[int] = grid.likeliest().tolist()
    plain: list[int] = []
    truncated: list[int] = []
    for index, row in enumerate(rows):
        sampling = row.sampling
        if not _is_greedy(sampling):
            (truncated if sampling.top_k or sampling.top_p < 1 or sampling.min_p else plain).append(index)
    for group, draw in ((plain, _draw_plain), (truncated, _draw_truncated)):
        if group:
            for index, token in draw(grid, rows, group).items():
                tokens[index] = token
    return tokens


def _draw_plain(grid: _Grid, rows: Sequence[Row], group: list[int]) -> dict[int, int]:
    """Draws from the whole distribution of the rows in `group`: first a block, then a token of it."""
    device = grid.values.device
    index, temperature = torch.tensor(group, device=device), _doubles(device, [rows[i].sampling.temperature for i in group])
    sums = grid.sums(index, temperature).cumsum(-1)
    targets = _numbers(device, rows, group) * sums[:, -1:]
    block = _passing(sums, targets, sums[:, -1:])
    before = sums.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0)
    inside = grid.weights(index, block[:, 0], temperature).double().cumsum(-1)
    token = block * BLOCK + _passing(inside, targets - before, inside[:, -1:])
    return dict(zip(group, token[:, 0].tolist(), strict=True))


def _doubles(device: torch.device, numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _numbers(device: torch.device, rows: Sequence[Row], group: list[int]) -> Tensor:
    """The random number of each row of a group: float64 [n, 1]."""
    return _doubles(device, [uniform(rows[i].seed, rows[i].position) for i in group])[:, None]


def _passing(sums: Tensor, targets: Tensor, most: Tensor) -> Tensor:
    """Where running sums float64 [rows, n] first pass `targets` [rows, 1], which are below `most` [rows, 1], one of the sums.

    A token without weight is never returned: the sum does not grow at it.
    """
    below = torch.nextafter(most, torch.zeros_like(most))  # a rounded product may reach what it should stay below
    return torch.searchsorted(sums, torch.minimum(targets, below), right=True).clamp_(max=sums.shape[1] - 1)


def _draw_truncated(grid: _Grid, rows: Sequence[Row], group: list[int]) -> dict[int, int]:
    """Draws from the top-k, then top-p, then min-p part of the distribution of the rows in `group`."""
    limits = _Limits(grid, rows, group)
    tokens: dict[int, int] = {}
    needs = {row: rows[row].sampling.top_k + _SLACK if rows[row].sampling.top_k else _LOOKS[0] for row in group}
    for now, leaders in _looks(grid, needs, limits.floors()):
        drawn, settled, least = limits.draw(now, leaders)
        for row, token, done, need in zip(now, drawn, settled, least, strict=True):
            if done:
                tokens[row] = token
                del needs[row]
            else:
                wider = _wider(leaders.ids.shape[1], grid.width)
                needs[row] = wider if need <= wider else grid.width
    return tokens


class _Limits:
    """How some rows truncate their distributions, and the random numbers they draw with."""

    def __init__(self, grid: _Grid, rows: Sequence[Row], group: list[int]) -> None:
        device = grid.values.device
        self._place = {row: place for place, row in enumerate(group)}
        sampling = [rows[row].sampling for row in group]
        self._temperature = _doubles(device, [one.temperature for one in sampling])[:, None]
        self._top_k = _doubles(device, [one.top_k or math.inf for one in sampling])[:, None]
        self._top_p = _doubles(device, [one.top_p if one.top_p < 1 else math.inf for one in sampling])[:, None]
        self._min_p = _doubles(device, [one.min_p for one in sampling])[:, None]
        self._numbers = _numbers(device, rows, group)
        self._totals = torch.full_like(self._numbers, math.inf)
        self._peaks = grid.peaks()[group, None].double()
        self._width = grid.width
        # Which tokens are the likeliest k must be known before a share of them is.
        self._share_of_k = (self._top_k < math.inf) & (self._top_p < math.inf)
        nucleus = [place for place, one in enumerate(sampling) if one.top_p < 1 and not one.top_k]
        if nucleus:  # of what top_p is a share: of everything
            index = torch.tensor([group[place] for place in nucleus], device=device)
            self._totals[nucleus, 0] = grid.sums(index, self._temperature[nucleus, 0]).sum(-1)

    def floors(self) -> dict[int, float]:
        """For each row, a logit below which no token is kept."""
        nucleus = (1 - self._top_p) / 2 * self._totals / self._width  # even all tokens below weigh less than top_p leaves out
        nucleus = nucleus.where(self._totals < math.inf, 0)
        # By half of what would do, since sums and logarithms are rounded.
        floors = self._peaks + self._temperature * (torch.maximum(nucleus, self._min_p) / 2).log()
        return dict(zip(self._place, floors[:, 0].where(~self._share_of_k[:, 0], -math.inf).tolist(), strict=True))

    def draw(self, now: list[int], leaders: _Leaders) -> tuple[list[int], list[bool], list[float]]:
        """Draws one token for each of the rows `now`.

        Returns:
            Tokens; whether the leaders were enough to say so; at least how many leaders are needed if not.
        """
        part = torch.tensor([self._place[row] for row in now], device=leaders.ids.device)
        temperature, top_k, top_p, min_p = (one[part] for one in (self._temperature, self._top_k, self._top_p, self._min_p))
        peak = self._peaks[part]
        rank = torch.arange(leaders.ids.shape[1], device=part.device)
        weights = ((leaders.values.double() - peak) / temperature).exp_().where(rank < torch.minimum(leaders.sure, top_k), 0)
        sums = weights.cumsum(-1)
        total = torch.where(top_k < math.inf, sums[:, -1:], self._totals[part])
        share = top_p * total  # a token stays if those before it do not reach this
        kept = ((sums - weights < share) & (weights >= min_p)).sum(-1, keepdim=True)
        mass = sums.gather(1, (kept - 1).clamp_(min=0))
        token = leaders.ids.gather(1, _passing(sums, self._numbers[part] * mass, mass))

        edge = ((leaders.edge.double() - peak) / temperature).exp_()  # no token that was not seen weighs more
        nucleus = (top_k == math.inf) & (sums[:, -1:] >= share)
        floor = ~self._share_of_k[part] & (edge < min_p)
        settled = leaders.complete | (leaders.sure >= top_k) | nucleus | floor
        needed = leaders.sure + ((share - sums[:, -1:]) / edge).where((top_p < math.inf) & (top_k == math.inf), 0)
        return token[:, 0].tolist(), settled[:, 0].tolist(), needed[:, 0].tolist()
