"""`adaptive`: the eviction policy that learns from the requests how long prefixes wait for their next use.

It keeps a history of what was asked for, longer than the cache's own: a second radix tree, of page ids without KV, which
forgets the least recently asked for. From it come, for pages used once, twice, and so on, and near or far from the end of
their request, how many are asked for again and after how long a wait, counted in pages asked for in between. A leaf's worth
is the most uses that a page of room can be expected to bring if the leaf is kept for the best length of time from now on.
LRU is what comes out where a use is the less likely the longer it has not come; where most prefixes come back only after
the pool has been filled several times over, keeping some of them long brings more than keeping all of them briefly.

What it is not: a model of programs. It knows nothing of who will ask.

Invariant: the history sees every request and no eviction, so what is learned does not depend on what was kept.

The index is Gittins' (1979); LHD (Beckmann, Chen and Cidon, 2018) ranks by a similar density, learned from what the cache
itself saw, and also looks for the next to go in a sample.
"""

from __future__ import annotations

import math
import random
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrt.cache.radix_tree import Node, PrefixKey, RadixTree

HISTORY_POOLS = 64
"""How many times the pool's pages the history remembers; with 16, long waits were seen too rarely on the Mooncake traces."""

HISTORY_PAGES = 8_000_000
"""Most pages that it remembers all the same, at 8 bytes a page; but never fewer than twice the pool."""

SAMPLE = 32
"""Leaves among which the next to go is looked for; 8 do nearly as well, 200 no better."""

BEGUN = 0.2
"""A leaf of which n pages went already is worth (n + 1) ** -BEGUN of what the counts say: that it was the least before says something too."""

_USES = 3  # used once, twice, more
_TAILS = 8  # octaves of distance from the end of the request
_CLASSES = _USES * _TAILS
_BINS_PER_OCTAVE = 4
_OCTAVES = 12
_BINS = _OCTAVES * _BINS_PER_OCTAVE
_SPELLS = 1024
_MEMORY = 2  # when uses of so many times the longest wait are counted, all counts are halved, so that habits can change
_LATER = np.triu(np.ones((_BINS, _BINS), dtype=bool))

Counts = NDArray[np.float64]


class Waits:
    """How long pages wait for their next use, by class: the counts, and the worth that follows from them.

    A *spell* begins when a page is used and ends with its next use. Spells that still last count too, since long waits would
    be thought rarer than they are (Kaplan and Meier, 1958).

    Few spells are seen of some classes, so what is thought of a class at first is that its uses come at the same times as everybody's, only
    more often or more seldom (proportional hazards: Cox, 1972); its own counts take over as they grow.

    Args:
        pool: The cache's pages. Waits of up to `HISTORY_POOLS` times as many pages asked for are told from one another.

    Attributes:
        worth: Uses expected per page of room and page of time, by class and bin of the wait so far.
    """

    def __init__(self, pool: int) -> None:
        longest = HISTORY_POOLS * pool
        self._belief = pool / 3  # pages at risk for which the common shape counts; no figure depends on it much
        self._unit = longest / 2**_OCTAVES  # the first bin holds all shorter waits
        self._width = longest / (_SPELLS - 1)
        self._most = _MEMORY * longest
        self._ended: Counts = np.zeros((_CLASSES, _BINS))
        self._lasting: Counts = np.zeros((_CLASSES, _SPELLS))  # by when they began, a ring
        self._newest = 0
        edges: Counts = self._unit * 2 ** (np.arange(_BINS) / _BINS_PER_OCTAVE)
        self._widths: Counts = np.diff(np.concatenate(([0.0], edges)))
        self.worth: list[list[float]] = [[1.0] * _BINS for _ in range(_CLASSES)]

    def bin(self, wait: float) -> int:
        """The bin of a wait."""
        if wait <= self._unit:
            return 0
        return min(_BINS - 1, 1 + int(_BINS_PER_OCTAVE * math.log2(wait / self._unit)))

    def begin(self, kind: int, now: float, pages: int) -> None:
        """Counts spells of so many pages of a class that begin now."""
        slot = int(now / self._width)
        if slot > self._newest:
            gone = np.arange(self._newest + 1, min(slot, self._newest + _SPELLS) + 1) % _SPELLS
            self._lasting[:, gone] = 0
            self._newest = slot
        self._lasting[kind, slot % _SPELLS] += pages

    def end(self, kind: int, began: float, now: float, pages: int) -> None:
        """Counts their end by a use."""
        slot = int(began / self._width)
        if slot > self._newest - _SPELLS:
            self._lasting[kind, slot % _SPELLS] -= pages
        self._ended[kind, self.bin(now - began)] += pages

    def learn(self, now: float) -> None:
        """Works out the worth anew from the counts."""
        hazard = self._hazard(self._still_lasting(now))
        survives = np.concatenate((np.ones((_CLASSES, 1)), np.cumprod(1 - hazard, axis=1)), axis=1)
        room = np.concatenate((np.zeros((_CLASSES, 1)), np.cumsum(survives[:, :-1] * self._widths, axis=1)), axis=1)
        # Kept from bin a to the end of bin b: survives[a] - survives[b+1] uses, for room[b+1] - room[a]; the best b counts.
        uses = survives[:, :-1, None] - survives[:, None, 1:]
        rooms = room[:, None, 1:] - room[:, :-1, None]
        density = np.where(_LATER & (rooms > 0), uses / np.maximum(rooms, 1e-12), 0.0)
        self.worth = density.max(axis=2).tolist()
        if self._ended.sum() > self._most:
            self._ended /= 2

    def _still_lasting(self, now: float) -> Counts:
        """Spells that have not ended, by class and bin of their wait so far."""
        slots = self._newest - np.arange(min(_SPELLS, self._newest + 1))
        waits = np.maximum(now - (slots + 0.5) * self._width, self._unit)
        bins = np.where(waits > self._unit, 1 + (_BINS_PER_OCTAVE * np.log2(waits / self._unit)).astype(int), 0)
        lasting: Counts = np.zeros((_CLASSES, _BINS))
        np.add.at(lasting.T, np.minimum(bins, _BINS - 1), self._lasting[:, slots % _SPELLS].T)
        return lasting

    def _hazard(self, lasting: Counts) -> Counts:
        """Of the pages that waited at least until a bin, the share whose use came in it."""
        reached = np.maximum(np.cumsum((self._ended + lasting)[:, ::-1], axis=1)[:, ::-1] - lasting / 2, 0.0)
        everybody: Counts = self._ended.sum(axis=0) / np.maximum(reached.sum(axis=0), 1.0)
        factor: Counts = self._ended.sum(axis=1) / np.maximum(reached @ everybody, 1e-12)
        first_thought = np.outer(factor, everybody)
        hazard: Counts = np.clip((self._ended + self._belief * first_thought) / (reached + self._belief), 0.0, 1.0)
        return hazard


