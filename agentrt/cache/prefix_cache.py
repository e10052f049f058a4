"""The prefix cache: the radix tree, the page pool and the eviction policy as one, with leases.

A sequence *acquires* the longest cached prefix of its ids (a lease: a locked path), *allocates* pages for the rest, and
*publishes* what it has computed, which hands those pages to the tree and locks them for it; at the end it *releases* the lease
and *frees* the pages that it never published. The cache does not know what a sequence is, and computes nothing.

Invariant (the slot equation, from this side): ``pool.free_count + pages in the tree + pages private to sequences ==
pool.total``. A page that a lease covers is never evicted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentrt.cache.eviction import EvictionPolicy, ProgramAware
from agentrt.cache.page_pool import PagePool, Pages
from agentrt.cache.programs import Programs
from agentrt.cache.radix_tree import Ids, Match, Node, PageArray, Place, PrefixKey, RadixTree, pack_ids, unpack_ids

SHOWN_IDS = 32
"""Token ids that an inspector is shown of a branch, enough to tell what it is."""


class PrefixLease:
    """A locked path in the tree: acquired once, released once. Only `PrefixCache` changes it.

    Attributes:
        namespace: As acquired.
        program: The program that it is for, or None.
        cached_tokens: Tokens that were found in the tree, whole pages.
        found_pages: Their pages, in order: int32 [cached_tokens / page_size].
        locked_tokens: Tokens from the start that it locks now: `cached_tokens`, then more with each publish.
        released: Whether it was released.
    """

    __slots__ = ("_leaf", "_node", "cached_tokens", "found_pages", "locked_tokens", "namespace", "program", "released")

    def __init__(self, namespace: str, program: str | None, node: Node | None, pages: PageArray, tokens: int) -> None:
        self.namespace = namespace
        self.program = program
        self.cached_tokens = tokens
        self.locked_tokens = tokens
        self.found_pages = pages
        self.released = False
        self._node = node  # at whose end the lock is; None: nothing is locked
        self._leaf: Node | None = None  # the leaf that this lease made, which it may go on growing

    @property
    def pages(self) -> list[int]:
        """Pages of what was found, as a list."""
        pages: list[int] = self.found_pages.tolist()
        return pages


@dataclass(frozen=True, slots=True)
class Publication:
    """What came of publishing.

    Attributes:
        published_tokens: Tokens of the sequence, from its start, that are in the tree and locked by its lease now.
        moved_from: Index of the first page of the sequence whose KV is now read from another page.
        moved_pages: The pages to use from that index on, in order; the ones there before were freed. Empty: none moved.
    """

    published_tokens: int
    moved_from: int = 0
    moved_pages: tuple[int, ...] = ()

    @property
    def moved(self) -> dict[int, int]:
        """New page by index in the sequence."""
        return dict(enumerate(self.moved_pages, self.moved_from))


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A prefix came or went.

    Attributes:
        kind: "stored" or "removed".
        namespace: Whose.
        start: Tokens before those that came or went.
        ids: The whole prefix, from the root to the last of them.
    """

    kind: Literal["stored", "removed"]
    namespace: str
    start: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HotPath:
    """One branch from a root, for an inspector.

    Attributes:
        namespace: Whose.
        first_ids: The first token ids of the branch, at most `SHOWN_IDS`.
        start: Tokens before it.
        tokens: Tokens of the branch and all below it.
        nodes: Nodes of it.
        hits: Tokens that leases were given from it.
        locked_tokens: Tokens of it in use now.
        last_access: When its youngest part was used, on the cache's clock.
        parent: Place, in the list that this came in, of the nearest branch above it; None if none of those is.
    """

    namespace: str
    first_ids: tuple[int, ...]
    start: int
    tokens: int
    nodes: int
    hits: int
    locked_tokens: int
    last_access: float
    parent: int | None = None


