"""The KV store: its size, memory that is taken only when used, and copies of slots in every layer."""

from __future__ import annotations

import mmap
import sys

import psutil
import pytest
import torch

from agentrt.attention.torch_cpu import narrowed, widened
from agentrt.engine.kv_store import KVStore
from agentrt.errors import UserError
from agentrt.models.config import ModelConfig

SHAPE = ModelConfig(
    architecture="Any", layers=3, heads=6, kv_heads=2, head_dim=4, vocab_size=9, max_context=99, windows=(None,) * 3
)


def test_copies_slots_in_every_layer_even_onto_themselves() -> None:
    store = KVStore(SHAPE, 8, torch.float32)
    for layer in range(3):
        for place, tensor in enumerate(store[layer]):
            tensor.copy_(torch.arange(8)[:, None, None] + 100 * layer + 10 * place)
    store.copy(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 7]))
    for layer in range(3):
        for place, tensor in enumerate(store[layer]):
            assert (tensor[:, 1, 3] - 100 * layer - 10 * place).tolist() == [0, 1, 1, 2, 4, 5, 6, 3]


def test_a_store_of_whole_numbers_has_room_for_scales_and_copies_them() -> None:
    store = KVStore(SHAPE, 8, torch.int8)
    assert store.bytes_per_token == 3 * 2 * ((2 * 4 + 4) + (4 + 4))
    heads = torch.randn(3, 2, 4)
    for layer in range(3):
        for tensor in store[layer]:
            tensor[1:4] = narrowed(heads * (layer + 1), tensor)
    store.copy(torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7]))
    for layer in range(3):
        for tensor in store[layer]:
            assert torch.equal(tensor[5:], tensor[1:4])
            torch.testing.assert_close(widened(tensor[5:], heads), heads * (layer + 1), atol=0.05, rtol=0.05)


def test_a_large_store_costs_nothing_until_it_is_used() -> None:
    before = psutil.Process().memory_info().rss
    store = KVStore(SHAPE, 4_000_000, torch.bfloat16)
    assert len(store) == 3
    assert store.bytes_per_token == 3 * 2 * 2 * 4 * 2
    assert all(tensor.shape == (4_000_000, 2, 4) and tensor.is_contiguous() for tensor in store[1])
    assert psutil.Process().memory_info().rss - before < 0.1 * 4_000_000 * store.bytes_per_token


def test_more_than_the_machine_has_is_refused_with_the_size() -> None:
    with pytest.raises(UserError, match=r"kv_tokens is 1000000000000000: 192000000\.0 GB"):
        KVStore(SHAPE, 10**15, torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux only")
def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            asked.append(True)
            raise OSError(22, "Invalid argument")

    asked: list[bool] = []
    monkeypatch.setattr(mmap, "mmap", Refusing)
    store = KVStore(SHAPE, 1 << 18, torch.float32)
    assert asked
    store[2][1][-1] = 3.0
    assert store[2][1].sum() == 3.0 * 8
