"""The prefix cache as a state machine beside a brute-force model, and its promises one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentrt.cache.eviction import POLICIES, eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import CacheEvent, PrefixCache, PrefixLease
from agentrt.cache.radix_tree import PrefixKey


@dataclass
class Sequence:
    """What a scheduler would keep: ids with computed KV, and the pages that it reads them from."""

    lease: PrefixLease
    ids: list[int]
    pages: list[int]


class CacheMachine(RuleBasedStateMachine):
    """Random sequences over few letters. `stored` remembers what was computed into each page, as the KV store would."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pages=st.integers(3, 90),
        policy=st.sampled_from([*POLICIES, "program", "program"]),
        enabled=st.sampled_from([True] * 7 + [False]),
        share=st.sampled_from([0.3, 1.0, 0.0]),
    )
    def start(self, page_size, pages, policy, enabled, share):
        self.page_size = page_size
        self.now = 0.0
        self.pool = PagePool(pages, page_size)
        self.cache = PrefixCache(
            self.pool,
            eviction_policy(policy),
            enabled=enabled,
            hold_share=share,
            clock=lambda: self.now,
        )
        self.cache.tree.hop = 1
        self.hold_limit = int(share * pages) * page_size
        self.sequences: list[Sequence] = []
        self.stored: dict[int, tuple] = {}
        self.events: set[tuple[str, tuple[int, ...]]] = set()
        self.cache.on_event = self.hear
        self.changed: set = set()
        self.cache.on_change = self.changed.add
        self.watched: list[tuple[PrefixKey, object]] = []

    def hear(self, event: CacheEvent) -> None:
        first = event.start + self.page_size
        prefixes = {(event.namespace, event.ids[:end]) for end in range(first, len(event.ids) + 1, self.page_size)}
        if event.kind == "stored":
            assert not prefixes & self.events
            self.events |= prefixes
        else:
            assert prefixes <= self.events
            self.events -= prefixes

    def private(self) -> int:
        return sum(len(s.pages) - s.lease.locked_tokens // self.page_size for s in self.sequences)

    def compute(self, sequence: Sequence, ids: list[int]) -> bool:
        """Allocates what `ids` more need and 'computes' their KV: the page remembers the whole prefix that it was computed for."""
        total = len(sequence.ids) + len(ids)
        count = -(-total // self.page_size) - len(sequence.pages)
        available = self.cache.available_pages
        pages = self.cache.allocate(count, sequence.pages[-1] if sequence.pages else None)
        assert (pages is None) == (count > available)
        if pages is None:
            return False
        sequence.pages += pages
        sequence.ids += ids
        for index, page in enumerate(sequence.pages):
            if index >= sequence.lease.locked_tokens // self.page_size:
                end = min((index + 1) * self.page_size, total)
                self.stored[page] = (sequence.lease.namespace, tuple(sequence.ids[:end]))
        return True

    @rule(
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        salt=st.sampled_from(["", "", "other"]),
        program=st.sampled_from([None, "p", "q"]),
    )
    def acquire(self, letters, salt, program):
        self.begin([letter for letter in letters for _ in range(max(1, self.page_size // 2))], salt, program)

    def begin(self, ids, salt, program):
        version, expected = self.cache.version, self.cache.match_length(ids, salt)
        assert self.cache.version == version
        limit = len(ids) - 1
        lease = self.cache.acquire(ids, salt, limit, program=program)
        assert lease.cached_tokens == min(expected, limit // self.page_size * self.page_size)
        assert lease.cached_tokens == len(lease.pages) * self.page_size
        assert expected == self.brute_force_match(ids, salt)
        sequence = Sequence(lease, ids[: lease.cached_tokens], list(lease.pages))
        self.sequences.append(sequence)
        if not self.compute(sequence, ids[lease.cached_tokens :]):
            self.drop(sequence)

    @rule(which=st.integers(0, 99), cut=st.integers(0, 20), letters=st.lists(st.integers(0, 1), max_size=3))
    def fork(self, which, cut, letters):
        """A sibling: as another sequence, up to a few tokens before its end."""
        if self.sequences:
            other = self.sequences[which % len(self.sequences)]
            ids = other.ids[: max(1, len(other.ids) - cut)] + letters
            self.begin(ids, other.lease.namespace, other.lease.program)

    def brute_force_match(self, ids, salt) -> int:
        prefixes = {(salt, tuple(ids[:end])) for end in range(self.page_size, len(ids) + 1, self.page_size)}
        return len(prefixes & self.events) * self.page_size

    @rule(which=st.integers(0, 99), letters=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def generate(self, which, letters):
        if self.sequences:
            self.compute(self.sequences[which % len(self.sequences)], letters)

    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def publish(self, which, share):
        if not self.sequences:
            return
        sequence = self.sequences[which % len(self.sequences)]
        ids = sequence.ids[: max(len(sequence.lease.pages) * self.page_size, round(len(sequence.ids) * share))]
        done = self.cache.publish(sequence.lease, ids, sequence.pages)
        for index, page in done.moved.items():
            sequence.pages[index] = page
        assert done.published_tokens == sequence.lease.locked_tokens
        if self.cache.enabled:
            assert done.published_tokens >= len(ids) // self.page_size * self.page_size

    @rule(which=st.integers(0, 99))
    def finish(self, which):
        if self.sequences:
            self.drop(self.sequences[which % len(self.sequences)])

    def drop(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        private = sequence.pages[sequence.lease.locked_tokens // self.page_size :]
        self.cache.release(sequence.lease)
        self.cache.free(private)

    @rule(count=st.integers(1, 30))
    def evict(self, count):
        evictable = self.cache.available_pages - self.pool.free_count
        assert self.cache.evict(count) == min(
            count, evictable
        )  # whatever is held: holds never keep an allocation waiting

    @rule(salt=st.sampled_from([None, "", "other"]))
    def flush(self, salt):
        before = self.cache.cached_tokens
        freed, kept = self.cache.flush(salt)
        assert before - freed == self.cache.cached_tokens
        if salt is None:
            assert kept == self.cache.locked_tokens == self.cache.cached_tokens

    @rule(program=st.sampled_from(["p", "q"]), seconds=st.floats(0.5, 9))
    def hold(self, program, seconds):
        self.cache.hold(program, seconds)

    @rule(program=st.sampled_from(["p", "q"]))
    def end_program(self, program):
        self.cache.end_program(program)

    @rule(seconds=st.floats(0.1, 5))
    def wait(self, seconds):
        self.now += seconds

    @rule(letters=st.lists(st.integers(0, 1), min_size=1, max_size=16), salt=st.sampled_from(["", "other"]))
    def watch(self, letters, salt):
        """A waiting request: its match may change only if one of its places was reported (see `nothing_is_lost`)."""
        key = PrefixKey([letter for letter in letters for _ in range(max(1, self.page_size // 2))], salt)
        self.watched.append((key, self.cache.match(key)))

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check(self.private())
        assert self.cache.held_tokens <= self.hold_limit
        for sequence in self.sequences:
            for index, page in enumerate(sequence.pages):
                prefix = tuple(sequence.ids[: (index + 1) * self.page_size])
                assert self.stored[page] == (sequence.lease.namespace, prefix), "a lease reads another's KV"
        assert len(self.events) * self.page_size == self.cache.cached_tokens
        for index, (key, match) in enumerate(self.watched):
            now = self.cache.match(key)
            if not self.changed & set(match.places):
                assert (now.node, now.offset, now.length) == (match.node, match.offset, match.length)
            self.watched[index] = (key, now)
        self.changed.clear()

    def teardown(self):
        if hasattr(self, "cache"):
            for sequence in list(self.sequences):
                self.drop(sequence)
            assert self.cache.locked_tokens == 0
            self.cache.flush()
            assert self.pool.free_count == self.pool.total
            assert self.cache.nodes == 0
            assert self.cache.tree.namespaces == ()


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def make(pages=64, page_size=1, policy="lru", **options):
    clock = itertools.count()
    return PrefixCache(PagePool(pages, page_size), eviction_policy(policy), clock=lambda: float(next(clock)), **options)


def run(cache, ids, program=None, namespace=""):
    """A whole sequence: acquire, compute, publish, release."""
    lease = cache.acquire(ids, namespace, len(ids) - 1, program=program)
    pages = lease.pages + (cache.allocate(-(-len(ids) // cache.page_size) - len(lease.pages)) or [])
    cache.publish(lease, ids, pages)
    private = pages[lease.locked_tokens // cache.page_size :]
    cache.release(lease)
    cache.free(private)
    return lease.cached_tokens


def test_a_whole_prompt_hit_leaves_one_token_and_the_second_copy_is_freed():
    cache = make()
    ids = list(range(20))
    run(cache, ids)
    lease = cache.acquire(ids, limit=19)
    assert lease.cached_tokens == 19
    mine = cache.allocate(1, lease.pages[-1])
    done = cache.publish(lease, ids, lease.pages + mine)
    assert done.moved_from == 19
    assert done.moved_pages != tuple(mine)
    assert cache.cached_tokens == 20
    cache.check(0)


def test_two_leases_that_compute_the_same_end_up_with_the_same_pages():
    cache = make(page_size=4)
    ids = list(range(10))
    first, second = cache.acquire(ids, limit=9), cache.acquire(ids, limit=9)
    a, b = cache.allocate(3), cache.allocate(3)
    assert cache.publish(first, ids, a).moved == {}
    done = cache.publish(second, ids, b)
    assert done.moved == {0: a[0], 1: a[1]}  # ids 8 and 9 are no whole page: they stay private
    assert done.published_tokens == 8
    cache.check(2)


def test_a_sequence_that_publishes_bit_by_bit_stays_one_node():
    cache = make()
    lease = cache.acquire([1, 2, 3], limit=2)
    pages = cache.allocate(3)
    ids = [1, 2, 3]
    for token in range(4, 20):
        cache.publish(lease, ids, pages)
        ids.append(token)
        pages += cache.allocate(1, pages[-1])
    assert cache.nodes == 1
    other = cache.acquire([1, 2, 3, 4, 5, 99], limit=5)
    assert other.cached_tokens == 5
    cache.publish(lease, ids, pages)
    cache.check(0)
    cache.release(other)
    cache.release(lease)
    assert cache.match_length(ids) == len(ids)


def test_a_leaf_that_another_lease_ends_at_is_not_lengthened():
    cache = make()
    first = cache.acquire([1, 2, 3])
    pages = cache.allocate(5)
    cache.publish(first, [1, 2, 3], pages[:3])
    second = cache.acquire([1, 2, 3, 9], limit=3)
    cache.publish(first, [1, 2, 3, 4, 5], pages)
    mine = second.pages + cache.allocate(1)
    cache.publish(second, [1, 2, 3, 9], mine)
    assert cache.match_length([1, 2, 3, 9]) == 4
    assert cache.match_length([1, 2, 3, 4, 5, 9]) == 5
    cache.check(0)


def test_a_node_with_two_leases_is_split_by_a_third_and_unlocks_whole():
    cache = make(policy="program")
    run(cache, list(range(10)), program="a")
    cache.release(cache.acquire(list(range(10)), program="b"))
    assert cache.nodes == 1
    cache.hold("a", 1000)
    cache.hold("b", 1000)
    leases = [cache.acquire(list(range(10))), cache.acquire(list(range(10))), cache.acquire(list(range(4)))]
    assert cache.locked_tokens == 10
    for lease in leases:
        cache.release(lease)
    assert cache.locked_tokens == 0
    cache.end_program("a")
    cache.end_program("b")
    assert cache.held_tokens == 0
    assert cache.evict(10) == 10


def test_a_held_leaf_that_grows_stays_held_and_counted():
    cache = make(policy="program")
    lease = cache.acquire([1, 2], program="a")
    pages = cache.allocate(6)
    cache.publish(lease, [1, 2], pages)
    cache.hold("a", 1000)
    cache.publish(lease, [1, 2, 3, 4, 5, 6], pages)
    assert cache.held_tokens == 6
    cache.check(0)
    cache.release(lease)
    run(cache, [7] * 10)
    cache.evict(10)
    assert cache.match_length([1, 2, 3, 4, 5, 6]) == 6


def test_release_and_publish_after_release_are_refused():
    cache = make()
    lease = cache.acquire([1, 2])
    cache.release(lease)
    with pytest.raises(RuntimeError, match="released twice"):
        cache.release(lease)
    with pytest.raises(RuntimeError, match="after its release"):
        cache.publish(lease, [1, 2], [0, 1])


def test_lost_pages_are_found_by_the_check():
    cache = make()
    cache.allocate(3)
    with pytest.raises(RuntimeError, match="61 free \\+ 0 cached \\+ 0 private pages are not 64"):
        cache.check(0)


def test_allocate_refuses_without_evicting_anything():
    cache = make(pages=10)
    run(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2])
    assert cache.allocate(9) is None
    assert cache.cached_tokens == 4
    assert len(cache.allocate(8)) == 8
    assert cache.locked_tokens == cache.cached_tokens == 2
    cache.release(lease)


def test_disabled_finds_and_keeps_nothing():
    cache = make(enabled=False)
    assert run(cache, [1, 2, 3]) == run(cache, [1, 2, 3]) == 0
    assert cache.cached_tokens == 0
    cache.check(0)


def test_hits_and_queries_are_counted_in_tokens():
    cache = make()
    run(cache, list(range(10)))
    run(cache, list(range(10)))
    assert (cache.queried_tokens_total, cache.hit_tokens_total) == (20, 9)


def test_holds_go_last_yield_oldest_first_and_end():
    cache = make(pages=40, policy="program")
    run(cache, [1] * 10, program="a")
    run(cache, [2] * 10, program="b")
    run(cache, [3] * 10, program="c")
    cache.hold("a", 1000)
    cache.hold("b", 1000)
    cache.evict(10)
    assert [cache.match_length([n] * 10) for n in (1, 2, 3)] == [10, 10, 0]
    cache.evict(4)  # only what is held is left: the older hold yields
    assert [cache.match_length([n] * 10) for n in (1, 2)] == [6, 10]
    assert cache.holding == ("a", "b")
    cache.end_program("b")
    cache.evict(1)  # only b could have used it
    assert [cache.match_length([n] * 10) for n in (1, 2)] == [6, 9]


def test_a_hold_ends_at_its_deadline_and_covers_what_comes_during_it():
    cache = make(pages=100, policy="program")
    cache.hold("a", 30)
    run(cache, [1] * 10, program="a")
    run(cache, [2] * 10)
    cache.evict(5)
    assert [cache.match_length([n] * 10) for n in (1, 2)] == [10, 5]
    for _ in range(40):
        run(cache, [2] * 10)
    cache.evict(5)
    assert [cache.match_length([n] * 10) for n in (1, 2)] == [5, 10]
    assert cache.holding == ()


def test_holds_keep_no_more_than_their_share():
    cache = make(pages=100, policy="program", hold_share=0.25)
    for number, name in enumerate("abc"):
        run(cache, [number] * 10, program=name)
        cache.hold(name, 1000)
    assert cache.holding == ("a", "b", "c") or cache.holding == ("b", "c")
    assert cache.held_tokens == 20


def test_what_a_finished_program_shared_stays():
    cache = make(pages=100, policy="program")
    shared = [7] * 5
    run(cache, shared + [1] * 5, program="a")
    run(cache, shared + [2] * 5, program="b")
    run(cache, [3] * 5, program="b")
    cache.end_program("b")
    cache.evict(10)
    assert cache.match_length(shared + [1] * 5) == 10
    assert cache.match_length([3] * 5) == 0


def test_flush_of_one_tenant_leaves_the_others():
    cache = make()
    run(cache, [1, 2, 3], namespace="a")
    run(cache, [1, 2, 3], namespace="b")
    lease = cache.acquire([1, 2, 9], "b")
    assert cache.flush("a") == (3, 0)
    assert cache.flush() == (1, 2)
    cache.release(lease)


def test_hot_paths_show_what_serves_most():
    cache = make()
    for tail in (1, 2, 3):
        run(cache, [7] * 10 + [tail] * 5)
    run(cache, [9] * 12)
    hottest = cache.hot_paths(2)[0]
    assert hottest.first_ids == (7,) * 10
    assert (hottest.tokens, hottest.nodes, hottest.hits) == (25, 4, 20)
    assert len(cache.hot_paths(2)) == 2
    paths = cache.hot_paths(20)
    for path in paths:  # each part begins where the one above it ends
        above = None if path.parent is None else paths[path.parent]
        assert (path.start == 0) if above is None else (path.start > above.start)
    assert any(path.parent is not None for path in paths)
