"""Attention of runs of new tokens over keys and values in pages: one Triton kernel for every kind of run.

The kernel works through a list of *tiles*. A tile is a few query rows and one span of positions of one sequence's page
table; a prefill chunk, a decode, a forced run, a draft, a piece of a split decode and a prefix that many sequences share are
all tiles, and differ in nothing but those numbers (`agentrt.kernels.attention_tiles` makes the lists). A tile that sees all
that its rows see writes their output; a tile that sees part of it writes a partial result and its log-sum-exp, and
`agentrt.kernels.merge_parts` puts parts together. The online softmax is Milakov and Gimelshein's (2018), tiled as in
FlashAttention (Dao et al., 2022); pages are PagedAttention's (Kwon et al., 2023).

Invariant: a row reads positions below its own `seen` and inside its window, and nothing of any other sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Integers of a tile: first row, rows, page table, first position, end of positions, first partial row or -1.
TILE_FIELDS = 6

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How large tiles are, and how they run; one kernel is compiled for each.

    Attributes:
        rows: Query rows (token and head of a group), a power of two of at least 16: the matrix units take no fewer.
        keys: Positions read at a time.
        warps, stages: Of the launch.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def narrow_shape(head_dim: int, group: int) -> TileShape:
    """For runs of a token or a few: bound by memory, so few rows and deep pipelines; `group`: heads that share a KV head."""
    rows = max(16, triton.next_power_of_2(group))
    if rows > 64:  # of one token already: what a wide tile takes
        return wide_shape(head_dim, group)
    return TileShape(rows=rows, keys=64 if head_dim <= 128 else 32, warps=4, stages=3 if head_dim <= 128 else 2)


def wide_shape(head_dim: int, group: int) -> TileShape:
    """For prefill chunks and shared prefixes: bound by arithmetic, so as many rows as registers hold."""
    if triton.next_power_of_2(group) > 64:
        return TileShape(rows=triton.next_power_of_2(group), keys=64 if head_dim <= 64 else 32, warps=8, stages=2)
    if head_dim <= 64:
        return TileShape(rows=128, keys=64, warps=8, stages=3)
    if head_dim <= 128:
        return TileShape(rows=128, keys=64, warps=8, stages=2)
    return TileShape(rows=64, keys=32, warps=8, stages=2)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's store, and which of its pages belong to whom.

    Attributes:
        keys, values: [slots, kv_heads, head_dim], the last dimension contiguous.
        pages: int32, flat: page tables, one after another. Position p of a table that begins at t lies in the slot
            ``pages[t + p // page_size] * page_size + p % page_size``.
        page_size: Slots a page, a power of two.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q.k: times `scale`, soft-capped, and seen only inside a window (None: all positions)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@triton.jit
def _span(
    acc, peak, total, q, keys, values, pages, kv_head, begin, end, stop, limits, factor, softcap, window,
    stride_slot, stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Folds positions [begin, end) into the running softmax; without MASKED every row sees all of them."""
    offsets_n = tl.arange(0, BLOCK_N)
    offsets_d = tl.arange(0, BLOCK_D)
    inside_d = offsets_d < HEAD_DIM
    for first in range(begin, end, BLOCK_N):
        positions = first + offsets_n
        if MASKED:
            present = positions < stop
            page = tl.load(pages + positions // PAGE, mask=present, other=0)
        else:
            page = tl.load(pages + positions // PAGE)
        slots = page.to(tl.int64) * PAGE + positions % PAGE
        at = slots[:, None] * stride_slot + kv_head * stride_head + offsets_d[None, :]
        if MASKED:  # what lies beyond is another's, or was never written: a NaN there must not get in
            k = tl.load(keys + at, mask=present[:, None] & inside_d[None, :], other=0.0)
            v = tl.load(values + at, mask=present[:, None] & inside_d[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        else:
            k = tl.load(keys + at, mask=inside_d[None, :], other=0.0)
            v = tl.load(values + at, mask=inside_d[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(scores * (2.0 * factor / softcap)) - 1.0) * _LOG2_E
        else:
            scores = scores * (factor * _LOG2_E)
        if MASKED:
            seen = (positions[None, :] < limits[:, None]) & present[None, :]
            if WINDOW:
                seen &= positions[None, :] >= limits[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _attend_tiles(
    q, keys, values, out, parts, part_lse, rows, seen, pages, tiles,
    factor, softcap, window,
    stride_q_token, stride_q_head, stride_out_token, stride_slot, stride_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head)."""
    tile = tiles + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    first_row, row_count, table = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    start, stop, part = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)

    offsets_m = tl.arange(0, BLOCK_M)
    offsets_d = tl.arange(0, BLOCK_D)
    place, group = offsets_m // BLOCK_GROUP, offsets_m % BLOCK_GROUP
    inside_m = (place < row_count) & (group < GROUP)
    inside = inside_m[:, None] & (offsets_d < HEAD_DIM)[None, :]
    token = tl.load(rows + first_row + place, mask=inside_m, other=0)
    limits = tl.load(seen + token, mask=inside_m, other=0)
    head = kv_head * GROUP + group
    token64 = token.to(tl.int64)
    query = tl.load(
        q + token64[:, None] * stride_q_token + head[:, None] * stride_q_head + offsets_d[None, :], mask=inside, other=0.0
    )

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Whole blocks that every row of the tile sees need no mask; a window makes that rare.
    least = tl.min(tl.where(inside_m, limits, stop), 0)
    middle = start + tl.maximum(tl.minimum(least, stop) - start, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        middle = start
    else:
        acc, peak, total = _span(
            acc, peak, total, query, keys, values, pages + table, kv_head, start, middle, stop, limits, factor, softcap,
            window, stride_slot, stride_head, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, WINDOW, False,
        )  # fmt: skip
    acc, peak, total = _span(
        acc, peak, total, query, keys, values, pages + table, kv_head, middle, stop, stop, limits, factor, softcap,
        window, stride_slot, stride_head, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, WINDOW, True,
    )  # fmt: skip

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if part < 0:
        to = token64[:, None] * stride_out_token + head[:, None] * HEAD_DIM + offsets_d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)
    else:
        at = (part + place).to(tl.int64) * HEADS + head
        tl.store(parts + at[:, None] * HEAD_DIM + offsets_d[None, :], result, mask=inside)
        lse = (peak + tl.log2(tl.where(total > 0, total, 1.0))) * _LN_2  # minus infinity where nothing was seen
        tl.store(part_lse + at, lse, mask=inside_m)


def attend_tiles(
    q: Tensor,
    store: PagedKV,
    rows: Tensor,
    seen: Tensor,
    tiles: Tensor,
    scores: Scores,
    shape: TileShape,
    out: Tensor,
    parts: Tensor,
    part_lse: Tensor,
) -> None:
    """Works through a list of tiles.

    Args:
        q: [tokens, heads, head_dim], the last dimension contiguous.
        store: The layer's.
        rows: int32 [n]: tokens (rows of q) in the order in which tiles take them.
        seen: int32 [tokens]: so many leading positions each token may see: its own position and those before it.
        tiles: int32 [tiles, TILE_FIELDS]. A tile of no rows does nothing. A tile has at most
            ``shape.rows // next_power_of_2(heads per kv head)`` rows.
        scores: Scale, window, soft cap.
        shape: Of the tiles.
        out: [tokens, heads, head_dim], contiguous; written where a tile says -1.
        parts: float32 [n, heads, head_dim]: partial results.
        part_lse: float32 [n, heads]: their natural log-sum-exps; minus infinity where a row saw nothing.
    """
    heads, head_dim = q.shape[1:]
    group = heads // store.keys.shape[1]
    if tiles.shape[0] == 0:
        return
    _attend_tiles[(tiles.shape[0], store.keys.shape[1])](
        q, store.keys, store.values, out, parts, part_lse, rows, seen, store.pages, tiles,
        scores.scale, scores.softcap or 1.0, scores.window or 0,
        q.stride(0), q.stride(1), out.stride(0), store.keys.stride(0), store.keys.stride(1),
        HEADS=heads, GROUP=group, BLOCK_GROUP=triton.next_power_of_2(group),
        HEAD_DIM=head_dim, BLOCK_D=max(triton.next_power_of_2(head_dim), 16), BLOCK_M=shape.rows, BLOCK_N=shape.keys,
        PAGE=store.page_size, SOFTCAP=scores.softcap is not None, WINDOW=scores.window is not None,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
    )  # fmt: skip


def attend_reference(q: Tensor, store: PagedKV, table: int, seen: list[int], scores: Scores) -> Tensor:
    """What the rows of one sequence should get, in float64.

    Args:
        q: [rows, heads, head_dim], the sequence's rows only.
        store: The layer's.
        table: Where the sequence's page table begins.
        seen: For each row, the leading positions that it may see.
        scores: Scale, window, soft cap.

    Returns:
        float64, like q.
    """
    positions = torch.arange(max(seen), device=q.device)
    slots = store.pages[table + positions // store.page_size].long() * store.page_size + positions % store.page_size
    group = q.shape[1] // store.keys.shape[1]
    k = store.keys[slots].double().repeat_interleave(group, 1)
    v = store.values[slots].double().repeat_interleave(group, 1)
    weights = torch.einsum("mhd,nhd->mhn", q.double(), k) * scores.scale
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    limits = torch.tensor(seen, device=q.device)[:, None]
    hidden = positions >= limits
    if scores.window is not None:
        hidden |= positions < limits - scores.window
    return torch.einsum("mhn,nhd->mhd", weights.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)
