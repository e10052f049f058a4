"""Attention over the paged store by the native kernels of `kernels/cpu/attention.cpp` and `attention_int.cpp`, on a CPU.

Nothing is gathered, padded or masked: a kernel reads slots where they lie, and a prefix that runs share once for all of
them. What they do not know (another device, float16 but in the store) goes to the torch operators of `agentrt.attention.torch_cpu`, which
are also the reference. Invariant: a row's numbers depend on its own sequence alone, bit for bit, whatever runs beside it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import sub

import torch
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.int_store import SCALE_BYTES
from agentrt.attention.torch_cpu import TorchAttention
from agentrt.kernels.cpu.build import load

_DTYPES = (torch.float32, torch.bfloat16)
_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  #: As the kernels number them.


class _Shape(ctypes.Structure):
    """`AttentionShape` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "kv_heads", "head_dim", "q_stride", "k_stride", "v_stride", "q_bfloat16", "kv_kind", "window", "threads")
        ),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


class _Runs(ctypes.Structure):
    """`AttentionRuns` of the kernel."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("first_row", ctypes.c_void_p),
        ("query_lengths", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("new_slots", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("group_sizes", ctypes.c_void_p),
        ("group_members", ctypes.c_void_p),
        ("group_lengths", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch as the kernel wants it.

    Attributes:
        runs: For the kernel.
        address: Of `runs`.
        numbers: What it points to, kept alive; the batch keeps its slots.
    """

    runs: _Runs
    address: int
    numbers: array[int]