class PrefixCache:
    """What the scheduler asks for prefixes and pages.

    Args:
        pool: The pages.
        policy: Which cached prefixes go first.
        enabled: False: nothing is ever found or kept, and all pages stay private.
        hold_share: Largest share of the pool that holds may keep; only a `ProgramAware` policy keeps holds.
        clock: Seconds; a simulation gives its own.

    Attributes:
        on_change: Called with each place of the tree at which the match of a waiting request may have changed: look such
            requests up by `Match.places`.
        on_event: Called with each prefix that is stored or removed; None: no events are made.
        evicted_tokens_total: Tokens evicted so far, flushes not counted.
        queried_tokens_total: Tokens asked for by `acquire`.
        hit_tokens_total: Those of them that were found.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: EvictionPolicy,
        *,
        enabled: bool = True,
        hold_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.tree = RadixTree(pool.page_size)
        self.enabled = enabled
        self.on_event: Callable[[CacheEvent], None] | None = None
        self.evicted_tokens_total = 0
        self.queried_tokens_total = 0
        self.hit_tokens_total = 0
        self._policy = policy
        self._clock = clock
        policy.fit(pool.total, pool.page_size)
        self.tree.on_leaf = policy.add
        hold_tokens = int(hold_share * pool.total) * pool.page_size
        self._programs = Programs(self.tree, hold_tokens if isinstance(policy, ProgramAware) else 0, clock)

    # -- counters ----------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.pool.page_size

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree."""
        return self.tree.tokens

    @property
    def locked_tokens(self) -> int:
        """Tokens in the tree that leases cover."""
        return self.tree.locked_tokens

    @property
    def held_tokens(self) -> int:
        """Tokens in the tree that holds cover."""
        return self.tree.held_tokens

    @property
    def nodes(self) -> int:
        """Nodes of the tree."""
        return self.tree.nodes

    @property
    def version(self) -> int:
        """Changes whenever a match could give another answer."""
        return self.tree.version

    @property
    def on_change(self) -> Callable[[Place], None]:
        """The listener for changed places; see the class."""
        return self.tree.on_change

    @on_change.setter
    def on_change(self, listener: Callable[[Place], None]) -> None:
        self.tree.on_change = listener

    @property
    def available_pages(self) -> int:
        """Pages that `allocate` could give now: free ones, and cached ones that no lease covers."""
        return self.pool.free_count + (self.tree.tokens - self.tree.locked_tokens) // self.page_size

    # -- looking -----------------------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, limit: int | None = None) -> Match:
        """The longest cached prefix and where in the tree it ends; locks and changes nothing, not even a last access."""
        return self.tree.match(key, limit if self.enabled else 0)

    def match_length(self, ids: Ids, namespace: str = "") -> int:
        """Tokens of the longest cached prefix, whole pages; locks and changes nothing."""
        return self.match(PrefixKey(ids, namespace)).length

    # -- a sequence's life -------------------------------------------------------------------------------------------

    def acquire(
        self,
        ids: Ids | PrefixKey,
        namespace: str = "",
        limit: int | None = None,
        *,
        program: str | None = None,
        match: Match | None = None,
    ) -> PrefixLease:
        """Finds and locks the longest cached prefix of `ids`.

        Args:
            ids: The sequence's token ids, or a key made of them (whose namespace then counts).
            namespace: Who may share.
            limit: Most tokens to take, so that at least one is left to compute; None: all.
            program: The program that asks.
            match: What `match` just gave for the same ids and limit, if the tree has not changed since; it saves a look.

        Returns:
            A lease, of no tokens if nothing was found; it must be released once.
        """
        key = ids if isinstance(ids, PrefixKey) else PrefixKey(ids, namespace)
        if self.enabled:
            self._policy.asked(key)
        if match is None:
            match = self.match(key, limit)
        self.queried_tokens_total += len(key)
        self.hit_tokens_total += match.length
        if not match.length:
            return PrefixLease(key.namespace, program, None, self.tree.pages(match), 0)
        pages = self.tree.pages(match)
        node = self.tree.lock(match)
        now = self._clock()
        path = node.path()
        self.tree.shorten(path)
        for visited in path:
            visited.hits += 1
            visited.last_access = now
        self._programs.use(program, node)
        return PrefixLease(key.namespace, program, node, pages, match.length)

    def allocate(self, count: int, after: int | None = None, *, expect: int = 0) -> list[int] | None:
        """Hands out `count` pages, evicting what is needed; the arguments are `PagePool.allocate`'s.

        Returns:
            The pages, private to the caller until it publishes or frees them; None if free and evictable pages together
            are fewer (nothing is evicted then).
        """
        missing = count - self.pool.free_count
        if missing > 0:
            if count > self.available_pages:
                return None
            # A little more than is missing: runs of pages come free together, and growing sequences do not interleave.
            self._evict(max(missing, min(self.pool.reserve, self.pool.total // 64)))
        return self.pool.allocate(count, after, expect=expect)

    def publish(
        self, lease: PrefixLease, ids: Ids, pages: Sequence[int], *, limit: int | None = None, program: str | None = None
    ) -> Publication:
        """Hands computed KV to the tree, so that others find it, and locks it for the lease.

        Args:
            lease: The sequence's.
            ids: All ids, from the sequence's start; nothing before those that the lease locks already is looked at.
            pages: All the sequence's pages so far, cached ones included; at least one for each whole page of computed ids.
            limit: How many of the ids have their KV computed; None: all. What lies beyond the last whole page stays private.
            program: The program that uses them; None: the lease's.

        Returns:
            Where the tree had the same ids in other pages already, which pages to use from now on: the sequence's own
            copies were freed.

        Raises:
            RuntimeError: The lease was released.
        """
        if lease.released:
            raise RuntimeError("a lease was published to after its release")
        computed = len(ids) if limit is None else min(limit, len(ids))
        whole = computed // self.page_size * self.page_size
        start = lease.locked_tokens
        if not self.enabled or whole <= start:
            return Publication(start)
        # ids:    0 ......... start .............. known ............. whole ..... computed
        #         | locked by  | in the tree, with   | new             | no whole
        #         | this lease | other pages         |                 | page
        # pages:  | the tree's | duplicates: freed,  | become the      | stay
        #         |            | the tree's are used | tree's          | private
        first = start // self.page_size
        last = whole // self.page_size
        before = lease._node
        own = before is not None and before is lease._leaf and before.locks == 1
        inserted = self.tree.extend(before, lease.namespace, pack_ids(ids[start:whole]), pages[first:last], grow=own)
        self._move_lock(lease, inserted.node)
        known = inserted.known // self.page_size
        if known > first:
            self.pool.free(pages[first:known])
        if inserted.known < whole:
            lease._leaf = inserted.node
            self._stored(inserted.node, inserted.known)
        lease.locked_tokens = whole
        self._programs.use(program or lease.program, inserted.node, before)
        return Publication(whole, first, tuple(inserted.known_pages.tolist()))

    def release(self, lease: PrefixLease) -> None:
        """Unlocks what the lease covers; it stays cached until it is evicted.

        Raises:
            RuntimeError: The lease was released before.
        """
        if lease.released:
            raise RuntimeError("a lease was released twice")
        lease.released = True
        if lease._node is not None:
            self.pool.settle(int(lease._node.pages[-1]))
            self._policy.released(lease._node)
            self.tree.unlock(lease._node, self._clock())
            lease._node = lease._leaf = None

    def free(self, pages: Pages) -> None:
        """Gives private pages back to the pool.

        Raises:
            RuntimeError: A page is free already, or not the pool's.
        """
        self.pool.free(pages)

    def _move_lock(self, lease: PrefixLease, node: Node) -> None:
        before = lease._node
        if node is before:
            return
        now = self._clock()
        self.tree.lock_node(node)
        below: Node | None = node
        while below is not None and below is not before and below.ids:
            below.last_access = now
            below = below.parent
        lease._node = node
        if before is not None:
            self.tree.unlock(before)

    # -- making room -------------------------------------------------------------------------------------------------

    def evict(self, pages: int) -> int:
        """Evicts up to `pages` cached pages that no lease covers; returns how many it freed."""
        return self._evict(pages)

    def flush(self, namespace: str | None = None) -> tuple[int, int]:
        """Frees all that no lease covers, of one namespace or of all; holds do not keep it.

        Returns:
            Tokens freed, and tokens kept because they are in use.
        """
        while self._programs.yield_oldest():
            pass
        nodes = list(self.tree.walk(namespace))
        freed = [self._remove(node, None) for node in reversed(nodes) if node.evictable]
        pages: PageArray = np.concatenate(freed) if freed else np.empty(0, dtype=np.int32)
        self.pool.free(pages)
        return len(pages) * self.page_size, sum(node.tokens for node in nodes if node.parent is not None)

    def _evict(self, count: int) -> int:
        self._programs.expire()
        freed: list[PageArray] = []
        missing = count
        while missing > 0:
            node = self._policy.pop()
            if node is None:
                if not self._programs.yield_oldest():
                    break
                continue
            pages = self._remove(node, min(missing, self._policy.portion(node)))
            freed.append(pages)
            missing -= len(pages)
            if node.parent is not None:
                self._policy.add(node)
        if freed:
            self.pool.free(np.concatenate(freed))
        self.evicted_tokens_total += (count - missing) * self.page_size
        return count - missing

    def _remove(self, leaf: Node, count: int | None) -> PageArray:
        """Takes up to `count` pages (None: all) off an evictable leaf, and tells who has to know."""
        parent = leaf.parent
        prefix = leaf.prefix() if self.on_event is not None else b""
        pages = self.tree.trim(leaf, count)
        if self.on_event is not None:
            start = len(prefix) // 4 - len(pages) * self.page_size
            self.on_event(CacheEvent("removed", leaf.namespace, start, unpack_ids(prefix)))
        if leaf.parent is None:
            self._policy.discard(leaf)
            self._programs.forget(leaf, parent)
        return pages

    def _stored(self, node: Node, start: int) -> None:
        if self.on_event is not None:
            self.on_event(CacheEvent("stored", node.namespace, start, unpack_ids(node.prefix())))

    # -- programs ----------------------------------------------------------------------------------------------------

    def hold(self, program: str, seconds: float) -> None:
        """Asks to keep what the program uses while it waits: for `seconds` at most, and only with a `ProgramAware` policy."""
        self._programs.hold(program, seconds)

    def end_program(self, program: str) -> None:
        """Says that the program makes no more calls: its hold ends, and what only it could use goes first."""
        self._programs.end(program)

    @property
    def holding(self) -> tuple[str, ...]:
        """Programs whose hold is on, oldest first."""
        return self._programs.holding

    # -- for inspectors and tests ------------------------------------------------------------------------------------

    def hot_paths(self, limit: int = 20) -> list[HotPath]:
        """The branches with the most tokens served and kept, at every depth where the tree parts; one pass over the nodes."""
        nodes = list(self.tree.walk())
        below = {node: _Subtree(node) for node in nodes}
        for node in reversed(nodes):  # children before parents
            above = below.get(node.parent) if node.parent is not None else None
            if above is not None:
                above.add(below[node])
        hottest = heapq.nlargest(limit, nodes, key=lambda node: (below[node].hits, below[node].tokens))
        places = {node: place for place, node in enumerate(hottest)}
        return [below[node].hot_path(node, _place_above(node, places)) for node in hottest]

    def check(self, private_pages: int) -> None:
        """Verifies the tree, the pool and the slot equation, at a cost that grows with both.

        Args:
            private_pages: Pages that sequences own and have not published.

        Raises:
            RuntimeError: Something does not hold; the message has the numbers.
        """
        self.tree.check()
        self.pool.check()
        parts = [node.pages for node in self.tree.walk()]
        cached: PageArray = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        if len(np.unique(cached)) != len(cached):
            raise RuntimeError("a page is in the tree twice")
        self.check_counts(private_pages)

    def check_counts(self, private_pages: int) -> None:
        """Verifies the slot equation alone, at no cost that grows.

        Raises:
            RuntimeError: Pages were lost, or are owned twice.
        """
        free, total = self.pool.free_count, self.pool.total
        cached = self.tree.tokens // self.page_size
        if free + cached + private_pages != total:
            raise RuntimeError(f"{free} free + {cached} cached + {private_pages} private pages are not {total} in all")


class _Subtree:
    """Sums over a node and all below it, while `hot_paths` makes its pass."""

    __slots__ = ("hits", "last_access", "locked", "nodes", "tokens")

    def __init__(self, node: Node) -> None:
        self.tokens = node.tokens
        self.nodes = 1
        self.hits = node.hits * node.tokens
        self.locked = node.tokens if node.locks else 0
        self.last_access = node.last_access

    def add(self, other: _Subtree) -> None:
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.hits += other.hits
        self.locked += other.locked
        self.last_access = max(self.last_access, other.last_access)

    def hot_path(self, node: Node, parent: int | None) -> HotPath:
        first = unpack_ids(node.ids[: 4 * SHOWN_IDS])
        return HotPath(
            node.namespace, first, node.start, self.tokens, self.nodes, self.hits, self.locked, self.last_access, parent
        )


def _place_above(node: Node, places: Mapping[Node, int]) -> int | None:
    above = node.parent
    while above is not None and above not in places:
        above = above.parent
    return None if above is None else places[above]
