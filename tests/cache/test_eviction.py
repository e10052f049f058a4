"""The order of each eviction policy, and what they all must keep: only evictable leaves, each once, none forgotten."""

from __future__ import annotations

import itertools
import random

import pytest

from agentrt.cache.eviction import LFU, LRU, POLICIES, SLRU, Candidates, ProgramAware, eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.cache.radix_tree import PrefixKey, RadixTree
from agentrt.errors import UserError


def make(policy, pages=100):
    clock = itertools.count()
    return PrefixCache(PagePool(pages, 1), policy, clock=lambda: float(next(clock)))


def use(cache, name, tokens=10, program=None):
    """A request for a prefix that shares nothing with others; returns how much was found."""
    ids = [name * 1000 + place for place in range(tokens)]
    lease = cache.acquire(ids, program=program)
    pages = cache.allocate(tokens - len(lease.pages))
    cache.publish(lease, ids, lease.pages + pages)
    cache.release(lease)
    return lease.cached_tokens


def kept(cache, names):
    return [name for name in names if cache.match_length([name * 1000 + place for place in range(10)]) == 10]


def order(cache, names):
    """The order in which prefixes of ten tokens go."""
    gone = []
    while len(gone) < len(names):
        before = kept(cache, names)
        cache.evict(10)
        gone += [name for name in before if name not in kept(cache, names)]
    return gone


def test_lru_evicts_the_least_recently_used():
    cache = make(LRU())
    for name in (1, 2, 3, 1, 4, 2):
        use(cache, name)
    assert order(cache, [1, 2, 3, 4]) == [3, 1, 4, 2]


def test_lru_counts_the_end_of_a_lease_as_use():
    cache = make(LRU())
    use(cache, 1)
    lease = cache.acquire([1000 + place for place in range(10)])
    use(cache, 2)
    cache.release(lease)
    assert order(cache, [1, 2]) == [2, 1]


def test_lfu_evicts_the_least_often_used_and_among_equals_the_oldest():
    cache = make(LFU())
    for name in (1, 1, 1, 2, 2, 3, 4, 3):
        use(cache, name)
    assert order(cache, [1, 2, 3, 4]) == [4, 2, 3, 1]


def test_slru_evicts_what_was_never_reused_first():
    cache = make(SLRU())
    for name in (1, 1, 2, 2, 3, 4):
        use(cache, name)
    assert order(cache, [1, 2, 3, 4]) == [3, 4, 1, 2]


def test_slru_demotes_the_oldest_when_too_much_is_protected():
    cache = make(SLRU(protected_share=0.25))
    for name in (1, 1, 2, 2, 3, 3, 4):
        use(cache, name)
    assert order(cache, [1, 2, 3, 4])[-2:] == [2, 3]  # 1 went back to probation


def test_program_evicts_first_what_only_a_finished_program_used():
    cache = make(ProgramAware(LRU()))
    use(cache, 1, program="a")
    use(cache, 2, program="b")
    use(cache, 3, program="b")
    use(cache, 3, program="a")
    use(cache, 4, program="a")
    use(cache, 4, program="b")
    cache.end_program("b")
    assert order(cache, [1, 2, 3, 4]) == [2, 1, 3, 4]


def test_eviction_goes_leaf_by_leaf_from_the_end():
    cache = make(LRU())
    for tail in ([1, 2], [3, 4]):
        lease = cache.acquire([7, 7, *tail])
        pages = lease.pages + cache.allocate(4 - len(lease.pages))
        cache.publish(lease, [7, 7, *tail], pages)
        cache.release(lease)
    lengths = []
    for _ in range(6):
        cache.evict(1)
        lengths.append((cache.match_length([7, 7, 1, 2]), cache.match_length([7, 7, 3, 4])))
    assert lengths == [(3, 4), (2, 4), (2, 3), (2, 2), (1, 1), (0, 0)]


def test_adaptive_keeps_what_returns_from_a_stream_that_does_not():
    """Ten prefixes come back in turn among one-off ones, each after more than a pool of others: LRU keeps none of them."""
    scores = {}
    for name in ("lru", "adaptive"):
        cache, serial = make(eviction_policy(name), pages=150), itertools.count(100)
        scores[name] = 0
        for turn in range(1200):
            scores[name] += use(cache, turn // 2 % 10 if turn % 2 else next(serial))
    assert scores["lru"] == 0
    assert scores["adaptive"] > 0.4 * 600 * 10


def test_adaptive_is_as_good_as_lru_where_lru_is_right():
    scores = {}
    for name in ("lru", "adaptive"):
        rng = random.Random(5)
        cache, scores[name] = make(eviction_policy(name), pages=200), 0
        recent = list(range(20))
        for serial in range(1000):  # most requests repeat one of the last few
            prefix = 100 + serial if rng.random() < 0.3 else recent[-1 - min(19, int(rng.expovariate(0.2)))]
            recent.append(prefix)
            scores[name] += use(cache, prefix)
    assert scores["adaptive"] >= 0.98 * scores["lru"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_each_evictable_leaf_once_and_nothing_else(name):
    policy, tree, rng = eviction_policy(name), RadixTree(1), random.Random(1)
    policy.fit(1000, 1)
    tree.on_leaf = policy.add
    for _ in range(200):
        ids = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        policy.asked(PrefixKey(ids))
        tree.insert(PrefixKey(ids), list(range(len(ids))))
    locked = tree.lock(tree.match(PrefixKey((0, 1))))
    total = 0
    while (node := policy.pop()) is not None:
        assert node.evictable
        assert 1 <= policy.portion(node) <= len(node.pages)
        total += len(tree.trim(node))
        policy.discard(node)
    assert tree.tokens == tree.locked_tokens == 2
    assert total > 100
    tree.unlock(locked)
    assert policy.pop() is not None


def test_candidates_forget_old_ranks_and_do_not_grow():
    tree = RadixTree(1)
    nodes = [tree.insert(PrefixKey((n,)), [n]).node for n in range(5)]
    candidates = Candidates()
    for turn in range(10_000):
        candidates.add(nodes[turn % 5], (float(turn),))
    assert len(candidates) == candidates.tokens == 5
    assert len(candidates._heap) <= 2 * 5 + 64
    assert [candidates.pop() for _ in range(6)] == [*nodes, None]


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="eviction is 'fifo'; it must be one of lru, lfu"):
        eviction_policy("fifo")


def test_what_programs_remember_of_nodes_that_have_gone_takes_no_room():
    cache = make(ProgramAware(LRU()))
    use(cache, 1, program="p")
    use(cache, 1, program="q")
    (node,) = cache.tree.walk()
    cache.evict(10)
    assert (node.parent, node.ids, len(node.pages)) == (None, b"", 0)
    cache.hold("p", 5.0)
    assert cache.held_tokens == 0


def test_a_hold_is_over_at_its_deadline_even_where_nothing_is_evicted():
    now = [0.0]
    cache = PrefixCache(PagePool(100, 1), ProgramAware(LRU()), clock=lambda: now[0])
    use(cache, 1, program="p")
    cache.hold("p", 5.0)
    assert (cache.holding, cache.held_tokens) == (("p",), 10)
    now[0] = 6.0
    cache.hold("q", 5.0)
    assert (cache.holding, cache.held_tokens) == (("q",), 0)
