"""The native attention against the definition, and against itself: what runs beside a sequence changes no bit of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from agentrt.kernels.cpu.build import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.int_store import KEY_MOST, VALUE_MOST, dequantized, key_bytes, quantized, value_bytes
from agentrt.attention.native_cpu import NativeAttention, cpu_attention, takes_integers
from agentrt.attention.reference import ReferenceAttention
from agentrt.attention.torch_cpu import TorchAttention, narrowed
from agentrt.models.rotary import rotate

pytestmark = pytest.mark.skipif(load("attention") is None or load("attention_int") is None, reason="no native kernels here: no compiler, or AGENTRT_NATIVE=0")


def native() -> NativeAttention:
    attention = cpu_attention()
    assert isinstance(attention, NativeAttention)
    return attention


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Run:
    new: int
    context: int


@dataclass(frozen=True)
class Case:
    """A batch, its store and its qkv."""

    batch: AttentionBatch
    store: tuple[Tensor, Tensor]
    qkv: Tensor
    heads: Heads

    def attend(self, attention: Attention, spec: AttentionSpec, qkv: Tensor | None = None) -> Tensor:
        """On a copy of the store."""
        heads, kv_heads = self.heads.heads, self.heads.kv_heads
        q, k, v = (self.qkv if qkv is None else qkv).split([heads, kv_heads, kv_heads], 1)
        return attention(q, k, v, (self.store[0].clone(), self.store[1].clone()), self.batch, spec)

    def without_sharing(self) -> Case:
        batch = AttentionBatch(self.batch.query_lengths, self.batch.context_lengths, self.batch.slots, self.batch.new_slots)
        return Case(batch, self.store, self.qkv, self.heads)

    def alone(self, run: int) -> Case:
        first = sum(self.batch.query_lengths[:run])
        rows = slice(first, first + self.batch.query_lengths[run])
        only = slice(run, run + 1)
        batch = AttentionBatch(self.batch.query_lengths[only], self.batch.context_lengths[only], self.batch.slots[only], self.batch.new_slots[rows])
        return Case(batch, self.store, self.qkv[rows], self.heads)


def make(heads: Heads, runs: list[Run], *, page: int, scattered: bool, shared: int, seed: int, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> Case:
    """Runs that all begin with the same `shared` tokens; slots in pages, in or out of order; NaN in every slot that nobody may read."""
    generator = torch.Generator().manual_seed(seed)
    pages = sum(-(-(run.new + run.context) // page) for run in runs) + -(-shared // page) + 4
    order = torch.randperm(pages, generator=generator) if scattered else torch.arange(pages)
    free = (order[:, None] * page + torch.arange(page)).view(-1)
    prefix, free = free[:shared], free[-(-shared // page) * page :]
    kv_dtype = kv_dtype or dtype
    nan = -1 if kv_dtype == torch.int8 else float("nan")  # bytes of ones: a scale that is no number
    sizes = (key_bytes(heads.dim), value_bytes(heads.dim)) if kv_dtype == torch.int8 else (heads.dim, heads.dim)
    store = tuple(torch.full((pages * page, heads.kv_heads, size), nan, dtype=kv_dtype) for size in sizes)
    slots = []
    for run in runs:
        length = run.new + run.context
        slots.append(torch.cat((prefix, free[:length])))
        free = free[-(-length // page) * page :]
    for tensor in store:
        for places in (prefix, *(slot[: len(slot) - run.new] for slot, run in zip(slots, runs, strict=True))):
            tensor[places] = narrowed(torch.randn(len(places), heads.kv_heads, heads.dim, generator=generator), tensor)
    for tensor in store:  # the prefix was written once more by each run: all read the last
        tensor[prefix] = narrowed(torch.randn(shared, heads.kv_heads, heads.dim, generator=generator), tensor)
    batch = AttentionBatch(
        tuple(run.new for run in runs),
        tuple(run.context + shared for run in runs),
        tuple(slots),
        torch.cat([slot[len(slot) - run.new :] for slot, run in zip(slots, runs, strict=True)]),
        shared=((tuple(range(len(runs))), shared),) if shared and len(runs) > 1 else (),
    )
    tokens = sum(batch.query_lengths)
    qkv = torch.randn(tokens, heads.heads + 2 * heads.kv_heads, heads.dim, generator=generator).to(dtype)
    return Case(batch, store, qkv, heads)


@contextmanager
def poisoned_outputs(threads: int) -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


heads = st.builds(
    lambda kv_heads, group, dim: Heads(kv_heads * group, kv_heads, dim),
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3, 4, 7]), st.sampled_from([64, 80, 96, 128, 256, 6, 40]),
)  # fmt: skip
int8_heads = st.builds(lambda kv_heads, group, dim: Heads(kv_heads * group, kv_heads, dim), st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 7]), st.sampled_from([32, 64, 96, 128, 256]))
runs = st.lists(st.builds(Run, st.sampled_from([1, 1, 1, 2, 5, 17, 33, 70]), st.sampled_from([0, 1, 40, 63, 64, 200])), min_size=1, max_size=4)
specs = st.builds(AttentionSpec, st.sampled_from([0.1, 0.3]), st.sampled_from([None, None, 1, 4, 70, 1000]), st.sampled_from([None, 3.0]))
shared = st.sampled_from([0, 0, 30, 64, 150])


@settings(max_examples=25)
@given(heads, runs, specs, shared, st.sampled_from([1, 16]), st.booleans(), st.sampled_from([1, 3]), st.integers(0, 2**20))
def test_equals_the_reference(heads: Heads, runs: list[Run], spec: AttentionSpec, shared: int, page: int, scattered: bool, threads: int, seed: int) -> None:
    case = make(heads, runs, page=page, scattered=scattered, shared=shared, seed=seed)
    with poisoned_outputs(threads):
        got = case.attend(native(), spec)
    torch.testing.assert_close(got, case.attend(ReferenceAttention(), spec), atol=2e-5, rtol=1e-5)


@settings(max_examples=20)
@given(
    int8_heads, runs, specs, shared, st.sampled_from([1, 16]), st.booleans(), st.sampled_from([1, 3]), st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**20),
)  # fmt: skip
def test_a_store_of_whole_numbers_is_the_reference_on_what_it_holds(
    heads: Heads, runs: list[Run], spec: AttentionSpec, shared: int, page: int, scattered: bool, threads: int, dtype: torch.dtype, seed: int
) -> None:
    case = make(heads, runs, page=page, scattered=scattered, shared=shared, seed=seed, dtype=dtype, kv_dtype=torch.int8)
    held = tuple(dequantized(tensor, heads.dim, torch.float32) for tensor in case.store)
    qkv = case.qkv.float()
    for part, tensor in zip(qkv[:, heads.heads :].split(heads.kv_heads, 1), case.store, strict=True):
        part.copy_(dequantized(quantized(part, tensor), heads.dim, torch.float32))
    expected = Case(case.batch, held, qkv, heads).attend(ReferenceAttention(), spec)
    with poisoned_outputs(threads):
        got = case.attend(native(), spec)
    near = {"atol": 4e-3, "rtol": 4e-3} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}  # q of 256 dimensions has 12 bits
    torch.testing.assert_close(got.float(), expected, **near)
    torch.testing.assert_close(case.attend(TorchAttention(), spec).float(), expected, **near if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2})


@settings(max_examples=10)
@given(int8_heads, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**20))
def test_what_is_stored_in_whole_numbers_is_what_torch_stores(heads: Heads, dtype: torch.dtype, seed: int) -> None:
    """To the last bit of a scale, and to one step where a number lies between two; what is not finite stays so, and nothing small is lost."""
    case = make(heads, [Run(6, 3)], page=1, scattered=True, shared=0, seed=seed, dtype=dtype, kv_dtype=torch.int8)
    case.qkv[:4] *= torch.tensor([1e-30, 1e-3, 1e4, 0.0]).view(4, 1, 1)
    case.qkv[4, -1, 1], case.qkv[5, -1, 1] = float("nan"), float("inf")
    q, k, v = case.qkv.split([heads.heads, heads.kv_heads, heads.kv_heads], 1)
    native()(q, k, v, case.store, case.batch, AttentionSpec(0.1))
    for stored, told, numbers, most in zip(case.store, (k, v), (torch.int16, torch.int8), (KEY_MOST, VALUE_MOST), strict=True):
        mine, theirs = stored[case.batch.new_slots], quantized(told, stored)
        assert torch.equal(mine[..., -4:], theirs[..., -4:])
        mine_q, theirs_q = (part[..., :-4].contiguous().view(numbers).int() for part in (mine, theirs))
        assert (mine_q - theirs_q).abs().max() <= 1
        near = dequantized(mine, heads.dim, torch.float32) - told.float()
        largest = told[:4].float().abs().amax(-1)
        assert (near[:4].abs().amax(-1) <= largest / most * 0.51).all()


@settings(max_examples=25)
@given(st.one_of(st.tuples(heads, st.none()), st.tuples(int8_heads, st.just(torch.int8))), runs, specs, shared, st.integers(0, 2**20))
def test_neighbours_sharing_and_threads_change_no_bit(
    shape: tuple[Heads, torch.dtype | None], runs: list[Run], spec: AttentionSpec, shared: int, seed: int
) -> None:
    heads, kv_dtype = shape
    case = make(heads, runs, page=1, scattered=True, shared=shared, seed=seed, kv_dtype=kv_dtype)
    with poisoned_outputs(3):
        together = case.attend(native(), spec)
    with poisoned_outputs(1):
        assert torch.equal(case.without_sharing().attend(native(), spec), together)
        alone = torch.cat([case.alone(run).attend(native(), spec) for run in range(len(runs))])
    assert torch.equal(alone, together)


few = st.lists(st.builds(Run, st.sampled_from([1, 1, 2, 5]), st.sampled_from([0, 60, 64, 200, 700])), min_size=1, max_size=5)


@settings(max_examples=30)
@given(int8_heads, few, specs, shared, st.sampled_from([torch.float32, torch.int8]), st.sampled_from([2, 3, 5, 16]), st.integers(0, 2**20))
def test_where_few_rows_are_divided_changes_no_bit(
    heads: Heads, runs: list[Run], spec: AttentionSpec, shared: int, kv_dtype: torch.dtype, threads: int, seed: int
) -> None:
    """Between sequences, segments and KV heads, among fewer and more threads than there are of any of them."""
    case = make(heads, runs, page=1, scattered=True, shared=shared, seed=seed, kv_dtype=kv_dtype)
    with poisoned_outputs(1):
        expected = case.attend(native(), spec)
    with poisoned_outputs(threads):
        assert torch.equal(case.attend(native(), spec), expected)


@settings(max_examples=25)
@given(heads, runs, specs, shared, st.sampled_from([1, 3]), st.data())
def test_tokens_that_need_not_attend_change_no_bit(heads: Heads, runs: list[Run], spec: AttentionSpec, shared: int, threads: int, data: st.DataObject) -> None:
    """Of the others, nor of what is written to the store."""
    case = make(heads, runs, page=1, scattered=True, shared=shared, seed=data.draw(st.integers(0, 2**20)))
    wanted = torch.tensor(data.draw(st.lists(st.integers(0, len(case.qkv) - 1), max_size=3)), dtype=torch.int64)
    qkv = case.qkv.split([heads.heads, heads.kv_heads, heads.kv_heads], 1)
    stores = [(case.store[0].clone(), case.store[1].clone()) for _ in range(2)]
    with poisoned_outputs(threads):
        every, some = (native()(*qkv, store, batch, spec) for store, batch in zip(stores, (case.batch, case.batch.only(wanted)), strict=True))
    assert torch.equal(some[wanted], every[wanted])
    for mine, theirs in zip(*stores, strict=True):
        assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("cut", [1, 30, 64, 99])
def test_where_a_chunk_is_cut_changes_no_bit(cut: int, kv_dtype: torch.dtype) -> None:
    case = make(Heads(6, 2, 64), [Run(100, 40)], page=1, scattered=True, shared=0, seed=cut, kv_dtype=kv_dtype)
    spec = AttentionSpec(0.1, window=80)
    store, slots = (case.store[0].clone(), case.store[1].clone()), case.batch.slots[0]
    parts = []
    for first, stop in ((0, cut), (cut, 100)):
        q, k, v = case.qkv[first:stop].split([6, 2, 2], 1)
        batch = AttentionBatch((stop - first,), (40 + first,), (slots[: 40 + stop],), slots[40 + first : 40 + stop])
        parts.append(native()(q, k, v, store, batch, spec))
    assert torch.equal(torch.cat(parts), case.attend(native(), spec))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [Heads(9, 3, 64), Heads(2, 2, 40), Heads(14, 2, 128)], ids=str)
def test_a_chunk_is_its_tokens_one_by_one(shape: Heads, kv_dtype: torch.dtype) -> None:
    """Many rows go another way through the same sums than one does, and runs that share a prefix than those that do not."""
    if kv_dtype == torch.int8 and not takes_integers(shape.dim):
        shape = Heads(shape.heads, shape.kv_heads, 96)
    new, spec = 75, AttentionSpec(0.2)
    case = make(shape, [Run(new, 50)], page=1, scattered=True, shared=0, seed=new, kv_dtype=kv_dtype)
    together = case.attend(native(), spec)
    store, slots = (case.store[0].clone(), case.store[1].clone()), case.batch.slots[0]
    alone = []
    for token in range(new):
        q, k, v = case.qkv[token : token + 1].split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        last = 50 + token
        alone.append(native()(q, k, v, store, AttentionBatch((1,), (last,), (slots[: last + 1],), slots[last : last + 1]), spec))
    assert torch.equal(together, torch.cat(alone))
    branches = make(shape, [Run(1, 70)] * 40, page=1, scattered=True, shared=130, seed=new, kv_dtype=kv_dtype)
    together = branches.attend(native(), spec)
    assert torch.equal(together, torch.cat([branches.alone(run).attend(native(), spec) for run in range(40)]))


@settings(max_examples=12)
@given(heads, runs, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 2**20))
def test_a_store_of_16_bits_is_the_reference_rounded(heads: Heads, runs: list[Run], dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> None:
    """Under activations in float32 too; what is beyond float16's range is its largest value, small values keep what bits there are."""
    case = make(heads, runs, page=1, scattered=True, shared=0, seed=seed, dtype=dtype, kv_dtype=kv_dtype)
    case.qkv[:, heads.heads :] *= torch.tensor(10.0) ** torch.randint(-8, 1, (1, 1, heads.dim), generator=torch.Generator().manual_seed(seed))
    case.qkv[0, -1, 0] = 1e30 if kv_dtype == torch.float16 else 3.0
    spec = AttentionSpec(heads.dim**-0.5)
    store = (case.store[0].float(), case.store[1].float())
    exact = Case(case.batch, store, case.qkv.float(), heads)
    kv = narrowed(case.qkv.float(), case.store[0]).float()[:, heads.heads :]
    expected = exact.attend(ReferenceAttention(), spec, torch.cat((exact.qkv[:, : heads.heads], kv), 1))
    with poisoned_outputs(1):
        got = case.attend(native(), spec)
    assert got.dtype == dtype
    near = {"atol": 5e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(got.float(), expected, **near)
    torch.testing.assert_close(case.attend(TorchAttention(), spec).float(), expected, **near if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2})


