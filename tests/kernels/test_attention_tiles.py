from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from agentrt.kernels.attention_tiles import TILE_FIELDS, TileLimits, TileLists, tile_lists
from hypothesis import given, settings
from hypothesis import strategies as st

run = st.tuples(st.integers(1, 40), st.integers(0, 1500))


def spans_of_tokens(lists: TileLists) -> dict[int, list[tuple[int, int, int, int]]]:
    """For each token: (first position, end, table, partial row or -1) of every tile that it is in."""
    spans: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for tile in [*lists.narrow.tolist(), *lists.wide.tolist()]:
        assert len(tile) == TILE_FIELDS
        first, count, table, start, stop, part = tile
        for place, token in enumerate(lists.rows[first : first + count].tolist()):
            spans[token].append((start, stop, table, part if part < 0 else part + place))
    return spans


@settings(max_examples=60)
@given(
    runs=st.lists(run, min_size=1, max_size=12),
    window=st.none() | st.integers(1, 700),
    groups=st.integers(0, 3),
    wanted=st.integers(1, 40),
    narrow_tokens=st.integers(0, 5),
    wide_tokens=st.integers(5, 33),
)
def test_a_tokens_spans_cover_once_what_it_may_see(runs, window, groups, wanted, narrow_tokens, wide_tokens):
    new, context = [n for n, _ in runs], [c for _, c in runs]
    members = [[run for run in range(len(runs)) if run % (groups + 1) == group] for group in range(groups)]
    shared = [(group, min(context[run] for run in group)) for group in members if group]
    tables = [10_000 * run for run in range(len(runs))]
    lists = tile_lists(new, context, tables, shared, window, TileLimits(narrow_tokens, wide_tokens, wanted))

    spans = spans_of_tokens(lists)
    merged = {
        int(token): lists.merge_members[lists.merge_starts[place] : lists.merge_starts[place + 1]].tolist()
        for place, token in enumerate(lists.merge_tokens)
    }
    written: list[int] = []
    token = 0
    for index, (count, before) in enumerate(runs):
        friends = next((group for group, _ in shared if index in group), [index])
        for position in range(before, before + count):
            seen = position + 1
            assert lists.seen[token] == seen
            least = 0 if window is None else max(0, seen - window)
            mine = sorted(spans[token])
            # Clipped to what the token may see (the kernel masks the rest), the spans are neighbours from end to end.
            clipped = [(max(start, least), min(stop, seen)) for start, stop, _, _ in mine]
            clipped = [(start, stop) for start, stop in clipped if start < stop]
            assert clipped[0][0] == least
            assert clipped[-1][1] == seen
            assert all(left[1] == right[0] for left, right in pairwise(clipped))
            assert all(table == tables[index] or table in [tables[friend] for friend in friends] for _, _, table, _ in mine)
            parts = [part for *_, part in mine]
            if len(mine) == 1 and parts[0] < 0:
                assert token not in merged
            else:
                assert min(parts) >= 0
                assert sorted(merged[token]) == sorted(parts)
            written += [part for part in parts if part >= 0]
            token += 1
    assert len(set(written)) == len(written)
    assert all(part < lists.part_rows for part in written)
    assert max((tile[1] for tile in lists.narrow.tolist()), default=0) <= max(narrow_tokens, 0)
    assert max((tile[1] for tile in lists.wide.tolist()), default=0) <= wide_tokens


def test_a_prefix_is_read_once_for_all_its_branches():
    lists = tile_lists([1] * 64, [4096] * 64, [0] * 64, [(list(range(64)), 4000)], None, TileLimits(4, 32, 1))
    assert lists.wide[:, 3:5].tolist() == [[0, 4000]] * 2  # 64 tokens in tiles of 32
    assert lists.narrow[:, 3:5].tolist() == [[4000, 4097]] * 64
    assert len(lists.merge_tokens) == 64


def test_one_long_sequence_is_cut_until_the_device_is_full():
    lists = tile_lists([1, 1], [100_000, 300], [0, 7000], [], None, TileLimits(4, 32, 64))
    lengths = (lists.narrow[:, 4] - lists.narrow[:, 3]).tolist()
    assert 60 <= len(lengths) <= 70
    assert max(lengths) < 2000
    assert len(lists.merge_tokens) == 1  # the short one is whole
