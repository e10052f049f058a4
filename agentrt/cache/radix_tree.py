"""The radix tree: every prefix whose KV exists, as a compressed tree of token ids.

A node holds a run of whole pages: their token ids and the pages where their KV lies. Children part at a page boundary,
so two prefixes that differ inside a page share only the pages before it. Each namespace (a tenant's salt, an adapter)
has a root of its own, and a root without children vanishes. The tree moves no KV and owns no pool: who removes a leaf
gets its pages and must free them.

Invariants: ``match`` changes nothing. A node's ids and pages change only by being split (the node keeps its end, a new
node takes its beginning), by growing or being trimmed at the end while it is a leaf, and by removal. ``node.locks`` counts
the leases that end at the node plus its children that are locked, so a locked node's whole path is locked, and locking
costs only the part of the path that was not. ``node.holds`` counts soft holds in the same way.

The algorithm is RadixAttention's (Zheng et al., SGLang, 2024), with ids kept as bytes so that a whole run is compared at once.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import UserError

Ids = Sequence[int] | NDArray[np.integer]
PageArray = NDArray[np.int32]
Place = tuple[int, bytes]
"""Where a match could become longer or shorter: (node.uid, ids of the next page), or (node.uid, b"") for the node itself."""
Tier = Literal["device"]

_ID_BYTES = 4

HOP = 32
"""Nodes that a shortcut passes over."""

_SHORT = 256  # bytes of a run that are compared as a copy
_LONGEST_HOP = 16_384  # bytes: where runs are so long, comparing them is what takes the time


class Owner(Protocol):
    """Who alone can use a node, as far as an eviction policy needs to know."""

    @property
    def finished(self) -> bool:
        """Whether it will never use it again."""
        ...


def pack_ids(ids: Ids) -> bytes:
    """Token ids as native 32-bit integers, the form in which the tree keeps and compares them."""
    if isinstance(ids, np.ndarray):
        return ids.astype(np.int32, copy=False).tobytes()
    return (ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    return tuple(array("i", packed))


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What the tree is searched for: token ids, in the namespace of those who may share their KV.

    Attributes:
        ids: Token ids.
        namespace: The tenant's salt, the adapter's id; equal ids in two namespaces have nothing in common.
        packed: The ids as bytes, made once.
    """

    ids: Ids
    namespace: str = ""
    packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack_ids(self.ids))

    def __len__(self) -> int:
        return len(self.ids)


