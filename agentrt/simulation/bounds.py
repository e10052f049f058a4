"""What any cache could have found: with unlimited memory, and with the best eviction that knows the future (Belady's, on leaves).

Both take calls in one fixed order, one after the other, each reading its prompt and leaving prompt and answer behind. The whole
trace is put into one radix tree first, so that every call is a path of whole nodes and the work grows with the number of calls, not
of tokens. Belady's rule is from "A study of replacement algorithms" (1966); on leaves it is the best that eviction leaf by leaf can do
but for the sizes of nodes, and so a reference and not a proof.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from agentrt.cache.radix_tree import Node, PrefixKey, RadixTree
from agentrt.simulation.trace import Blocks, Call


@dataclass(frozen=True, slots=True)
class Bound:
    """What was found.

    Attributes:
        hit_tokens: Prompt tokens found.
        prompt_tokens: Prompt tokens in all.
        working_set: Tokens of the whole tree: what an unlimited cache holds in the end.
    """

    hit_tokens: int
    prompt_tokens: int
    working_set: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found."""
        return self.hit_tokens / max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class _Visit:
    """One call: the nodes of its path, from the root, and how many pages of them it may reuse."""

    path: list[Node]
    reusable: int


class Future:
    """A trace as paths in one tree of pages.

    Args:
        calls: In the order in which they come.
        page_size: Tokens a page.
        keep_output: Whether answers are kept too.
        whole_blocks: Count a prompt's last block even if it is not full, as block-hash caches do (Mooncake's published figures).
    """

    def __init__(self, calls: Iterable[Call], page_size: int, *, keep_output: bool = True, whole_blocks: bool = False) -> None:
        self._page_size = page_size
        self._whole_blocks = whole_blocks
        self._pages: dict[bytes, int] = {}
        self._tree = RadixTree(1)
        calls = list(calls)
        keys = [PrefixKey(self._page_ids(call, keep_output), call.salt) for call in calls]
        for key in keys:
            if len(key):
                self._tree.insert(key, np.zeros(len(key), dtype=np.int32))
        self._visits = [self._visit(call, key) for call, key in zip(calls, keys, strict=True)]
        self._prompt_tokens = sum(len(call.prompt) for call in calls)
        self._uses: dict[Node, list[int]] = {}  # the calls that use a node, latest first
        for number in range(len(self._visits) - 1, -1, -1):
            for node in self._visits[number].path:
                self._uses.setdefault(node, []).append(number)

    def _page_ids(self, call: Call, keep_output: bool) -> list[int]:
        """One id for each whole page of the call's text; equal ids stand for equal pages."""
        if isinstance(call.prompt, Blocks) and call.prompt.size == self._page_size:
            whole = len(call.prompt.blocks) if self._whole_blocks else len(call.prompt) // self._page_size
            return list(call.prompt.blocks[:whole])
        # The last token of an answer is sampled and never computed.
        ids = (*call.prompt, *call.output[: len(call.output) - 1]) if keep_output else tuple(call.prompt)
        if self._page_size == 1:
            return list(ids)
        packed, step = np.array(ids, dtype=np.int32).tobytes(), 4 * self._page_size
        return [self._pages.setdefault(packed[end - step : end], len(self._pages)) for end in range(step, len(packed) + 1, step)]

    def _visit(self, call: Call, key: PrefixKey) -> _Visit:
        node = self._tree.match(key).node
        reusable = len(call.prompt.blocks) if self._whole_blocks and isinstance(call.prompt, Blocks) else (len(call.prompt) - 1) // self._page_size
        return _Visit([] if node is None or not len(key) else node.path(), reusable)

    @property
    def working_set(self) -> int:
        """Tokens of all different pages."""
        return self._tree.tokens * self._page_size

    def unlimited(self) -> Bound:
        """With memory for everything."""
        return self.belady(self.working_set)

    def belady(self, capacity: int) -> Bound:
        """With memory for `capacity` tokens, always evicting the leaf whose next use is farthest away."""
        hits = _Belady(capacity // self._page_size, {node: list(uses) for node, uses in self._uses.items()}).run(self._visits)
        whole = hits * self._page_size
        return Bound(whole, self._prompt_tokens, self.working_set)


class _Belady:
    """The cache of one run: how many pages of each node it has, from the node's beginning."""

    def __init__(self, capacity: int, uses: dict[Node, list[int]]) -> None:
        self._free = capacity
        self._uses = uses
        self._has: dict[Node, int] = {}
        self._below: dict[Node, int] = {}  # children of which something is there
        self._farthest: list[tuple[int, int, Node]] = []

    def run(self, visits: list[_Visit]) -> int:
        """Takes the calls in order; returns pages found."""
        return sum(self._take(number, visit) for number, visit in enumerate(visits))

    def _take(self, number: int, visit: _Visit) -> int:
        found = 0
        for node in visit.path:
            self._uses[node].pop()  # this use is now
            found += self._has.get(node, 0) if found == node.start else 0
        in_use = set(visit.path)
        for node in visit.path:
            missing = node.tokens - self._has.get(node, 0)
            if missing:
                self._make_room(missing, in_use)
                if self._free < missing:
                    break  # it is larger than the whole cache
                self._grow(node, missing)
        if visit.path:
            self._offer(visit.path[-1])
            for node in visit.path:
                self._offer(node)
        return min(found, visit.reusable)

    def _grow(self, node: Node, pages: int) -> None:
        if node not in self._has and node.parent is not None:
            self._below[node.parent] = self._below.get(node.parent, 0) + 1
        self._has[node] = self._has.get(node, 0) + pages
        self._free -= pages

    def _next_use(self, node: Node) -> int:
        uses = self._uses[node]
        return uses[-1] if uses else 1 << 60

    def _offer(self, node: Node) -> None:
        """Makes a node a candidate for eviction, if it is a leaf of what is there."""
        if node in self._has and not self._below.get(node):
            heapq.heappush(self._farthest, (-self._next_use(node), node.uid, node))

    def _make_room(self, pages: int, in_use: set[Node]) -> None:
        while self._free < pages and self._farthest:
            use, _, node = heapq.heappop(self._farthest)
            if node in in_use or node not in self._has or self._below.get(node) or -use != self._next_use(node):
                continue
            taken = min(self._has[node], pages - self._free)
            self._free += taken
            self._has[node] -= taken
            if self._has[node]:
                self._offer(node)
                continue
            del self._has[node]
            if node.parent is not None and node.parent.ids:
                self._below[node.parent] -= 1
                self._offer(node.parent)
