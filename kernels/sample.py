"""Sampling on the device, without sorting the vocabulary: greedy, plain, top-k, top-p and min-p rows in one launch.

Whatever needs an order (the k-th largest logit, where the nucleus ends, which token a number falls on) is found by bisection of
a threshold: how many tokens, or how much probability, lies at or above it takes one pass over a row. A threshold is a float's bits
made to ascend with it, so bisection ends on an exact logit after at most 32 passes. The first few passes, until the tokens that may
be kept are few, are over the whole row; those tokens are then set aside in the order of their ids, and all other passes are over
them. (FlashInfer samples without a sort by rejection; a threshold keeps one random number a token.)

The rule is `agentrt.engine.sampler`'s: a number u in [0, 1) inverts the cumulative distribution, over all tokens in the order of
their ids, or, truncated, over the kept tokens from the likeliest down, equal ones in the order of their ids. Sums are float32 in
blocks and float64 between them, so only a number within rounding of a boundary may fall on its neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: What is returned where no token has a logit above minus infinity.
NOTHING_ALLOWED = -2
#: Below this temperature the likeliest token is taken.
COLDEST = 1e-5
_BLOCK = 4096
#: Tokens of a row that are set aside at most; where more may be kept, every pass is over the whole row.
_ASIDE = 4096


@triton.jit
def _key(x):
    """int32 that ascends with float32 x; -0.0 and 0.0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count(row, vocab, threshold, BLOCK: tl.constexpr):
    """Tokens whose key is at least `threshold`."""
    total = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        total += tl.sum((_key(x) >= threshold).to(tl.int32) & (offsets < vocab).to(tl.int32), 0)
    return total


