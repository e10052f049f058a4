"""All layers in one native call: bit for bit what the same kernels give when Python calls them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrt.kernels.cpu.build import load
from torch import Tensor

from agentrt.attention.base import AttentionBatch
from agentrt.attention.native_cpu import NativeAttention, cpu_attention
from agentrt.engine.kv_store import KVStore
from agentrt.models.decoder import Decoder
from agentrt.models.loader import load_model

pytestmark = pytest.mark.skipif(load("decoder") is None, reason="no native kernels here: no compiler, or AGENTRT_NATIVE=0")

FAMILIES = {
    "llama": ("Llama", {}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "window": ("Mistral", {"sliding_window": 8}),
    "biases of qkv": ("Qwen2", {"tie_word_embeddings": True}),
}


class OneByOne:
    """The native attention under another name, which the native layers do not know."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention

    def __call__(self, *arguments: Any) -> Tensor:
        return self._attention(*arguments)

    def from_qkv(self, *arguments: Any) -> Tensor:
        return self._attention.from_qkv(*arguments)


def decoder(model: Any, folder: Path, bits: int | None) -> Decoder:
    model.save_pretrained(folder)
    loaded = load_model(folder, bits=bits).decoder
    assert isinstance(loaded, Decoder)
    return loaded


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "kv_dtype", "threads"), [(4, torch.float32, 2), (8, torch.float32, 5), (4, torch.int8, 1), (4, torch.int8, 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_bit_differs(
    name: str, bits: int, kv_dtype: torch.dtype, threads: int, tiny: Callable[..., Any], paged: Any, tmp_path: Path
) -> None:
    """Steps of 71 rows, of a few, of two and of one: of rows for every thread, and of fewer rows than threads."""
    family, changes = FAMILIES[name]
    model = decoder(tiny(family, **changes, head_dim=32), tmp_path, bits)
    attention = cpu_attention()
    assert isinstance(attention, NativeAttention)
    assert model.native is not None
    prompts = {0: list(range(3, 90)), 1: list(range(60, 90)), 2: list(range(40, 52)), 3: list(range(20, 34))}
    sizes = (64, 5, 1, 1)
    with on_threads(1):
        expected = paged(model, scattered=True, attention=OneByOne(attention), kv_dtype=kv_dtype).run(prompts, lambda sequence: sizes[sequence])
    assert model.native.seconds == (0, 0, 0)
    with on_threads(threads):
        got = paged(model, scattered=True, attention=attention, kv_dtype=kv_dtype).run(prompts, lambda sequence: sizes[sequence])
    assert all(seconds > 0 for seconds in model.native.seconds)
    for sequence, rows in expected.items():
        assert rows.isfinite().all()
        assert torch.equal(got[sequence], rows)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_wanted_row_of_two(threads: int, tiny: Callable[..., Any], tmp_path: Path) -> None:
    """So few rows that each thread has its own, of which the last layer drops one."""
    model, attention = decoder(tiny("Llama", head_dim=32), tmp_path, 4), cpu_attention()
    batch = AttentionBatch((2,), (0,), (torch.tensor([5, 3]),), torch.tensor([5, 3]))
    given = (torch.tensor([7, 9]), torch.tensor([0, 1]), batch, attention)
    with on_threads(threads):
        both = model.forward(*given, KVStore(model.config, 8, torch.float32))
        for row in (0, 1):
            one = model.forward(*given, KVStore(model.config, 8, torch.float32), torch.tensor([row]))
            assert torch.equal(one, both[row : row + 1])
        assert model.forward(*given, KVStore(model.config, 8, torch.float32), torch.tensor([], dtype=torch.int64)).shape == (0, both.shape[1])


def test_ids_and_positions_that_there_are_not(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model, attention = decoder(tiny("Llama"), tmp_path, 4), cpu_attention()
    batch = AttentionBatch((1,), (0,), (torch.tensor([0]),), torch.tensor([0]))
    for token_id, position in ((101, 0), (-1, 0), (5, 1), (5, -1)):
        with pytest.raises(IndexError, match=f"id {token_id} and position {position}"):
            model.forward(torch.tensor([token_id]), torch.tensor([position]), batch, attention, KVStore(model.config, 8, torch.float32))


@pytest.mark.parametrize(("threads", "kv_dtype", "head_dim"), [(1, torch.float32, 10), (3, torch.int8, 32)])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_are_not_wanted_change_no_bit(
    name: str, threads: int, kv_dtype: torch.dtype, head_dim: int, tiny: Callable[..., Any], wanted_alike: Any, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    model, attention = decoder(tiny(family, **changes, head_dim=head_dim), tmp_path, 4), cpu_attention()
    assert isinstance(attention, NativeAttention)
    assert model.native is not None
    with on_threads(threads):
        wanted_alike(model, attention, same_bits, kv_dtype)
        taken = model.native.seconds
        wanted_alike(model, OneByOne(attention), same_bits, kv_dtype)
        assert model.native.seconds == taken


def same_bits(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected)


def test_parts_of_different_formats_lie_side_by_side(tiny: Callable[..., Any], paged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrt.kernels.quantized_linear import QuantizedWeight

    from agentrt.models.loader import _FusedWeights

    def mixed(self: _FusedWeights, name: str) -> list[QuantizedWeight]:
        values = self[name]
        first = values.shape[0] // 2
        return [QuantizedWeight.of(values[:first], 4), QuantizedWeight.of(values[first:], 8)]

    monkeypatch.setattr(_FusedWeights, "stored", mixed)
    model, attention = decoder(tiny("Qwen2"), tmp_path, 4), cpu_attention()
    assert isinstance(attention, NativeAttention)
    prompts = {0: list(range(3, 40))}
    expected = paged(model, scattered=False, attention=OneByOne(attention)).run(prompts, lambda _: 30)
    got = paged(model, scattered=False, attention=attention).run(prompts, lambda _: 30)
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize(("family", "bits"), [("Qwen3", 4), ("Gemma2", 4), ("Llama", None)])
def test_what_it_does_not_know_goes_layer_by_layer(family: str, bits: int | None, tiny: Callable[..., Any], tmp_path: Path) -> None:
    assert decoder(tiny(family), tmp_path, bits).native is None
