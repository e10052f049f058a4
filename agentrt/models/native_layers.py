"""A decoder from token ids to its last norm in one call of `kernels/cpu/decoder.cpp`, for models whose matrices have few bits, on a CPU.

It is what `agentrt.models.decoder.Decoder.forward` does, without Python between its calls: the same kernels on the same numbers, and
embeddings and angles from the same tables, so the same bits. `native_layers` answers None for what it does not know (norms of single heads,
norms behind attention, matrices in float), and `forward` answers None for an attention that is not the native one; then the decoder goes
layer by layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.native_cpu import NativeAttention
from agentrt.kernels.cpu.build import load
from agentrt.kernels.quantized_linear import NativeLinear
from agentrt.models.config import ModelConfig
from agentrt.models.linear import Linear, parts
from agentrt.models.native_rows import KINDS
from agentrt.models.rotary import Rotary

if TYPE_CHECKING:
    from agentrt.models.decoder import LayeredStore

_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p
#: What is called, by its field, its library and its name; attention comes with the store.
_FUNCTIONS = (
    ("linear", "linear", "linear_shared"),
    ("linear_memory", "linear", "linear_memory"),
    ("linear_coming", "linear", "linear_coming"),
    ("norm", "fused", "agentrt_rms_norm"),
    ("gate", "fused", "agentrt_gate"),
)


class _Kernels(ctypes.Structure):
    """`DecoderKernels` of the kernel."""

    _fields_ = tuple((name, _POINTER) for name in ("linear", "linear_memory", "linear_coming", "attention", "norm", "gate"))


class _Matrix(ctypes.Structure):
    """`DecoderMatrix` of the kernel."""

    _fields_ = (("packed", _POINTER), ("bias", _POINTER), *((name, _LONG) for name in ("inputs", "outputs", "bits", "half", "minima")))


class _Layer(ctypes.Structure):
    """`DecoderLayer` of the kernel."""

    _fields_ = (
        ("before_attention", _POINTER),
        ("before_mlp", _POINTER),
        ("shape", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("local", _LONG),
        ("parts", _LONG * 4),
        ("part", _POINTER),
    )


class _Wanted(ctypes.Structure):
    """`DecoderWanted` of the kernel."""

    _fields_ = (("runs", _POINTER), ("rows", _POINTER), ("count", _LONG))


class _Shape(ctypes.Structure):
    """`DecoderShape` of the kernel."""

    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocabulary", "activation", "threads")),
        ("eps", ctypes.c_double),
        ("embedding_scale", ctypes.c_double),
        ("embedding", _POINTER),
        ("norm", _POINTER),
        ("layer", _POINTER),
    )


class _Tokens(ctypes.Structure):
    """`DecoderTokens` of the kernel."""

    _fields_ = (("count", _LONG), ("ids", _POINTER), ("positions", _POINTER), ("angles", _POINTER), ("reach", _LONG))


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What the kernel has to know of a layer.

    Attributes:
        spec: For attention.
        local: Whether it turns by the local angles.
        norms: Weights of the norms before attention and before the MLP.
        matrices: Of q, k and v; of the output; of gate and up; of down.
    """

    spec: AttentionSpec
    local: bool
    norms: tuple[Tensor, Tensor]
    matrices: tuple[Linear, Linear, Linear, Linear]


@dataclass(frozen=True, slots=True)
class Ends:
    """What is before the layers and behind them.

    Attributes:
        embedding: [vocabulary, width].
        embedding_scale: Factor on it.
        rope, local_rope: Angles of layers that see all, and of local ones.
        norm: Weight of the last norm.
        eps: Of all norms.
    """

    embedding: Tensor
    embedding_scale: float
    rope: Rotary
    local_rope: Rotary
    norm: Tensor
    eps: float