@triton.jit
def _mass(row, vocab, threshold, peak, warmth, least, BLOCK: tl.constexpr):
    """Weight exp((x - peak) * warmth), of tokens whose key is at least `threshold` and weight at least `least`; float64."""
    total = tl.zeros([], tl.float64)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        weights = tl.exp((x - peak) * warmth)
        kept = (_key(x) >= threshold) & (weights >= least)
        total += tl.sum(tl.where(kept, weights, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _middle(low, high):
    return (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)


@triton.jit
def _kth(row, vocab, k, low, high, BLOCK: tl.constexpr):
    """The largest key in [low, high] that at least k tokens reach."""
    while low < high:
        middle = _middle(low, high)
        enough = _count(row, vocab, middle, BLOCK) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _reaching(row, vocab, target, low, high, peak, warmth, least, PAST: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in [low, high] at or above which the weights reach `target`, or with PAST, pass it; `low` if none."""
    while low < high:
        middle = _middle(low, high)
        mass = _mass(row, vocab, middle, peak, warmth, least, BLOCK)
        enough = mass > target if PAST else mass >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _nth_equal(row, vocab, key, n, BLOCK: tl.constexpr):
    """The n-th token (from 0), in the order of ids, whose key is `key`."""
    before = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        equal = ((_key(x) == key) & (offsets < vocab)).to(tl.int32)
        rank = before + tl.cumsum(equal, 0)
        token += tl.sum(tl.where((equal == 1) & (rank == n + 1), offsets, 0), 0)
        before += tl.sum(equal, 0)
    return token


@triton.jit
def _draw_plain(row, vocab, number, peak, warmth, BLOCK: tl.constexpr):
    """Inverts the cumulative distribution over all tokens in the order of their ids."""
    target = number * _mass(row, vocab, _key(tl.full([], float("-inf"), tl.float32)), peak, warmth, 0.0, BLOCK)
    sum_so_far = tl.zeros([], tl.float64)
    before = tl.zeros([], tl.float64)
    block = tl.full([], -1, tl.int32)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        mass = tl.sum(tl.exp((x - peak) * warmth), 0).to(tl.float64)
        # The last block that weighs anything, should rounding leave the number beyond all of them.
        here = (sum_so_far <= target) & (mass > 0)
        before = tl.where(here, sum_so_far, before)
        block = tl.where(here, first, block)
        sum_so_far += mass
    offsets = block + tl.arange(0, BLOCK)
    x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
    weights = tl.exp((x - peak) * warmth)
    passed = (before + tl.cumsum(weights, 0).to(tl.float64) > target) & (weights > 0)
    token = tl.min(tl.where(passed, offsets, 0x7FFFFFFF), 0)
    return tl.where(token == 0x7FFFFFFF, tl.max(tl.where(weights > 0, offsets, 0), 0), token)


@triton.jit
def _floor(row, vocab, peak, warmth, top_k, top_p, min_p, whole, most, BLOCK: tl.constexpr):
    """A key that every token to be kept reaches, and how many tokens reach it: at most `most`, if such a key is found."""
    low, high = _key(tl.full([], float("-inf"), tl.float32)), _key(peak)
    if (top_k == 0) & (top_p == 1.0):  # min-p alone says it; by half of what would do, since logarithms are rounded
        low = tl.maximum(low, _key(peak + tl.log(min_p * 0.5) / warmth))
        high = low
    reached = _count(row, vocab, low, BLOCK)
    while (reached > most) & (low < high):
        middle = _middle(low, high)
        count = _count(row, vocab, middle, BLOCK)
        enough = count >= top_k
        if top_k == 0:
            enough = _mass(row, vocab, middle, peak, warmth, 0.0, BLOCK) >= top_p.to(tl.float64) * whole
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle - 1)
    return low, reached


@triton.jit
def _set_aside(row, vocab, floor, values, ids, BLOCK: tl.constexpr):
    """Writes the tokens that reach a key, and their logits, in the order of ids."""
    before = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        kept = (_key(x) >= floor) & (offsets < vocab)
        place = before + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(values + place, x, mask=kept)
        tl.store(ids + place, offsets, mask=kept)
        before += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()  # what other threads wrote is read next


@triton.jit
def _draw_truncated(row, vocab, number, peak, warmth, top_k, top_p, min_p, whole, BLOCK: tl.constexpr):
    """Draws among the top-k, of these the top-p, of these the min-p tokens, from the likeliest down; the place in the row.

    `whole` is the weight of the model's whole row, of which top-p is a share where there is no top-k.
    """
    lowest, highest = _key(tl.full([], float("-inf"), tl.float32)), _key(peak)
    # Kept are all tokens above the key `edge`, and the first `ties` of those that are equal to it.
    edge = lowest
    ties = tl.zeros([], tl.int32)
    if top_k > 0:
        edge = _kth(row, vocab, top_k, lowest, highest, BLOCK)
        ties = tl.minimum(top_k, vocab) - _count(row, vocab, edge + 1, BLOCK)
    edge_logit = (edge ^ ((edge >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    edge_weight = tl.exp((edge_logit - peak) * warmth).to(tl.float64)
    above = _mass(row, vocab, edge + 1, peak, warmth, 0.0, BLOCK)
    if top_p < 1.0:
        share = top_p.to(tl.float64) * tl.where(top_k > 0, above + ties * edge_weight, whole)
        nucleus = _reaching(row, vocab, share, edge, highest, peak, warmth, 0.0, False, BLOCK)
        if nucleus > edge:
            edge = nucleus
            ties = _count(row, vocab, edge, BLOCK) - _count(row, vocab, edge + 1, BLOCK)
            edge_logit = (edge ^ ((edge >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            edge_weight = tl.exp((edge_logit - peak) * warmth).to(tl.float64)
            above = _mass(row, vocab, edge + 1, peak, warmth, 0.0, BLOCK)
        if edge_weight > 0:  # an equal token stays if those before it do not reach the share
            ties = tl.minimum(ties, tl.maximum(tl.ceil((share - above) / edge_weight), 1.0).to(tl.int32))
    if edge_weight < min_p:
        ties = tl.zeros([], tl.int32)
    above = _mass(row, vocab, edge + 1, peak, warmth, min_p, BLOCK)
    target = number * (above + ties * edge_weight)
    place = tl.zeros([], tl.int32)
    chosen = edge
    if target < above:
        chosen = _reaching(row, vocab, target, edge + 1, highest, peak, warmth, min_p, True, BLOCK)
        edge_logit = (chosen ^ ((chosen >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        edge_weight = tl.exp((edge_logit - peak) * warmth).to(tl.float64)
        above = _mass(row, vocab, chosen + 1, peak, warmth, min_p, BLOCK)
        ties = _count(row, vocab, chosen, BLOCK) - _count(row, vocab, chosen + 1, BLOCK)
    if edge_weight > 0:
        place = tl.minimum(tl.maximum((target - above) / edge_weight, 0.0).to(tl.int32), tl.maximum(ties - 1, 0))
    return _nth_equal(row, vocab, chosen, place, BLOCK)


@triton.jit(do_not_specialize=["rows"])  # or the first batch of each kind waits seconds for its own
def _sample(logits, ways, tokens, aside, aside_ids, rows, stride, vocab, ASIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    peak = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        x = tl.load(row + offsets, mask=offsets < vocab, other=float("-inf"))
        largest = tl.max(x, 0)
        where = tl.min(tl.where(x == largest, offsets, 0x7FFFFFFF), 0)
        likeliest = tl.where(largest > peak, where, likeliest)
        peak = tl.maximum(peak, largest)
    temperature = tl.load(ways + place).to(tl.float32)
    top_k = tl.load(ways + rows + place).to(tl.int32)
    top_p = tl.load(ways + 2 * rows + place).to(tl.float32)
    min_p = tl.load(ways + 3 * rows + place).to(tl.float32)
    number = tl.load(ways + 4 * rows + place)
    warmth = 1.0 / tl.maximum(temperature, 1e-30)
    token = likeliest
    if peak == float("-inf"):
        token = tl.full([], -2, tl.int32)
    elif (temperature >= 1e-5) & (top_k != 1):
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            whole = _mass(row, vocab, _key(tl.full([], float("-inf"), tl.float32)), peak, warmth, 0.0, BLOCK)
            floor, reached = _floor(row, vocab, peak, warmth, top_k, top_p, min_p, whole, ASIDE, BLOCK)
            if reached <= ASIDE:
                values, ids = aside + place * ASIDE, aside_ids + place * ASIDE
                _set_aside(row, vocab, floor, values, ids, BLOCK)
                token = tl.load(ids + _draw_truncated(values, reached, number, peak, warmth, top_k, top_p, min_p, whole, ASIDE))
            else:
                token = _draw_truncated(row, vocab, number, peak, warmth, top_k, top_p, min_p, whole, BLOCK)
        else:
            token = _draw_plain(row, vocab, number, peak, warmth, BLOCK)
    tl.store(tokens + place, token)


def sample(logits: Tensor, ways: Tensor, most: int = _ASIDE) -> Tensor:
    """Chooses a token for each row.

    Args:
        logits: float32 [rows, vocab], the last dimension contiguous; neither NaN nor plus infinity.
        ways: float64 [5, rows], contiguous: temperatures (below `COLDEST` the likeliest token is taken); top-k, 0 for off; top-p,
            1 for off; min-p, 0 for off; random numbers in [0, 1).
        most: Tokens of a row that are set aside at most, a power of two.

    Returns:
        int32 [rows]: tokens; `NOTHING_ALLOWED` where every logit is minus infinity.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    most = min(most, triton.next_power_of_2(vocab))
    aside = torch.empty((rows, most), dtype=torch.float32, device=logits.device)
    aside_ids = torch.empty((rows, most), dtype=torch.int32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _sample[(rows,)](
        logits, ways, tokens, aside, aside_ids, rows, logits.stride(0), vocab, ASIDE=most, BLOCK=block, num_warps=16, num_stages=1, enable_fp_fusion=True
    )
    return tokens


def sample_reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    """The token of one row [vocab], by a sort, in float64."""
    if not bool((logits > -torch.inf).any()):
        return NOTHING_ALLOWED
    if temperature < COLDEST or top_k == 1:
        return int(logits.argmax())
    logits = logits.double()
    weights = ((logits - logits.max()) / temperature).exp()
    if not top_k and top_p >= 1 and not min_p:
        sums = weights.cumsum(0)
        return int(torch.searchsorted(sums, number * float(sums[-1]), right=True))
    order = torch.argsort(logits, descending=True, stable=True)[: top_k or len(logits)]
    kept = weights[order]
    sums = kept.cumsum(0)
    stays = (kept >= min_p) & (sums - kept < top_p * sums[-1] if top_p < 1 else kept >= 0)
    sums = kept[stays].cumsum(0)
    return int(order[stays][torch.searchsorted(sums, number * float(sums[-1]), right=True)])
