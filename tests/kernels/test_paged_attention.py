from __future__ import annotations

import mmap
import random
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import triton
from agentrt.kernels.attention_tiles import TileLimits, tile_lists
from agentrt.kernels.merge_parts import merge_parts
from agentrt.kernels.paged_attention import PagedKV, Scores, attend_reference, attend_tiles, narrow_shape, wide_shape
from agentrt.kernels.rotary_kv import rotate_and_write, rotate_reference, write_kv

pytestmark = pytest.mark.slow

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


class Case:
    """Random runs over a store whose every unused number is NaN."""

    def __init__(self, seed: int, dtype: torch.dtype, head_dim: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.random.choice
        self.kv_heads, self.group, self.page = pick((1, 2, 3)), pick((1, 2, 3, 4, 7, 8)), pick((1, 2, 4, 16))
        self.scores = Scores(head_dim**-0.5, pick((None, None, 1, 33, 200)), pick((None, None, 2.0)))
        self.heads, self.head_dim, self.dtype = self.kv_heads * self.group, head_dim, dtype
        branches, prefix = (pick((2, 3)), pick((130, 201))) if pick((True, False)) else (0, 0)
        self.new = [pick((1, 1, 2, 5, 18)) for _ in range(branches + pick((1, 2)))]
        self.context = [pick((0, 1, 70, 300)) + (prefix if run < branches else 0) for run in range(len(self.new))]
        self.shared = [(list(range(branches)), prefix)] if branches else []
        self._fill(branches, prefix)

    def _fill(self, branches: int, prefix: int) -> None:
        pages = sum(-(-(n + c) // self.page) for n, c in zip(self.new, self.context, strict=True)) + 3
        shape = (pages * self.page, self.kv_heads, self.head_dim)
        keys, values = torch.full(shape, NAN, dtype=self.dtype), torch.full(shape, NAN, dtype=self.dtype)
        free = list(range(pages))
        self.random.shuffle(free)
        common = [free.pop() for _ in range(prefix // self.page)]
        table: list[int] = []
        self.tables: list[int] = []
        for run, (new, context) in enumerate(zip(self.new, self.context, strict=True)):
            mine = list(common) if run < branches else []
            mine += [free.pop() for _ in range(-(-(new + context) // self.page) - len(mine))]
            self.tables.append(len(table))
            table += mine
            slots = [mine[p // self.page] * self.page + p % self.page for p in range(new + context)]
            for tensor in (keys, values):
                fresh = torch.tensor([slot for slot in slots if bool(tensor[slot].isnan().any())], dtype=torch.int64)
                tensor[fresh] = self.normal(len(fresh), self.kv_heads, self.head_dim)
        self.shared = [(runs, len(common) * self.page) for runs, _ in self.shared]
        self.store = PagedKV(keys, values, torch.tensor(table, dtype=torch.int32), self.page)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def check(self, wanted: int) -> None:
        q = self.normal(sum(self.new), self.heads, self.head_dim)
        narrow, wide = narrow_shape(self.head_dim, self.group), wide_shape(self.head_dim, self.group)
        block = triton.next_power_of_2(self.group)
        limits = TileLimits(narrow.rows // block, wide.rows // block, wanted)
        lists = tile_lists(self.new, self.context, self.tables, self.shared, self.scores.window, limits)
        out = torch.full(q.shape, NAN, dtype=self.dtype)
        parts, lse = torch.full((lists.part_rows, *q.shape[1:]), NAN), torch.full((lists.part_rows, self.heads), NAN)
        rows, seen = torch.from_numpy(lists.rows), torch.from_numpy(lists.seen)
        for tiles, shape in ((lists.narrow, narrow), (lists.wide, wide)):
            attend_tiles(q, self.store, rows, seen, torch.from_numpy(tiles), self.scores, shape, out, parts, lse)
        merge_parts(parts, lse, *(torch.from_numpy(a) for a in (lists.merge_tokens, lists.merge_starts, lists.merge_members)), out)
        row = 0
        for new, context, table in zip(self.new, self.context, self.tables, strict=True):
            seen_by = [context + place + 1 for place in range(new)]
            wanted_out = attend_reference(q[row : row + new], self.store, table, seen_by, self.scores)
            torch.testing.assert_close(out[row : row + new].double(), wanted_out, atol=TOLERANCE[self.dtype], rtol=0)
            row += new


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_random_runs(head_dim, dtype):
    Case(head_dim, dtype, head_dim).check(wanted=4)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(200))
def test_many_random_runs(seed):
    choice = random.Random(seed)
    Case(1000 + seed, choice.choice((torch.float32, torch.float16)), choice.choice((16, 64, 80, 96, 128, 256))).check(choice.choice((1, 4, 16)))


def test_a_tile_of_no_rows_writes_nothing():
    case = Case(0, torch.float32, 64)
    q = case.normal(1, case.heads, 64)
    out = torch.full(q.shape, NAN)
    zeros = torch.zeros(1, dtype=torch.int32)
    tiles, shape = torch.zeros(3, 6, dtype=torch.int32), narrow_shape(64, case.group)
    attend_tiles(q, case.store, zeros, zeros, tiles, case.scores, shape, out, q.clone(), torch.full((1, case.heads), NAN))
    merge_parts(q, out[..., 0], zeros, torch.zeros(2, dtype=torch.int32), zeros, out)
    assert bool(out.isnan().all())


@pytest.mark.skipif(sys.platform != "linux", reason="takes 8 GiB of addresses, of which a few pages become memory")
def test_a_store_of_more_numbers_than_32_bits_count():
    kv_heads, head_dim, page = 2, 64, 16
    slots = (1 << 31) // (kv_heads * head_dim) + 2 * page
    blocks = [mmap.mmap(-1, slots * kv_heads * head_dim * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    keys, values = (torch.frombuffer(block, dtype=torch.float16).view(slots, kv_heads, head_dim) for block in blocks)
    case = Case(0, torch.float16, head_dim)
    k, v, q = case.normal(20, kv_heads, head_dim), case.normal(20, kv_heads, head_dim), case.normal(20, 2 * kv_heads, head_dim)
    cos, sin = case.normal(10, 1, head_dim), case.normal(10, 1, head_dim)
    new = torch.arange(slots - 2 * page, slots - 2 * page + 20)
    write_kv(k[:10], v[:10], new[:10], keys, values)
    rotate_and_write(torch.cat((q, k, v), 1)[10:], cos, sin, new[10:], keys, values, 2 * kv_heads)
    torch.testing.assert_close(keys[new[:10]], k[:10], atol=0, rtol=0)
    torch.testing.assert_close(keys[new[10:]].double(), rotate_reference(k[10:], cos, sin), atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(values[new], v, atol=0, rtol=0)

    store = PagedKV(keys, values, torch.tensor([slots // page - 2, slots // page - 1], dtype=torch.int32), page)
    lists, shape = tile_lists([20], [0], [0], [], None, TileLimits(8, 64, 1)), wide_shape(head_dim, 2)
    out, scores = torch.full(q.shape, NAN, dtype=torch.float16), Scores(0.125)
    rows, seen, tiles = (torch.from_numpy(part) for part in (lists.rows, lists.seen, lists.wide))
    attend_tiles(q, store, rows, seen, tiles, scores, shape, out, torch.empty(0), torch.empty(0))
    torch.testing.assert_close(out.double(), attend_reference(q, store, 0, list(range(1, 21)), scores), atol=4e-3, rtol=0)