class NativeLayers:
    """A model's layers, ready to be called.

    Attributes:
        seconds: What all calls so far took: linears, attention, norms with activations.
    """

    def __init__(self, libraries: dict[str, ctypes.CDLL], config: ModelConfig, layers: Sequence[LayerParts], ends: Ends) -> None:
        """Writes down where everything is; `native_layers` says for what.

        Args:
            libraries: By the names of their sources.
            config: The model's.
            layers: In order.
            ends: What is around them.
        """
        flags = config.decoder
        assert flags is not None  # `native_layers` has looked
        self._run = libraries["decoder"].agentrt_decoder
        self._run.argtypes, self._run.restype = (_POINTER,) * 8, _LONG
        self._kernels = _Kernels(
            **{field: ctypes.cast(getattr(libraries[name], function), _POINTER).value for field, name, function in _FUNCTIONS}
        )
        self._parts, self._config = tuple(layers), config
        found = [[_Matrix(*part.held) for matrix in layer.matrices for part in parts(matrix) if isinstance(part, NativeLinear)] for layer in layers]
        self._matrices = [(_Matrix * len(matrices))(*matrices) for matrices in found]
        self._layers = (_Layer * len(layers))(*map(self._layer, layers, self._matrices))
        heads = (config.heads, config.kv_heads, config.head_dim)
        self._ends = ends
        sizes = (len(layers), flags.width, *heads, flags.mlp_width, len(ends.embedding), KINDS[flags.activation], 0)
        places = (ends.embedding.data_ptr(), ends.norm.data_ptr(), ctypes.addressof(self._layers))
        self._shape = _Shape(*sizes, ends.eps, ends.embedding_scale, *places)
        memory = libraries["decoder"].agentrt_decoder_memory
        memory.argtypes, memory.restype = (_POINTER, _LONG), _LONG
        self._floats = memory
        self._memory = torch.empty(0)
        self._tables: tuple[Tensor, ...] = ()
        self._angles, self._reach = (_POINTER * 4)(), 0  # where they are, and how many positions they have
        # What never changes from call to call, as the kernel takes it.
        self._fixed = (ctypes.addressof(self._kernels), ctypes.addressof(self._shape))
        self._placed: tuple[NativeAttention | None, LayeredStore | None, int] = (None, None, 0)
        self._seconds = (ctypes.c_double * 3)()

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Copied."""
        linears, attention, rows = self._seconds
        return linears, attention, rows

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, attention: Attention, store: LayeredStore, wanted: Tensor | None
    ) -> Tensor | None:
        """Runs all layers.

        Args:
            token_ids, positions, batch, attention, store: As for `Decoder.forward`.
            wanted: int64 [rows], fewer than there are tokens, in any order; None: all.

        Returns:
            [rows, width], behind the last norm; None if the attention is not the native one.

        Raises:
            IndexError: A token's id is not the model's, or its position is beyond its sequence.
        """
        if not isinstance(attention, NativeAttention) or not attention.knows(self._ends.embedding, store[0]):
            return None
        self._place(attention, store)
        self._reach_to(max(map(add, batch.context_lengths, batch.query_lengths)))
        tokens, width = len(token_ids), self._ends.embedding.shape[1]
        floats = self._floats(self._fixed[1], tokens)
        if floats > self._memory.shape[0]:
            self._memory = torch.empty(floats)
        out = torch.empty((tokens if wanted is None else len(wanted), width))
        given = _Tokens(tokens, token_ids.data_ptr(), positions.data_ptr(), ctypes.addressof(self._angles), self._reach)
        asked = None if wanted is None else ctypes.byref(_Wanted(attention.runs(batch.only(wanted)), wanted.data_ptr(), len(wanted)))
        places = (self._memory.data_ptr(), out.data_ptr(), self._seconds)
        wrong = self._run(*self._fixed, ctypes.byref(given), attention.runs(batch), asked, *places)
        if wrong >= 0:
            raise IndexError(
                f"token {wrong} of a step has id {int(token_ids[wrong])} and position {int(positions[wrong])}; the model has {self._shape.vocabulary} ids,"
                f" and the step's longest sequence is below position {self._reach}"
            )
        return out

    def _reach_to(self, reach: int) -> None:
        """Makes sure that the angles of all positions below `reach` are known."""
        if reach <= self._reach:
            return
        self._tables = (*self._ends.rope.table(reach), *self._ends.local_rope.table(reach))
        self._angles[:] = [table.data_ptr() for table in self._tables]
        self._reach = min(map(len, self._tables))

    def _layer(self, layer: LayerParts, matrices: ctypes.Array[_Matrix]) -> _Layer:
        counts = (_LONG * 4)(*(len(parts(matrix)) for matrix in layer.matrices))
        first, second = (norm.data_ptr() for norm in layer.norms)
        return _Layer(first, second, None, None, None, layer.local, counts, ctypes.addressof(matrices))

    def _place(self, attention: NativeAttention, store: LayeredStore) -> None:
        """Says where the store is and what attention is asked; both seldom change."""
        threads = torch.get_num_threads()
        if self._placed[0] is attention and self._placed[1] is store and self._placed[2] == threads:
            return
        config = self._config
        stride = (config.heads + 2 * config.kv_heads) * config.head_dim
        q = (0, config.heads, config.head_dim)
        for index, (layer, part) in enumerate(zip(self._layers, self._parts, strict=True)):
            keys, values = store[index]
            layer.shape = attention.shape(q, config.kv_heads, (stride, stride, stride), torch.float32, keys.dtype, part.spec)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._kernels.attention = attention.function(store[0][0].dtype)
        self._shape.threads = threads
        self._placed = (attention, store, threads)


def native_layers(config: ModelConfig, layers: Sequence[LayerParts | None], ends: Ends) -> NativeLayers | None:
    """The layers in native calls, if this is a model and a machine for it; see `NativeLayers` for arguments.

    Args:
        config, ends: As for `NativeLayers`.
        layers: None for a layer that has more to it than `LayerParts` can say.
    """
    flags = config.decoder
    known = [layer for layer in layers if layer is not None and _held(layer) and ends.norm.dtype == torch.float32 and ends.embedding.is_contiguous()]
    if len(known) != len(layers) or flags is None or flags.activation not in KINDS:
        return None
    libraries = {name: load(name) for name in ("linear", "fused", "decoder")}
    loaded = {name: library for name, library in libraries.items() if library is not None}
    return NativeLayers(loaded, config, known, ends) if len(loaded) == len(libraries) else None


def _held(layer: LayerParts) -> bool:
    return all(isinstance(part, NativeLinear) for matrix in layer.matrices for part in parts(matrix))
