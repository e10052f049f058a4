"""The page pool against a plain set of free pages, and what it promises about runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.cache.page_pool import PagePool
from agentrt.errors import UserError

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 200), st.booleans()),
        st.tuples(st.just("settle"), st.integers(0, 200), st.booleans()),
        st.tuples(st.just("grow"), st.integers(0, 200), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), st.sampled_from([1, 2, 16]), ACTIONS, st.randoms(use_true_random=False))
def test_pool_is_a_set_of_free_pages(pages, page_size, actions, random):
    pool = PagePool(pages, page_size)
    free = set(range(pages))
    sequences: list[list[int]] = []
    for action, number, flag in actions:
        if action == "allocate" or (action == "grow" and not sequences):
            after = sequences[number % len(sequences)][-1] if sequences and flag else None
            taken = pool.allocate(number % 41, after)
            assert (taken is None) == (number % 41 > len(free))
            if taken:
                assert set(taken) <= free
                assert len(set(taken)) == len(taken)
                free -= set(taken)
                sequences.append(taken)
        elif action == "grow":
            sequence = sequences[number % len(sequences)]
            taken = pool.allocate(1, sequence[-1])
            assert (taken is None) == (not free)
            if taken:
                free.remove(taken[0])
                sequence += taken
        elif action == "settle" and sequences:
            pool.settle(sequences[number % len(sequences)][-1])
        elif action == "free" and sequences:
            sequence = sequences.pop(number % len(sequences))
            random.shuffle(sequence)
            pool.free(np.array(sequence, dtype=np.int32) if flag else sequence)
            free |= set(sequence)
        pool.check()
        assert pool.free_count == len(free)
    assert sorted(pool.allocate(len(free)) or []) == sorted(free)  # a reservation never keeps a page from who needs it
    pool.check()


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ([3, 3], "3 is freed twice"),
        ([1, 7], "7 is freed, but"),
        ([2, 10], "10 is not of this pool"),
        ([-1], "-1 is not"),
    ],
)
def test_wrong_frees_name_the_page_and_take_nothing(pages, said):
    pool = PagePool(10, 1)
    pool.allocate(5)
    with pytest.raises(RuntimeError, match=said):
        pool.free(pages)
    assert pool.free_count == 5
    pool.check()


def test_double_free_raises():
    pool = PagePool(10, 1)
    pages = pool.allocate(4)
    pool.free(pages)
    with pytest.raises(RuntimeError, match="page 0 is freed, but it is free already"):
        pool.free(pages)


def test_sequences_that_decode_side_by_side_do_not_interleave():
    pool = PagePool(4096, 1)
    sequences = [pool.allocate(100) for _ in range(8)]
    for _ in range(60):
        for sequence in sequences:
            sequence += pool.allocate(1, sequence[-1])
    for sequence in sequences:
        assert sequence == list(range(sequence[0], sequence[0] + 160))


def test_chunks_of_one_prompt_join_up_beside_another_prompt():
    pool = PagePool(16_384, 1)
    one, other = pool.allocate(512), pool.allocate(512)
    for _ in range(2):
        one += pool.allocate(512, one[-1])
        other += pool.allocate(512, other[-1])
    for sequence in (one, other):
        runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(sequence))
        assert runs <= 2


def test_an_allocation_that_fits_one_extent_is_one_run():
    pool = PagePool(1000, 1)
    pieces = [pool.allocate(100) for _ in range(10)]
    for piece in pieces[1::2]:
        pool.free(piece)
    pool.free(pieces[4])  # now 100..199 is alone, and 300..599 is one extent
    taken = pool.allocate(250)
    assert taken == list(range(taken[0], taken[0] + 250))


@pytest.mark.parametrize(("pages", "page_size"), [(0, 1), (5, 0)])
def test_an_empty_pool_is_refused(pages, page_size):
    with pytest.raises(UserError, match="at least 1"):
        PagePool(pages, page_size)
