"""The radix tree against a dictionary from every cached prefix to its page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.cache.radix_tree import Match, PrefixKey, RadixTree, pack_ids, unpack_ids
from agentrt.errors import UserError

IDS = st.lists(st.integers(0, 2), max_size=40)  # few letters: prefixes meet and part often
ACTION = st.tuples(
    st.sampled_from(["insert", "insert", "match", "lock", "unlock", "trim"]), IDS, st.sampled_from(["", "b"])
)


class Model:
    """Every cached page by its namespace and the whole prefix that ends with it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}

    def prefixes(self, ids, namespace):
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            yield namespace, tuple(ids[:end])

    def match(self, ids, namespace):
        found = []
        for prefix in self.prefixes(ids, namespace):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 3]), st.lists(ACTION, max_size=40), st.data())
def test_tree_is_a_dictionary_of_prefixes(page_size, hop, actions, data):
    tree, model, locked, serial = RadixTree(page_size), Model(page_size), [], 0
    candidates = {}
    tree.hop = hop  # shortcuts everywhere
    tree.on_leaf = lambda node: candidates.__setitem__(node.uid, node)
    for action, short, namespace in actions:
        ids = [token for token in short for _ in range(max(1, page_size // 4))]
        key = PrefixKey(tuple(ids), namespace)
        version, match = tree.version, tree.match(key)
        assert tree.version == version
        assert tree.pages(match).tolist() == model.match(ids, namespace)
        assert match.length == len(model.match(ids, namespace)) * page_size
        if action == "insert" and len(ids) >= page_size:
            pages = list(range(serial, serial + len(ids) // page_size))
            serial += len(pages)
            inserted = tree.insert(key, pages)
            assert inserted.known == match.length
            assert inserted.known_pages.tolist() == model.match(ids, namespace)
            assert inserted.node.end == len(pages) * page_size
            for prefix, page in zip(model.prefixes(ids, namespace), pages, strict=True):
                model.pages.setdefault(prefix, page)
        elif action == "lock" and match.length:
            locked.append((tree.lock(match), ids[: match.length]))
            tree.shorten(locked[-1][0].path())
        elif action == "unlock" and locked:
            tree.unlock(locked.pop(data.draw(st.integers(0, len(locked) - 1)))[0])
        elif action == "trim":
            leaves = [node for node in tree.walk() if node.evictable]
            assert {leaf.uid for leaf in leaves} <= set(candidates)  # every evictable leaf was reported
            if leaves:
                leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))]
                count = data.draw(st.integers(1, len(leaf.pages)))
                prefix = unpack_ids(leaf.prefix())
                for page in tree.trim(leaf, count).tolist():
                    assert model.pages.pop((leaf.namespace, prefix)) == page
                    prefix = prefix[:-page_size]
        tree.check()
        for node, held in locked:
            assert node.locks
            assert unpack_ids(node.prefix()) == tuple(held)
        assert tree.tokens == len(model.pages) * page_size
        assert set(tree.namespaces) == {namespace for namespace, _ in model.pages}
    for node, _ in locked:
        tree.unlock(node)
    assert tree.locked_tokens == 0


def test_a_match_of_many_short_runs_looks_at_few_of_them():
    tree, trunk = RadixTree(1), [n * 7 % 1009 for n in range(2048)]
    for number in range(512):
        ids = [*trunk[: 4 * number + 4], 2000 + number]
        tree.insert(PrefixKey(ids), list(range(len(ids))))
    key, looked = PrefixKey(trunk), []

    class Children(dict):
        def get(self, first_page):
            looked.append(first_page)
            return super().get(first_page)

    for node in tree.walk():
        node.children = Children(node.children)
    before = tree.match(key)
    assert (before.length, len(looked)) == (2048, 511)
    tree.shorten(before.node.path())
    looked.clear()
    assert tree.match(key) == before
    assert len(looked) < 64
    assert tree.match(PrefixKey([*trunk[:1003], 2222])).length == 1003  # it parts in the middle of a shortcut


def test_match_says_where_it_ends_and_changes_nothing():
    tree = RadixTree(2)
    tree.insert(PrefixKey((1, 2, 3, 4, 5, 6)), [7, 8, 9])
    match = tree.match(PrefixKey((1, 2, 3, 4, 9, 9)))
    assert (match.length, match.offset, match.inside, match.next_page) == (4, 4, True, pack_ids((9, 9)))
    assert tree.nodes == 1
    assert tree.match(PrefixKey((1, 2, 3, 4, 5, 6)), limit=5).length == 4
    assert tree.match(PrefixKey((1, 9))).length == 0  # they part inside the first page
    node = tree.lock(match)
    assert (node.end, tree.nodes, tree.locked_tokens) == (4, 2, 4)


def test_namespaces_share_nothing_and_empty_roots_vanish():
    tree = RadixTree(1)
    node = tree.insert(PrefixKey((1, 2), "salt"), [0, 1]).node
    assert tree.match(PrefixKey((1, 2))).length == 0
    assert tree.namespaces == ("salt",)
    tree.trim(node)
    assert tree.namespaces == ()


def test_a_change_reports_the_place_of_every_match_that_it_touches():
    changed = set()
    tree = RadixTree(1)
    tree.on_change = changed.add

    def touched(match: Match, change) -> bool:
        changed.clear()
        change()
        return bool(changed & set(match.places))

    nothing = tree.match(PrefixKey((1, 2, 3)))
    assert touched(nothing, lambda: tree.insert(PrefixKey((1, 2, 3, 4)), [0, 1, 2, 3]))
    whole, inside, other = (tree.match(PrefixKey(ids)) for ids in [(1, 2, 3, 4, 5), (1, 2, 7), (9,)])
    assert not touched(other, lambda: tree.insert(PrefixKey((1, 2, 3, 4, 6)), [4] * 5))
    assert not touched(whole, lambda: tree.insert(PrefixKey((1, 2, 3, 4, 8)), [4] * 5))
    assert touched(whole, lambda: tree.insert(PrefixKey((1, 2, 3, 4, 5)), [4] * 5))
    assert touched(inside, lambda: tree.insert(PrefixKey((1, 2, 7)), [4] * 3))
    gone = tree.match(PrefixKey((1, 2, 7)))
    assert gone.node is not None
    assert touched(gone, lambda: tree.trim(gone.node))


def test_misuse_is_named():
    tree = RadixTree(2)
    with pytest.raises(UserError, match="1 pages of 2 tokens are given for 4 ids"):
        tree.insert(PrefixKey((1, 2, 3, 4)), [0])
    with pytest.raises(UserError, match="no tokens cannot be locked"):
        tree.lock(tree.match(PrefixKey((1, 2))))
    node = tree.insert(PrefixKey((1, 2)), [0]).node
    with pytest.raises(RuntimeError, match="nobody locked it"):
        tree.unlock(node)
    tree.lock_node(node)
    with pytest.raises(RuntimeError, match="cannot be trimmed"):
        tree.trim(node)
    with pytest.raises(UserError, match="at least 1"):
        RadixTree(0)


def test_ids_pack_the_same_from_any_kind():
    assert pack_ids([1, 2**31 - 1]) == pack_ids(np.array([1, 2**31 - 1])) == pack_ids((1, 2**31 - 1))
    assert unpack_ids(pack_ids((5, 6))) == (5, 6)


def test_a_shortcut_to_a_node_that_was_cut_off_and_grew_otherwise_is_not_taken():
    tree = RadixTree(1)
    tree.hop = 1
    tree.insert(PrefixKey([1, 2, 9]), [0, 1, 2])
    below = tree.insert(PrefixKey([1, 2, 3, 4, 5]), [3, 4, 5, 6, 7]).node
    tree.shorten(below.path())
    assert tree.match(PrefixKey([1, 2, 3, 4, 5])).length == 5
    tree.trim(below, 2)
    tree.extend(below, "", pack_ids([7, 5]), [8, 9], grow=True)
    tree.insert(PrefixKey([1, 2, 3, 7, 8]), [10, 11, 12, 13, 14])  # what is left of the node is its old end, behind another middle
    assert below.end == 5
    assert tree.match(PrefixKey([1, 2, 3, 4, 5])).length == 3
    assert tree.match(PrefixKey([1, 2, 3, 7, 5])).length == 5