@settings(max_examples=12)
@given(heads, runs, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**20))
def test_rotating_inside_is_rotating_before(heads: Heads, runs: list[Run], dtype: torch.dtype, seed: int) -> None:
    """And what is written to the store is the same, in every slot."""
    case = make(heads, runs, page=1, scattered=True, shared=0, seed=seed, dtype=dtype)
    angles = torch.rand(len(case.qkv), 1, heads.dim // 2, generator=torch.Generator().manual_seed(seed)) * 6
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    spec, rotated = AttentionSpec(0.1), heads.heads + heads.kv_heads
    before = torch.cat((rotate(case.qkv[:, :rotated], cos, sin), case.qkv[:, rotated:]), 1)
    stores = [tuple(tensor.clone() for tensor in case.store) for _ in range(2)]
    expected = native()(before[:, : heads.heads], before[:, heads.heads : rotated], before[:, rotated:], stores[0], case.batch, spec)
    with poisoned_outputs(1):
        got = native().from_qkv(case.qkv, (cos, sin), heads.heads, stores[1], case.batch, spec)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}  # torch rounds twice more
    torch.testing.assert_close(got, expected, **near)
    for mine, theirs in zip(stores[1], stores[0], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, **near)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_nan_reaches_the_answers_that_saw_it_and_no_others(kv_dtype: torch.dtype) -> None:
    """A fault of the model has to be found at the logits, in the request whose it is."""
    for part in (0, 1, 2):  # in q, in k, in v
        case = make(Heads(4, 2, 64), [Run(60, 100), Run(3, 20)], page=1, scattered=True, shared=0, seed=part, kv_dtype=kv_dtype)
        case.qkv[30, [0, 4, 6][part], 3] = float("nan")
        got = case.attend(native(), AttentionSpec(0.1))
        assert got[30, 0].isnan().any()
        assert got[60:].isfinite().all()
        if kv_dtype == torch.int8:  # in floats, weights of 0 times a NaN in the same panel are NaN
            assert got[:30].isfinite().all()


def test_activations_in_float16_go_to_the_operators() -> None:
    case = make(Heads(4, 2, 64), [Run(1, 100), Run(3, 20)], page=1, scattered=True, shared=0, seed=1, dtype=torch.float16)
    spec = AttentionSpec(0.1)
    assert torch.equal(case.attend(native(), spec), case.attend(TorchAttention(), spec))


def test_the_operators_run_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(cpu_attention(), NativeAttention)
    monkeypatch.setattr("agentrt.attention.native_cpu.load", lambda name: None)
    assert isinstance(cpu_attention(), TorchAttention)
