"""Which cached prefixes go first when memory is needed: a small protocol, and one class for each policy.

The prefix cache tells a policy of every leaf that may be evicted (`add`) and asks it for the next to go (`pop`). Eviction
is leaf by leaf: when a leaf has gone its parent may become one, and is added in turn. A policy never walks the tree and never
sees a locked node: what it is told of may have been locked since, and `pop` passes over that.

Invariant: every evictable leaf of the tree is a candidate; evicting n leaves costs O(n log n).
"""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

from agentrt.cache.adaptive import Adaptive
from agentrt.cache.radix_tree import Node, PrefixKey
from agentrt.errors import UserError

Rank = tuple[float, ...]


class EvictionPolicy(Protocol):
    """An order of evictable leaves."""

    def fit(self, pages: int, page_size: int) -> None:
        """Hears the pool's size, once, before all else."""
        ...

    def add(self, node: Node) -> None:
        """Takes `node`, an evictable leaf, as a candidate, or ranks it anew if it is one."""
        ...

    def pop(self) -> Node | None:
        """Gives up the candidate that should go next; None if there is none that is still evictable."""
        ...

    def discard(self, node: Node) -> None:
        """Forgets `node`, which is no longer in the tree."""
        ...

    def portion(self, node: Node) -> int:
        """How many pages to take at most off the end of the leaf that `pop` just gave, before it is added again."""
        ...

    def asked(self, key: PrefixKey) -> None:
        """Hears what a request asks for, before it is looked up."""
        ...

    def released(self, node: Node) -> None:
        """Hears that a lease is about to end at `node`."""
        ...


class Candidates:
    """Nodes by rank, lowest first: a heap in which a node that is ranked anew leaves its old entry behind, to be skipped.

    Attributes:
        tokens: Tokens of the nodes in it, as they were when added.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._heap: list[tuple[Rank, int, Node, int]] = []
        self._entries: dict[Node, tuple[Rank, int, Node, int]] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node, rank: Rank) -> None:
        """Adds `node`, or changes its rank. Among equal ranks, who was added first goes first."""
        self.discard(node)
        entry = (rank, next(self._serial), node, node.tokens)
        self._entries[node] = entry
        self.tokens += entry[3]
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Removes and returns the evictable node of the lowest rank; forgets those before it that are not evictable now."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if self._entries.get(node) is entry:
                self.discard(node)
                if node.evictable:
                    return node
        return None

    def discard(self, node: Node) -> None:
        """Removes `node` if it is there."""
        entry = self._entries.pop(node, None)
        if entry is not None:
            self.tokens -= entry[3]


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._candidates = Candidates()

    def fit(self, pages: int, page_size: int) -> None:
        """Any size is the same to it."""

    def add(self, node: Node) -> None:
        """Ranks an evictable leaf."""
        self._candidates.add(node, (node.last_access,))

    def pop(self) -> Node | None:
        """The next to go."""
        return self._candidates.pop()

    def discard(self, node: Node) -> None:
        """Forgets a node that has gone."""
        self._candidates.discard(node)

    def portion(self, node: Node) -> int:
        """All of it."""
        return len(node.pages)

    def asked(self, key: PrefixKey) -> None:
        """Learns nothing: a node's `hits` and `last_access` say enough."""

    def released(self, node: Node) -> None:
        """Learns nothing."""


class LFU(LRU):
    """Least often found first; among equals, the least recently used."""

    def add(self, node: Node) -> None:
        """Ranks an evictable leaf."""
        self._candidates.add(node, (node.hits, node.last_access))


class SLRU:
    """Segmented LRU (Karedla, Love and Wherry, 1994): what was never found again goes before what was.

    Leaves that were found are *protected*. When protected leaves hold more than their share of the pool, the least recently
    used of them go back to probation, at its young end, so that what was popular once does not stay for ever.

    Args:
        protected_share: Largest share of it that protected leaves may hold.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        self._share = protected_share
        self._limit = 0
        self._probation = Candidates()
        self._protected = Candidates()
        self._youngest = 0.0

    def fit(self, pages: int, page_size: int) -> None:
        """Works out how many tokens may be protected."""
        self._limit = int(pages * self._share) * page_size

    def add(self, node: Node) -> None:
        """Ranks an evictable leaf."""
        self.discard(node)
        self._youngest = max(self._youngest, node.last_access)
        segment = self._protected if node.hits else self._probation
        segment.add(node, (node.last_access,))
        while self._protected.tokens > self._limit:
            oldest = self._protected.pop()
            if oldest is not None:
                self._probation.add(oldest, (self._youngest,))

    def pop(self) -> Node | None:
        """The next to go."""
        return self._probation.pop() or self._protected.pop()

    def discard(self, node: Node) -> None:
        """Forgets a node that has gone."""
        self._probation.discard(node)
        self._protected.discard(node)

    def portion(self, node: Node) -> int:
        """All of it."""
        return len(node.pages)

    def asked(self, key: PrefixKey) -> None:
        """Learns nothing: a node's `hits` and `last_access` say enough."""

    def released(self, node: Node) -> None:
        """Learns nothing."""


class ProgramAware:
    """What only a finished program could use goes first; the rest in another policy's order.

    With this policy the prefix cache also keeps holds: what a waiting program holds is not a candidate until the hold yields.

    Args:
        base: Orders what living programs, or anyone, may use.
    """

    def __init__(self, base: EvictionPolicy) -> None:
        self._base = base
        self._abandoned = Candidates()

    def fit(self, pages: int, page_size: int) -> None:
        """Passes it on."""
        self._base.fit(pages, page_size)

    def add(self, node: Node) -> None:
        """Ranks an evictable leaf."""
        if node.owner is not None and node.owner.finished:
            self._base.discard(node)
            self._abandoned.add(node, (node.last_access,))
        else:
            self._abandoned.discard(node)
            self._base.add(node)

    def pop(self) -> Node | None:
        """The next to go."""
        return self._abandoned.pop() or self._base.pop()

    def discard(self, node: Node) -> None:
        """Forgets a node that has gone."""
        self._abandoned.discard(node)
        self._base.discard(node)

    def portion(self, node: Node) -> int:
        """As the base says; all of what nobody will use."""
        return len(node.pages) if node.owner is not None and node.owner.finished else self._base.portion(node)

    def asked(self, key: PrefixKey) -> None:
        """Passes it on."""
        self._base.asked(key)

    def released(self, node: Node) -> None:
        """Passes it on."""
        self._base.released(node)


POLICIES = ("lru", "lfu", "slru", "adaptive", "program")


def eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name.

    Args:
        name: One of `POLICIES`.

    Raises:
        UserError: There is no such policy.
    """
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    if name == "slru":
        return SLRU()
    if name == "adaptive":
        return Adaptive()
    if name == "program":
        return ProgramAware(LRU())
    raise UserError(f"eviction is {name!r}; it must be one of {', '.join(POLICIES)}", param="eviction")
