"""Cuts a step's runs into tiles: the work lists of `agentrt.kernels.paged_attention`, made on the host, without Triton.

A run becomes tiles of as many of its tokens as a tile holds; a prefix that several short runs share becomes tiles of all their
tokens, so that it is read once for all of them. Where that makes too few tiles to fill a device, spans of positions are split
(as in Flash-Decoding, 2023) in pieces of about equal size over all tiles, so that one long sequence does not make a step wait.

Map of what a token's output is made from:

    position   0 ............ shared ............ context .. itself
               | prefix tiles |        own tiles            |          each tile's span may be cut into pieces
               |<-- parts of the output, merged by log-sum-exp -->|    one piece alone writes the output itself

Invariant: for every token, the spans of its tiles are disjoint and cover all positions that it may see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: Integers of a tile; see `agentrt.kernels.paged_attention`.
TILE_FIELDS = 6
#: A piece of a span is at least so many positions: shorter ones cost more to merge than they gain.
LEAST_PIECE = 256
#: A shared prefix shorter than this is read by each run itself.
LEAST_SHARED = 128
#: Pieces end at multiples of this.
_ALIGNMENT = 64

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TileLimits:
    """What tiles hold, and how many keep the device busy.

    Attributes:
        narrow_tokens, wide_tokens: Tokens of a tile for short runs, and of one for long runs and prefixes.
        wanted: Tiles that fill the device; spans are split until there are about so many.
    """

    narrow_tokens: int
    wide_tokens: int
    wanted: int


@dataclass(frozen=True, slots=True)
class TileLists:
    """The lists, all int32.

    Attributes:
        rows: Tokens in the order in which tiles take them: every token once, then those of prefixes again.
        seen: [tokens]: so many leading positions each token may see.
        narrow, wide: [tiles, TILE_FIELDS].
        merge_tokens, merge_starts, merge_members: For `agentrt.kernels.merge_parts`.
        part_rows: Partial rows that are written.
    """

    rows: Ints
    seen: Ints
    narrow: Ints
    wide: Ints
    merge_tokens: Ints
    merge_starts: Ints
    merge_members: Ints
    part_rows: int


@dataclass(frozen=True, slots=True)
class _Span:
    """One tile before it is split: `count` entries of `rows` from `first` on see positions [start, stop) of a table."""

    first: int
    count: int
    table: int
    start: int
    stop: int


@dataclass(slots=True)
class _Spans:
    """What is being collected.

    Attributes:
        rows: As in `TileLists`.
        narrow, wide: Spans.
        partial: Tokens whose output comes from more than one span.
    """

    rows: list[int]
    narrow: list[_Span] = field(default_factory=list)
    wide: list[_Span] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)


def tile_lists(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    tables: Sequence[int],
    shared: Sequence[tuple[Sequence[int], int]],
    window: int | None,
    limits: TileLimits,
) -> TileLists:
    """Makes the lists of a step.

    Args:
        query_lengths: New tokens of each run, at least 1.
        context_lengths: Cached tokens before each run.
        tables: Where each run's page table begins.
        shared: (runs, leading tokens they have in common); every run in at most one.
        window: Of the layers that the lists are for. Prefixes are not shared inside a window.
        limits: Of tiles.
    """
    new, context = np.asarray(query_lengths, np.int64), np.asarray(context_lengths, np.int64)
    first_rows = np.concatenate(([0], new.cumsum()))
    tokens = int(first_rows[-1])
    seen = np.repeat(context - first_rows[:-1], new) + np.arange(1, tokens + 1)
    spans = _Spans(list(range(tokens)))
    own_starts = [0] * len(new)
    if window is None:
        _take_prefixes(spans, own_starts, new, context, first_rows, tables, shared, limits)
    for run, (count, before, row) in enumerate(zip(new.tolist(), context.tolist(), first_rows.tolist(), strict=False)):
        narrow = count <= limits.narrow_tokens
        size = limits.narrow_tokens if narrow else limits.wide_tokens
        kind = spans.narrow if narrow else spans.wide
        for offset in range(0, count, size):
            stop_offset = min(offset + size, count)
            start = own_starts[run] if window is None else max(0, before + offset - window + 1)
            kind.append(_Span(row + offset, stop_offset - offset, tables[run], start, before + stop_offset))
    return _split(spans, seen, limits)


def _take_prefixes(
    spans: _Spans,
    own_starts: list[int],
    new: NDArray[np.int64],
    context: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    tables: Sequence[int],
    shared: Sequence[tuple[Sequence[int], int]],
    limits: TileLimits,
) -> None:
    """Makes spans of shared prefixes, and says where what each run reads by itself begins.

    A run that fills tiles of its own gains nothing from sharing them, so only shorter ones do.
    """
    for members, length in shared:
        short = [run for run in members if new[run] < limits.wide_tokens]
        if len(short) < 2 or length < LEAST_SHARED:
            continue
        length = min(length, *(int(context[run]) for run in short))
        first = len(spans.rows)
        for run in short:
            own_starts[run] = length
            spans.rows.extend(range(int(first_rows[run]), int(first_rows[run + 1])))
        spans.partial.update(spans.rows[first:])
        for begin in range(first, len(spans.rows), limits.wide_tokens):
            count = min(limits.wide_tokens, len(spans.rows) - begin)
            spans.wide.append(_Span(begin, count, tables[short[0]], 0, length))


def _split(spans: _Spans, seen: NDArray[np.int64], limits: TileLimits) -> TileLists:
    """Cuts spans into pieces, and gives every piece of a token that has several its partial row."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    part_rows = 0
    tiles: list[list[tuple[int, ...]]] = []
    for kind in (spans.narrow, spans.wide):
        piece = _piece(kind, limits.wanted)
        tiles.append([])
        for span in kind:
            cuts = _cuts(span, piece)
            mine = spans.rows[span.first : span.first + span.count]
            whole = len(cuts) == 2 and not (spans.partial and mine[0] in spans.partial)
            for start, stop in pairwise(cuts):
                tiles[-1].append((span.first, span.count, span.table, start, stop, -1 if whole else part_rows))
                if not whole:
                    for place, token in enumerate(mine):
                        members[token].append(part_rows + place)
                    part_rows += span.count
    counts = [len(rows) for rows in members.values()]
    return TileLists(
        rows=np.array(spans.rows, np.int32),
        seen=seen.astype(np.int32),
        narrow=np.array(tiles[0], np.int32).reshape(-1, TILE_FIELDS),
        wide=np.array(tiles[1], np.int32).reshape(-1, TILE_FIELDS),
        merge_tokens=np.array(list(members), np.int32),
        merge_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        merge_members=np.array([row for rows in members.values() for row in rows], np.int32),
        part_rows=part_rows,
    )


def _piece(spans: list[_Span], wanted: int) -> int:
    """Positions of a piece, so that there are about as many pieces as wanted."""
    total = sum(span.stop - span.start for span in spans)
    return max(LEAST_PIECE, -(-total // wanted))


def _cuts(span: _Span, piece: int) -> list[int]:
    """Where the pieces of a span begin, and where the last one ends."""
    length = span.stop - span.start
    pieces = max(length // piece, 1)
    size = -(-length // pieces)
    size = -(-size // _ALIGNMENT) * _ALIGNMENT
    return [*range(span.start, span.stop, size), span.stop]
