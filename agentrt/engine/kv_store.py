"""The KV store: keys and values of every slot, layer by layer. It knows tensors and slots, not pages, sequences or
who owns what: a slot holds what was last written to it, and the page pool alone says whose it is.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch
from torch import Tensor

from agentrt.attention.int_store import key_bytes, value_bytes
from agentrt.errors import UserError
from agentrt.models.config import ModelConfig

#: Bytes below which a tensor is not worth pages of its own.
LARGE = 1 << 22


class KVStore:
    """One key and one value tensor a layer, each [slots, kv_heads, head_dim] in memory of its own; for torch.int8 bytes, as
    `agentrt.attention.int_store` says.

    The tensors are not cleared: on a CPU the system hands out memory as slots are first written, so a large store costs
    nothing until it is used.

    Attributes:
        slots: How many tokens it holds.
        bytes_per_token: What one slot takes, all layers together.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Makes an empty store.

        Args:
            config: The model's shape.
            slots: Tokens to hold, at least 1.
            dtype: Of keys and values.
            device: Where they live.

        Raises:
            UserError: If that much memory cannot be had.
        """
        self.slots = slots
        self.bytes_per_token = bytes_per_token(config, dtype)
        keys, values = ((slots, config.kv_heads, size) for size in _sizes(config, dtype))
        try:
            self._layers = tuple(
                (_empty(keys, dtype, device), _empty(values, dtype, device)) for _ in range(config.layers)
            )
        except (RuntimeError, OSError, OverflowError) as error:  # torch's out-of-memory errors are RuntimeErrors, on a CPU too
            raise UserError(
                f"kv_tokens is {slots}: {slots * self.bytes_per_token / 1e9:.1f} GB of KV, which this machine does not"
                " have; choose fewer",
                param="kv_tokens",
            ) from error

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values."""
        return self._layers[layer]

    @torch.inference_mode()
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies slots in every layer.

        Args:
            source: int64 [n].
            target: int64 [n], no slot twice; may overlap `source`, whose old values are what is copied.
        """
        for layer in self._layers:
            for tensor in layer:
                tensor.index_copy_(0, target, tensor.index_select(0, source))


def _empty(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor not written to; on Linux's CPUs in large pages, since slots are read in any order and small pages cost a walk each."""
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if torch.device(device).type != "cpu" or sys.platform != "linux" or size < LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages refuses; small ones do
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes, all layers together."""
    return config.layers * config.kv_heads * sum(_sizes(config, dtype)) * dtype.itemsize


def _sizes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Elements of a key's head and of a value's."""
    return (key_bytes(config.head_dim), value_bytes(config.head_dim)) if dtype == torch.int8 else (config.head_dim, config.head_dim)
