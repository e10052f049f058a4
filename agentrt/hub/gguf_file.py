"""Reads a GGUF file: its metadata, and where each tensor lies. It knows nothing of models or tokenizers.

The `gguf` package reads headers too, but makes an array object of every vocabulary entry (12 s for 150,000 tokens,
measured; this takes 0.2 s). Its dequantisation is vectorised and is what `GgufFile.rows` uses. The format is GGUF
versions 2 and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Invariant: nothing
outside the file's bounds is ever read; a broken file is a `ModelError` that names the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import ModelError

#: Tensor types that can be dequantised exactly as written: (name, values a block, bytes a block) by GGML's number.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

#: Types whose values stand alone.
UNQUANTISED = frozenset({"F32", "F16", "BF16"})

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROWS_AT_ONCE = 4 << 20  # values dequantised at once: 16 MB of float32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
        name: Its name in the file.
        shape: As numpy has it (rows first), not reversed as the file has it.
        type_name: Such as "Q4_K".
        offset: From the beginning of the file, in bytes.
        nbytes: Its length in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GgufFile:
    """A GGUF file, mapped into memory. Use as a context manager.

    Attributes:
        path: The file.
        metadata: Every key of the header; arrays are lists.
        tensors: Name to where it lies.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and reads its header.

        Raises:
            ModelError: The file cannot be read, is no GGUF, is cut short, or has a tensor type that is not known here.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}", param="model") from error
        try:
            header = _Header(self._map)
            self.metadata = header.metadata
            self.tensors = {tensor.name: tensor for tensor in header.tensors}
        except (struct.error, IndexError, OverflowError, RecursionError, MemoryError) as error:
            raise ModelError(f"{path} is a broken or cut-off GGUF file ({error})", param="model") from error
        except ModelError as error:
            raise ModelError(f"{path}: {error}", param="model") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; arrays that view it must be gone."""
        self._map.close()

    def raw(self, name: str) -> bytes:
        """The tensor's bytes as they lie in the file, quantised."""
        tensor = self.tensors[name]
        return self._map[tensor.offset : tensor.offset + tensor.nbytes]

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The tensor in float32, a few rows at a time.

        Yields:
            float32 arrays [rows, columns] (or [values] for a vector), together the whole tensor.
        """
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.nbytes // rows
        step = max(1, _ROWS_AT_ONCE // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            begin = tensor.offset + first * row_bytes
            values = _to_float32(self._map[begin : begin + count * row_bytes], tensor.type_name)
            yield values.reshape(count, columns) if len(tensor.shape) > 1 else values

    def read(self, name: str) -> NDArray[np.float32]:
        """The whole tensor in float32, in its own shape."""
        return np.concatenate(list(self.rows(name))).reshape(self.tensors[name].shape)


def _to_float32(content: bytes, type_name: str) -> NDArray[np.float32]:
    """Dequantises whole blocks to a flat float32 array."""
    if type_name == "F32":
        return np.frombuffer(content, np.float32)
    if type_name == "F16":
        return np.frombuffer(content, np.float16).astype(np.float32)
    if type_name == "BF16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    import gguf  # takes 0.2 s, and only a conversion needs it

    kind = gguf.GGMLQuantizationType[type_name]
    values: NDArray[np.float32] = gguf.dequantize(np.frombuffer(content, np.uint8), kind)
    return values.reshape(-1).astype(np.float32, copy=False)


class _Header:
    """Reads the header from the beginning of the map."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._at = 4
        if buffer[:4] != b"GGUF":
            raise ModelError("this is not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"general.alignment is {alignment!r}; it must be a positive number")
        begin = -(-self._at // alignment) * alignment
        self.tensors = [self._placed(begin, *entry) for entry in entries]

    def _number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._buffer, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._buffer):
            raise IndexError("a string reaches beyond the end of the file")
        return self._buffer[begin : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise ModelError(f"metadata has a value of the unknown kind {kind}")

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if count > len(self._buffer):
            raise IndexError("an array reaches beyond the end of the file")
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._buffer, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._number("Q") for _ in range(self._number("I"))]
        kind, offset = self._number("I"), self._number("Q")
        return name, tuple(reversed(dimensions)), kind, offset

    def _placed(self, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        if kind not in TENSOR_TYPES:
            known = ", ".join(known_name for known_name, _, _ in TENSOR_TYPES.values())
            raise ModelError(f"tensor {name!r} has the type {_type_name(kind)}, which is not supported; supported: {known}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        nbytes = math.prod(shape) // block * block_bytes
        if not shape or 0 in shape or shape[-1] % block or begin + offset + nbytes > len(self._buffer):
            raise IndexError(f"tensor {name!r} of shape {shape} does not fit the file")
        return TensorEntry(name, shape, type_name, begin + offset, nbytes)


def _type_name(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