class NativeAttention:
    """Attention by the native kernels; see `agentrt.attention.base.Attention` and `FusedAttention` for shapes."""

    def __init__(self, floats: ctypes.CDLL, integers: ctypes.CDLL) -> None:
        """Makes one.

        Args:
            floats: The library of `attention.cpp`.
            integers: Of `attention_int.cpp`.
        """
        self._floats, self._integers = floats.agentrt_attention, integers.agentrt_attention_int
        self._shared = (floats.agentrt_attention_shared, integers.agentrt_attention_int_shared)
        for function in (self._floats, self._integers):
            function.argtypes = [ctypes.c_void_p] * 10
            function.restype = None
        self._fallback = TorchAttention()
        self._shapes: dict[tuple[object, ...], tuple[_Shape, int]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Writes k and v to the store and attends."""
        if not self.knows(q, store):
            return self._fallback(q, k, v, store, batch, spec)
        q, k, v = _dense(q), _dense(k), _dense(v)
        shape = self.shape(q.shape, k.shape[1], (q.stride(0), k.stride(0), v.stride(0)), q.dtype, store[0].dtype, spec)
        return self._run(shape, q.shape, q.dtype, (q.data_ptr(), k.data_ptr(), v.data_ptr(), None, None), store, batch)

    def from_qkv(
        self, qkv: Tensor, angles: tuple[Tensor, Tensor], heads: int, store: tuple[Tensor, Tensor], batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """Rotates q and k, writes k and v to the store, and attends, all in one call of the kernel.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim]: heads of q, of k, of v.
            angles: Cosines and sines of the new tokens, as `agentrt.models.rotary.Rotary.angles` gives them.
            heads: Of q.
            store, batch, spec: As for a call.
        """
        tokens, together, dim = qkv.shape
        rotated = (together + heads) // 2
        cos, sin = angles
        if not self.knows(qkv, store):
            qk = qkv[:, :rotated]
            qk = (qk * cos).addcmul_(qk.roll(dim // 2, -1), sin)
            return self._fallback(qk[:, :heads], qk[:, heads:], qkv[:, rotated:], store, batch, spec)
        qkv = _dense(qkv)
        stride, first, head_bytes = qkv.stride(0), qkv.data_ptr(), dim * qkv.itemsize
        out = (tokens, heads, dim)
        shape = self.shape(out, rotated - heads, (stride, stride, stride), qkv.dtype, store[0].dtype, spec)
        inputs = (first, first + heads * head_bytes, first + rotated * head_bytes, cos.data_ptr(), sin.data_ptr())
        return self._run(shape, out, qkv.dtype, inputs, store, batch)

    def knows(self, q: Tensor, store: tuple[Tensor, Tensor]) -> bool:
        """Whether the kernel takes such tensors."""
        keys = store[0]
        known = keys.dtype in _KV_DTYPES and (keys.dtype != torch.int8 or takes_integers(store[1].shape[-1] - SCALE_BYTES))
        return known and q.dtype in _DTYPES and q.is_cpu

    def function(self, kv_dtype: torch.dtype) -> int:
        """The address of the kernel for a store of that dtype, as the threads of a team call it."""
        return ctypes.cast(self._shared[kv_dtype == torch.int8], ctypes.c_void_p).value or 0

    def runs(self, batch: AttentionBatch) -> int:
        """The address of a batch's `AttentionRuns`, which the batch keeps."""
        key = (NativeAttention, batch.attending)
        prepared = batch.prepared.get(key)
        if not isinstance(prepared, _Prepared):
            prepared = batch.prepared[key] = _prepare(batch)
        return prepared.address

    def _run(
        self,
        shape: int,
        out: tuple[int, ...],
        dtype: torch.dtype,
        inputs: tuple[int | None, ...],
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        result = torch.empty(out, dtype=dtype)
        attend = self._integers if store[0].dtype == torch.int8 else self._floats
        attend(shape, self.runs(batch), *inputs, store[0].data_ptr(), store[1].data_ptr(), result.data_ptr())
        return result

    def shape(
        self, q: tuple[int, ...], kv_heads: int, strides: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype, spec: AttentionSpec
    ) -> int:
        """The address of a call's `AttentionShape`, kept as long as this lives; few differ.

        Args:
            q: Its shape.
            kv_heads: Heads of k and v.
            strides: Of q, k and v, from token to token.
            dtype: Of q, k, v and the answer.
            kv_dtype: Of the store.
            spec: Scale, window and softcap.
        """
        threads = torch.get_num_threads()
        key = (q[1], q[2], kv_heads, strides, dtype, kv_dtype, spec, threads)
        found = self._shapes.get(key)
        if found is None:
            kind = _KV_DTYPES.index(kv_dtype)
            shape = _Shape(q[1], kv_heads, q[2], *strides, dtype == torch.bfloat16, kind, spec.window or 0, threads, spec.scale, spec.softcap or 0.0)
            found = self._shapes[key] = (shape, ctypes.addressof(shape))
        return found[1]


def cpu_attention() -> Attention:
    """The best attention of this machine's processor: native where its kernel can be had, else torch's operators."""
    floats, integers = load("attention"), load("attention_int")
    return TorchAttention() if floats is None or integers is None else NativeAttention(floats, integers)


def takes_integers(head_dim: int) -> bool:
    """Whether the kernel for keys and values in whole numbers takes such heads: whole vectors, whose sums leave queries enough of 32 bits."""
    return head_dim % 32 == 0 and head_dim <= 256


def _dense(heads: Tensor) -> Tensor:
    """As it is, if each token's heads lie together in memory; else a copy."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _prepare(batch: AttentionBatch) -> _Prepared:
    lengths, contexts, sharing = batch.query_lengths, batch.context_lengths, batch.shared
    attending = lengths if batch.attending is None else batch.attending
    ends = tuple(accumulate(lengths))
    parts: tuple[Sequence[int], ...] = (
        tuple(map(sub, ends, attending)),
        attending,
        [context + length - some for context, length, some in zip(contexts, lengths, attending, strict=True)],
        [slots.data_ptr() for slots in batch.slots],
        [len(members) for members, _ in sharing],
        [member for members, _ in sharing for member in members],
        [length for _, length in sharing],
    )
    numbers = array("q", chain(*parts))
    start, _ = numbers.buffer_info()
    begins = accumulate((numbers.itemsize * len(part) for part in parts), initial=start)
    first, queries, before, places, sizes, members, shared, _ = begins
    runs = _Runs(len(lengths), ends[-1], first, queries, before, places, batch.new_slots.data_ptr(), len(sharing), sizes, members, shared)
    return _Prepared(runs, ctypes.addressof(runs), numbers)