class Node:
    """A run of whole pages below its parent's. Only `RadixTree` changes its shape, its locks and its holds.

    Attributes:
        uid: Unique in the process.
        namespace: Its root's.
        start: Tokens before it.
        ids: Its token ids, packed; empty only for a root.
        pages: int32 [pages]: where its KV lies.
        parent: None for a root and for a node that was removed.
        children: By the packed ids of their first page.
        locks: Leases that end here, plus locked children.
        holds: Soft holds that end here, plus held children.
        last_access: When a lease last began or ceased to use it, on the cache's clock.
        hits: How often a lease found it.
        tier: Where its KV lies.
        owner: The only program that uses it, or a mark for anyone; kept by the prefix cache.
        credit: What the eviction policy remembers of it.
        cuts: Times that tokens were taken off its end.
        shortcut: The packed ids that lead from its end to the end of a node far below, that node, and its `cuts`; see `RadixTree.shorten`.
    """

    __slots__ = (
        "children", "credit", "cuts", "hits", "holds", "ids", "last_access", "locks", "namespace", "owner", "pages", "parent",
        "shortcut", "start", "tier", "uid",
    )  # fmt: skip

    _uids = itertools.count(1)

    def __init__(self, namespace: str, parent: Node | None, start: int, ids: bytes, pages: PageArray) -> None:
        self.uid = next(Node._uids)
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.ids = ids
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.holds = 0
        self.last_access = 0.0
        self.hits = 0
        self.tier: Tier = "device"
        self.owner: Owner | None = None
        self.credit: float = 0.0
        self.cuts = 0
        self.shortcut: tuple[bytes, Node, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that it holds."""
        return len(self.ids) // _ID_BYTES

    @property
    def end(self) -> int:
        """Tokens from the root to its end."""
        return self.start + len(self.ids) // _ID_BYTES

    @property
    def evictable(self) -> bool:
        """A leaf of the tree that nobody locks or holds."""
        return self.parent is not None and not (self.locks or self.holds or self.children)

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.ids:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def prefix(self) -> bytes:
        """The packed ids from the root to its end."""
        return b"".join(node.ids for node in self.path())

    def __repr__(self) -> str:
        return f"Node({self.uid}, tokens {self.start}-{self.end}, {len(self.children)} children, {self.locks} locks)"


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a key.

    Attributes:
        node: The node in which it ends; None if the namespace has no root.
        offset: Tokens of that node that match; fewer than it has: the match ends inside.
        length: Tokens that match in all, whole pages.
        next_page: Packed ids of the key's next page, b"" if it has no whole one.
    """

    node: Node | None
    offset: int
    length: int
    next_page: bytes = b""

    @property
    def inside(self) -> bool:
        """Whether it ends inside a node, which a lock would split there."""
        return self.node is not None and self.offset < self.node.tokens

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the tree whose change can change this match; see `RadixTree.on_change`."""
        if self.node is None:
            return ((0, b""),)
        return ((self.node.uid, self.next_page), (self.node.uid, b""))


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` did.

    Attributes:
        node: The node at whose end the inserted ids end.
        known: Tokens, from the key's beginning, that the tree had already.
        known_pages: int32: the tree's pages for those known tokens that lie after where the insertion began.
    """

    node: Node
    known: int
    known_pages: PageArray


_NO_PAGES: PageArray = np.empty(0, dtype=np.int32)


class RadixTree:
    """A compressed tree of prefixes, with counts that are always up to date.

    Args:
        page_size: Tokens a page.

    Attributes:
        tokens: Tokens in the tree.
        locked_tokens: Those of them on a locked path.
        held_tokens: Those of them on a held path.
        nodes: Nodes, roots not counted.
        version: Changes whenever a match could give another answer.
        hop: Nodes that a shortcut passes over.
        on_change: Called with each `Place` where a match may have become longer or shorter, or may now end in another
            node. A root that appears is place (0, b"").
        on_leaf: Called with each node that has just become an evictable leaf.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise UserError(f"page_size is {page_size!r}; it must be at least 1", param="page_size")
        self.page_size = page_size
        self.tokens = 0
        self.locked_tokens = 0
        self.held_tokens = 0
        self.nodes = 0
        self.version = 0
        self.hop = HOP
        self.on_change: Callable[[Place], None] = _ignore
        self.on_leaf: Callable[[Node], None] = _ignore
        self._page_bytes = page_size * _ID_BYTES
        self._roots: dict[str, Node] = {}

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that have something cached."""
        return tuple(self._roots)

    # -- looking -----------------------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, limit: int | None = None) -> Match:
        """Finds the longest cached prefix, whole pages, of at most `limit` tokens. Changes nothing."""
        return self.find(key.namespace, key.packed, limit)

    def find(self, namespace: str, packed: bytes, limit: int | None = None) -> Match:
        """As `match`, for ids that are packed already."""
        root = self._roots.get(namespace)
        if root is None:
            return Match(None, 0, 0)
        length = len(packed) // _ID_BYTES
        stop = self._whole_bytes(length if limit is None else max(0, min(limit, length)))
        node, offset, position = self._descend(root, packed, 0, stop)
        next_page = packed[position : position + self._page_bytes]
        if len(next_page) < self._page_bytes:
            next_page = b""
        return Match(node, offset // _ID_BYTES, position // _ID_BYTES, next_page)

    def pages(self, match: Match) -> PageArray:
        """The pages of a match's tokens, in order: int32 [match.length / page_size]."""
        if match.node is None or not match.length:
            return _NO_PAGES
        *before, last = match.node.path()
        parts = [node.pages for node in before]
        parts.append(last.pages[: match.offset // self.page_size])
        return np.concatenate(parts)

    def walk(self, namespace: str | None = None) -> Iterator[Node]:
        """Every node of one namespace, or of all, parents first; the tree must not change meanwhile."""
        roots = list(self._roots.values()) if namespace is None else [self._roots.get(namespace)]
        stack = [child for root in roots if root is not None for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _whole_bytes(self, tokens: int) -> int:
        return tokens // self.page_size * self._page_bytes

    def _descend(self, node: Node, packed: bytes, position: int, stop: int) -> tuple[Node, int, int]:
        """Follows packed[position:stop] down from the end of `node`.

        Returns:
            The node in which the match ends, the bytes of it that match, and the position reached.
        """
        step = self._page_bytes
        while position < stop:
            if node.shortcut is not None and packed.startswith(node.shortcut[0], position, stop) and _leads(node):
                ids, node, _ = node.shortcut
                position += len(ids)
                continue
            child = node.children.get(packed[position : position + step])
            if child is None:
                break
            ids = child.ids
            end = position + len(ids)
            # A long run is compared in place, at the speed of memcmp; for a short one the call would cost more than a copy.
            same = packed[position:end] == ids if end - position <= _SHORT else packed.startswith(ids, position)
            if not same or end > stop:
                common = self._common_bytes(ids, packed, position, min(end, stop))
                return child, common, position + common
            node = child
            position = end
        return node, len(node.ids), position

    def _common_bytes(self, ids: bytes, packed: bytes, position: int, end: int) -> int:
        """Bytes of whole pages in which `ids` begins like packed[position:end]."""
        count = (end - position) // _ID_BYTES
        ours = np.frombuffer(ids, dtype=np.int32, count=count)
        theirs = np.frombuffer(packed, dtype=np.int32, count=count, offset=position)
        differ = ours != theirs
        first = int(differ.argmax())
        return self._whole_bytes(first if differ[first] else count)

    def shorten(self, path: list[Node]) -> None:
        """Gives every `hop`-th node of a path that is often taken a shortcut to the one `hop` further, so that a match of many
        short runs looks at few of them. It changes no match: what leads to a node's end is the same as long as the node is there.
        """
        for at in range(0, len(path) - self.hop, self.hop):
            above, below = path[at], path[at + self.hop]
            if below.end - above.end > _LONGEST_HOP // _ID_BYTES or (above.shortcut is not None and _leads(above)):
                continue
            above.shortcut = b"".join(node.ids for node in path[at + 1 : at + self.hop + 1]), below, below.cuts

    # -- growing -----------------------------------------------------------------------------------------------------

    def insert(self, key: PrefixKey, pages: Ids) -> Insertion:
        """Adds what the tree lacks of `key`, whose KV lies in `pages` (one a whole page of ids; the rest is left out).

        The tree takes over the pages from ``known / page_size`` on; those before stay the caller's, since it has others
        for the same ids.

        Raises:
            UserError: There are fewer pages than whole pages of ids, or no whole page at all.
        """
        inserted = self.extend(None, key.namespace, key.packed, pages)
        if inserted.node.evictable:
            self.on_leaf(inserted.node)
        return inserted

    def extend(self, node: Node | None, namespace: str, packed: bytes, pages: Ids, *, grow: bool = False) -> Insertion:
        """Adds what the tree lacks of `packed`, which follows the end of `node` (None: the root).

        Args:
            node: Where to begin.
            namespace: The node's.
            packed: Packed ids that follow.
            pages: Their pages, at least one for each whole page of ids.
            grow: Lengthen `node` itself if it is a leaf, rather than give it a child: for a sequence that publishes
                bit by bit and is the only one to use the node.

        Raises:
            UserError: As `insert`.
        """
        stop = self._whole_bytes(len(packed) // _ID_BYTES)
        if not stop or len(pages) < stop // self._page_bytes:
            raise UserError(
                f"{len(pages)} pages of {self.page_size} tokens are given for {len(packed) // _ID_BYTES} ids; "
                "there must be a whole page of ids, and a page for each"
            )
        origin = node if node is not None else self._root(namespace)
        found, offset, position = self._descend(origin, packed, 0, stop)
        # packed:   0 .................. position ............... stop ... len
        #           | the tree has it     | new: taken over       | no whole page
        # pages:    | stay the caller's   | the tree's from now   | stay the caller's
        known_pages = self._pages_between(origin, found, offset)
        known = origin.end + position // _ID_BYTES
        if offset < len(found.ids):
            found = self._split(found, offset)
        if position < stop:
            fresh = np.array(pages[position // self._page_bytes : stop // self._page_bytes], dtype=np.int32)
            grows = grow and found is node and not found.children and bool(found.ids)
            add = self._grow if grows else self._add_child
            found = add(found, packed[position:stop], fresh)
        return Insertion(found, known, known_pages)

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, 0, b"", _NO_PAGES)
            self.on_change((0, b""))
        return root

    def _pages_between(self, above: Node, node: Node, offset: int) -> PageArray:
        """Pages from the end of `above` down to `offset` bytes into `node`, which is below it or is it."""
        parts: list[PageArray] = []
        taken = offset // self._page_bytes
        while node is not above and node.parent is not None:
            parts.append(node.pages[:taken])
            node = node.parent
            taken = len(node.pages)
        return np.concatenate(parts[::-1]) if parts else _NO_PAGES

    def _add_child(self, parent: Node, ids: bytes, pages: PageArray) -> Node:
        node = Node(parent.namespace, parent, parent.end, ids, pages)
        first_page = ids[: self._page_bytes]
        parent.children[first_page] = node
        self.nodes += 1
        self.tokens += node.tokens
        self._changed(parent, first_page)
        return node

    def _grow(self, leaf: Node, ids: bytes, pages: PageArray) -> Node:
        added = len(ids) // _ID_BYTES
        leaf.ids += ids
        leaf.pages = np.concatenate((leaf.pages, pages))
        self.tokens += added
        self.locked_tokens += added if leaf.locks else 0
        self.held_tokens += added if leaf.holds else 0
        self._changed(leaf, ids[: self._page_bytes])
        return leaf

    def _split(self, node: Node, offset: int) -> Node:
        """Cuts `node` after `offset` bytes; returns the new node that takes its beginning.

        Leases and holds end at the ends of nodes, so the node that keeps the end keeps its identity and its counts, and
        the new one above it has one locked child, if any.
        """
        cut = offset // self._page_bytes
        parent = node.parent
        if parent is None:
            raise RuntimeError(f"{node} is not in the tree and cannot be split")
        upper = Node(node.namespace, parent, node.start, node.ids[:offset], node.pages[:cut].copy())
        upper.children[node.ids[offset : offset + self._page_bytes]] = node
        upper.locks, upper.holds = min(node.locks, 1), min(node.holds, 1)
        upper.last_access, upper.hits = node.last_access, node.hits
        upper.tier, upper.owner, upper.credit = node.tier, node.owner, node.credit
        parent.children[node.ids[: self._page_bytes]] = upper
        node.parent, node.start = upper, upper.end
        node.ids, node.pages = node.ids[offset:], node.pages[cut:].copy()
        self.nodes += 1
        self._changed(node, b"")
        return upper

    # -- locking -----------------------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Node:
        """Locks the path to the end of a match, splitting the node in which it ends; returns the node at whose end it is.

        Raises:
            UserError: Nothing matched, so there is nothing to lock.
        """
        node = match.node
        if node is None or not match.length:
            raise UserError("a match of no tokens cannot be locked")
        if match.inside:
            node = self._split(node, match.offset * _ID_BYTES)
        self.lock_node(node)
        return node

    def lock_node(self, node: Node) -> None:
        """Locks the path from the root to the end of `node`, once more."""
        current: Node | None = node
        while current is not None:
            current.locks += 1
            if current.locks > 1:
                return
            self.locked_tokens += current.tokens
            current = current.parent

    def unlock(self, node: Node, now: float | None = None) -> None:
        """Takes one lock back.

        Args:
            node: As was locked.
            now: If given, becomes the last access of the nodes that nobody locks any more.

        Raises:
            RuntimeError: The node is not locked.
        """
        if node.locks < 1:
            raise RuntimeError(f"{node} is unlocked, but nobody locked it")
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks:
                return
            self.locked_tokens -= current.tokens
            if now is not None:
                current.last_access = now
            if current.evictable:
                self.on_leaf(current)
            current = current.parent

    def hold(self, node: Node) -> None:
        """Marks the path to `node` as softly held, once more: it is not evictable, but whoever holds it can be asked to yield."""
        current: Node | None = node
        while current is not None:
            current.holds += 1
            if current.holds > 1:
                return
            self.held_tokens += current.tokens
            current = current.parent

    def unhold(self, node: Node) -> None:
        """Takes one hold back."""
        current: Node | None = node
        while current is not None:
            current.holds -= 1
            if current.holds:
                return
            self.held_tokens -= current.tokens
            if current.evictable:
                self.on_leaf(current)
            current = current.parent

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def trim(self, leaf: Node, pages: int | None = None) -> PageArray:
        """Takes up to `pages` pages (None: all) off the end of an evictable leaf, which is removed when none is left.

        Returns:
            The pages, the last one first; they are the caller's now.

        Raises:
            RuntimeError: The node has children, is locked, held, or no longer in the tree.
        """
        if not leaf.evictable:
            raise RuntimeError(f"{leaf} cannot be trimmed: it has children, is locked or held, or is gone")
        # leaf:   0 ........ keep .............. len(pages)
        #         | stays    | the caller's, who frees them
        keep = max(0, len(leaf.pages) - pages) if pages is not None else 0
        taken = leaf.pages[keep:][::-1]
        self.tokens -= len(taken) * self.page_size
        if keep:
            leaf.pages = leaf.pages[:keep].copy()
            leaf.ids = leaf.ids[: keep * self._page_bytes]
            leaf.cuts += 1
        else:
            self._detach(leaf)
        self._changed(leaf, b"")
        return taken

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise RuntimeError(f"{leaf} is not in the tree")
        del parent.children[leaf.ids[: self._page_bytes]]
        leaf.parent = None
        leaf.ids, leaf.pages, leaf.shortcut = b"", _NO_PAGES, None  # programs remember nodes that have gone: these keep nothing alive
        self.nodes -= 1
        if parent.evictable:
            self.on_leaf(parent)
        elif parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
            self._changed(parent, b"")

    def _changed(self, node: Node, next_page: bytes) -> None:
        self.version += 1
        self.on_change((node.uid, next_page))

    # -- checking ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verifies the tree's shape and counts, at a cost that grows with the tree.

        Raises:
            RuntimeError: Something does not hold.
        """
        nodes = list(self.walk())
        for node in nodes:
            self._check_node(node)
        for root in self._roots.values():
            if not root.children:
                raise RuntimeError(f"the root of namespace {root.namespace!r} is empty and should be gone")
        counted = (
            len(nodes),
            sum(node.tokens for node in nodes),
            sum(node.tokens for node in nodes if node.locks),
            sum(node.tokens for node in nodes if node.holds),
        )
        kept = (self.nodes, self.tokens, self.locked_tokens, self.held_tokens)
        if counted != kept:
            raise RuntimeError(f"the tree has {counted} (nodes, tokens, locked, held), but counts {kept}")

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.ids[: self._page_bytes]) is not node:
            raise RuntimeError(f"{node} is not its parent's child")
        if node.start != parent.end or node.namespace != parent.namespace:
            raise RuntimeError(f"{node} does not follow {parent}")
        if not node.ids or len(node.ids) != len(node.pages) * self._page_bytes:
            raise RuntimeError(f"{node} has {len(node.ids)} bytes of ids for {len(node.pages)} pages")
        if node.locks < sum(child.locks > 0 for child in node.children.values()):
            raise RuntimeError(f"{node} has fewer locks than locked children")
        if node.holds < sum(child.holds > 0 for child in node.children.values()):
            raise RuntimeError(f"{node} has fewer holds than held children")


def _leads(node: Node) -> bool:
    """Whether the node's shortcut still leads to the end of its other node: that may have been removed, cut, or grown since."""
    if node.shortcut is None:
        return False
    ids, below, cuts = node.shortcut
    return below.parent is not None and below.cuts == cuts and below.end == node.end + len(ids) // _ID_BYTES


def _ignore(_: object) -> None:
    """Listens to nothing."""