@dataclass(slots=True)
class _Leaf:
    """What is known of a leaf that may go.

    Attributes:
        index: Its place in the list of all.
        kind: The class of its last page; -1: the history has forgotten it.
        last: When that was last asked for.
        portion: How many of its pages, from the end, are of that class.
        share: What the counts' worth is multiplied by, as pages that followed have gone before.
    """

    index: int
    kind: int
    last: float
    portion: int
    share: float


class Adaptive:
    """Least worth first; see the module.

    Args:
        seed: Of the choice of leaves that are looked at: the same in every run.
    """

    def __init__(self, seed: int = 0) -> None:
        self._history = RadixTree(1)  # one id a page of the cache's
        self._history.on_leaf = self._append_leaf
        self._oldest: OrderedDict[Node, None] = OrderedDict()  # leaves of the history
        self._now = 0  # pages asked for so far
        self._random = random.Random(seed)
        self._leaves: list[Node] = []
        self._known: dict[Node, _Leaf] = {}
        self._popped: tuple[Node | None, int] = (None, 0)
        self.fit(1, 1)

    def fit(self, pages: int, page_size: int) -> None:
        """Sizes the history and the classes to the pool."""
        self._page_size = page_size
        self._remembered = max(2 * pages, min(HISTORY_POOLS * pages, HISTORY_PAGES))
        self._tail_unit = max(1, pages // 4096)
        self._waits = Waits(pages)
        self._at_once = max(1, pages // 1024)  # from one look: more would make much of one look at a few
        self._learns_every = max(64, pages // 4)
        self._learns_at = self._learns_every

    # -- what is asked for -------------------------------------------------------------------------------------------

    def asked(self, key: PrefixKey) -> None:
        """Hears of a request."""
        page_ids = self._page_ids(key.packed)
        pages = len(page_ids) // 4
        if not pages:
            return
        inserted = self._history.extend(None, key.namespace, page_ids, np.zeros(pages, dtype=np.int32))
        for node in inserted.node.path():
            if node.start < inserted.known:
                for kind, count in self._kinds(node):
                    self._waits.end(kind, node.last_access, self._now, count)
                node.hits += 1
            self._begin(node, pages)
        self._append_leaf(inserted.node)
        self._now += pages
        self._forget()
        if self._now >= self._learns_at:
            # Each time is a smaller part of what is known already, so the cost per request goes to nothing.
            self._learns_at = self._now + max(self._learns_every, self._now // 64)
            self._waits.learn(self._now)

    def released(self, node: Node) -> None:
        """Hears what a lease covered at its end: what it generated is waiting for a use from now on."""
        page_ids = self._page_ids(node.prefix())
        pages = len(page_ids) // 4
        inserted = self._history.extend(None, node.namespace, page_ids, np.zeros(pages, dtype=np.int32))
        if inserted.known < pages:
            self._begin(inserted.node, pages)
            self._append_leaf(inserted.node)
            self._forget()

    def _begin(self, node: Node, end: int) -> None:
        node.last_access = self._now
        node.credit = end
        for kind, count in self._kinds(node):
            self._waits.begin(kind, self._now, count)

    def _kinds(self, node: Node) -> Iterator[tuple[int, int]]:
        """The classes of the pages of a node of the history, last pages first, with how many there are of each."""
        stop = node.end
        while stop > node.start:
            kind, count = self._kind(node, stop)
            count = min(count, stop - node.start)
            yield kind, count
            stop -= count

    def _kind(self, node: Node, stop: int) -> tuple[int, int]:
        """The class of the page before `stop`, in a node of the history, and how many pages back from there share it."""
        distance = int(node.credit) - stop
        tail = (distance // self._tail_unit + 1).bit_length() - 1
        uses = min(node.hits, _USES - 1)
        if tail >= _TAILS - 1:
            return uses * _TAILS + _TAILS - 1, stop
        return uses * _TAILS + tail, (2 ** (tail + 1) - 1) * self._tail_unit - distance

    def _page_ids(self, packed: bytes) -> bytes:
        """One id a whole page: its only token's, or a checksum (two pages that share one blur the counts and no more)."""
        if self._page_size == 1:
            return packed
        step = 4 * self._page_size
        sums = (zlib.crc32(packed[at : at + step]) for at in range(0, len(packed) - step + 1, step))
        return array("I", sums).tobytes()

    def _append_leaf(self, node: Node) -> None:
        if not node.children:
            self._oldest[node] = None
            self._oldest.move_to_end(node)

    def _forget(self) -> None:
        while self._history.tokens > self._remembered and self._oldest:
            node, _ = self._oldest.popitem(last=False)
            if node.evictable:
                self._history.trim(node)

    # -- what may go -------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Ranks an evictable leaf."""
        page_ids = self._page_ids(node.prefix())
        match = self._history.find(node.namespace, page_ids)
        kind, last, portion, share = -1, 0.0, len(node.pages), 1.0
        if match.node is not None and match.length == len(page_ids) // 4 and match.length:
            kind, portion = self._kind(match.node, match.length)
            last, portion = match.node.last_access, max(1, min(portion, match.offset, self._at_once))
            share = float((int(match.node.credit) - match.length) // self._tail_unit + 1) ** -BEGUN
        index = self._known[node].index if node in self._known else len(self._leaves)
        if index == len(self._leaves):
            self._leaves.append(node)
        self._known[node] = _Leaf(index, kind, last, portion, share)

    def pop(self) -> Node | None:
        """The next to go: of the least worth among a sample, the least recently used of equals."""
        best: Node | None = None
        least = (math.inf, 0.0)
        looked = 0
        while self._leaves and looked < SAMPLE:
            node = self._leaves[int(self._random.random() * len(self._leaves))]
            if not node.evictable:
                self.discard(node)
                continue
            looked += 1
            leaf = self._known[node]
            rank = self._worth(leaf), leaf.last
            if best is None or rank < least:
                best, least = node, rank
        if best is not None:
            self._popped = (best, self._known[best].portion)
            self.discard(best)
        return best

    def _worth(self, leaf: _Leaf) -> float:
        """Uses to expect of a page of it, for the room and time; of what the history has forgotten, none."""
        if leaf.kind < 0:
            return -1.0
        return leaf.share * self._waits.worth[leaf.kind][self._waits.bin(self._now - leaf.last)]

    def portion(self, node: Node) -> int:
        """How many pages, off the end of the leaf that `pop` just gave, are of the same worth."""
        popped, pages = self._popped
        return pages if popped is node else len(node.pages)

    def discard(self, node: Node) -> None:
        """Forgets a node that has gone."""
        leaf = self._known.pop(node, None)
        if leaf is not None:
            last = self._leaves.pop()
            if last is not node:
                self._leaves[leaf.index] = last
                self._known[last].index = leaf.index
