"""A model's matrices as the native kernel wants them, kept in the model cache, so that only a first start packs them.

A file holds all matrices of a model, for one number of bits and one set of instructions::

    32 bytes       SHA-256 of the header
    4 bytes        its length
    header         JSON: what the file was made from, a sum over the matrices, and where each of them lies
    from DATA on   packed matrices, each at a cache line

It is read, not mapped: kernels want large pages, which a mapped file does not have. Invariant: a file is used only if all
that its content depends on (the model's files, the sources that pack, the instructions) is as it was, and its sums are right;
any other is made anew. It appears by one rename, and a cache that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrt.hub.model_cache import packed_path
from agentrt.kernels.cpu.build import SOURCES
from agentrt.kernels.packed_memory import LINE, packed_memory
from agentrt.kernels.quantized_linear import NativeLinear, PackedWeight, isa, packed_linear
from agentrt.models.linear import Linear, LinearFactory, SideBySide, parts

#: Fewer bytes than this are packed faster than they are worth a file.
SMALLEST = 1 << 23

#: Where the matrices begin; the header ends before that.
DATA = 1 << 20

#: Seconds after which somebody else's file that is not finished never will be.
GIVEN_UP = 3600.0

_HERE = Path(__file__).parent

#: What decides how a matrix is quantised and packed, from the model's files to the kernel: a change in one of these is another layout.
_PACKERS = (
    *(_HERE / name for name in ("packed_weights.py", "linear.py", "loader.py", "gguf_blocks.py", "quantized_checkpoint.py")),
    SOURCES.parent / "quantized_linear.py",
    *sorted(SOURCES.glob("linear*")),
)

_Matrices = dict[str, list[PackedWeight]]  # the parts of each, by its name


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model's file lies, and what its content depends on."""

    path: Path
    key: dict[str, Any]


class PackedWeights:
    """A model's packed matrices: from the file, where it has them, else as they are made, for the file.

    Attributes:
        names: Of the tensors whose values nobody needs, since their matrices are at hand.
    """

    def __init__(self, folder: Path, bits: int, instructions: str) -> None:
        """Reads the file, if there is one and it is right.

        Args:
            folder: The model's.
            bits: Of a weight, as was asked for.
            instructions: That the kernel was compiled for.
        """
        self._place = _place(folder, bits, instructions)
        self._found = _read(self._place)
        self._made: dict[str, Linear] = {}
        self.names = frozenset(f"{name}.weight" for name in self._found)

    def before(self, make: LinearFactory) -> LinearFactory:
        """A factory that asks `make` for nothing that the file has."""

        def linear(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
            found = self._found.get(name)
            if found is None:
                made = self._made[name] = make(name, weight, bias)
                return made
            biases = [None] * len(found) if bias is None else bias.split([part.outputs for part in found])
            linears = [packed_linear(part, own) for part, own in zip(found, biases, strict=True)]
            return linears[0] if len(linears) == 1 else SideBySide(linears)

        return linear

    def keep(self) -> None:
        """Writes what was made, so that the next start finds it; nothing, if all was found or it is too little to matter."""
        made = {name: [part.weight for part in parts(matrix) if isinstance(part, NativeLinear)] for name, matrix in self._made.items()}
        if sum(part.packed.numel() for each in made.values() for part in each) < SMALLEST:
            return
        with suppress(OSError):  # no room, or a cache that is only read: the next start packs again
            _write(self._place, made)
            _sweep(self._place.path.parent.parent)


def packed_weights(folder: Path, bits: int) -> PackedWeights | None:
    """The packed matrices of a model; None where no kernel wants any.

    Args:
        folder: The model's.
        bits: Of a weight: 4 or 8.
    """
    instructions = isa()
    return None if instructions is None else PackedWeights(folder, bits, instructions)


def _place(folder: Path, bits: int, instructions: str) -> _Place:
    """The model's files are known by size and time, as the content hashes are that the model cache remembers."""
    whole = folder.resolve()
    files = sorted(path for path in whole.iterdir() if path.suffix in (".safetensors", ".blocks", ".json") and path.is_file())
    stamps = [[path.name, status.st_size, status.st_mtime_ns] for path in files for status in (path.stat(),)]
    key = {"folder": str(whole), "files": stamps, "bits": bits, "isa": instructions, "layout": _layout()}
    return _Place(packed_path(folder) / f"int{bits}-{instructions.replace(' ', '-').lower()}", key)


@cache
def _layout() -> str:
    digest = hashlib.sha256()
    for path in _PACKERS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- the file


def _read(place: _Place) -> _Matrices:
    """What the file holds; nothing if it is not there or not right."""
    try:
        with place.path.open("rb", buffering=0) as file:
            header = _header(file)
            if header["key"] != place.key or os.fstat(file.fileno()).st_size != DATA + header["bytes"]:
                return {}
            memory = packed_memory.take(header["bytes"])
            file.seek(DATA)
            if not _fill(memory, file) or _sum(memory) != header["sum"]:
                return {}
    except (OSError, ValueError):
        return {}
    return {name: [PackedWeight(*shape, memory[at : at + size]) for *shape, at, size in each] for name, each in header["matrices"].items()}


def _header(file: BinaryIO | io.FileIO) -> dict[str, Any]:
    """Raises ValueError if it is not what was written."""
    digest, length = file.read(32) or b"", int.from_bytes(file.read(4) or b"", "little")
    told = file.read(min(length, DATA)) or b""
    if hashlib.sha256(told).digest() != digest:
        raise ValueError("another file, or a damaged one")
    header: dict[str, Any] = json.loads(told)
    return header


def _fill(memory: Tensor, file: io.FileIO) -> bool:
    """Reads the matrices; whether all of them came."""
    view, at = memoryview(memory.numpy()), 0
    while at < len(view):
        count = file.readinto(view[at:])
        if not count:
            return False
        at += count
    return True


def _sum(memory: Tensor) -> int:
    """Of all bytes, eight at a time, modulo 2 ** 64: finds what was cut, lost or never written, and takes no time."""
    return int(memory.view(torch.int64).sum())


def _write(place: _Place, made: Mapping[str, list[PackedWeight]]) -> None:
    places: dict[str, list[tuple[int | bool, ...]]] = {name: [] for name in made}
    place.path.parent.mkdir(parents=True, exist_ok=True)
    partial = place.path.with_name(f"{place.path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            at, total = 0, 0
            for name, part in ((name, part) for name, each in made.items() for part in each):
                lines = _whole_lines(part.packed)
                places[name].append((part.inputs, part.outputs, part.bits, part.half, part.minima, at, part.packed.numel()))
                file.seek(DATA + at)
                file.write(memoryview(lines.numpy()))
                at, total = at + lines.numel(), total + _sum(lines)
            total = (total + (1 << 63)) % (1 << 64) - (1 << 63)  # as a sum of all at once would have come out
            told = json.dumps({"key": place.key, "bytes": at, "sum": total, "matrices": places}).encode()
            if 36 + len(told) <= DATA:
                file.seek(0)
                file.write(hashlib.sha256(told).digest() + len(told).to_bytes(4, "little") + told)
        partial.replace(place.path)
    finally:
        partial.unlink(missing_ok=True)


def _whole_lines(piece: Tensor) -> Tensor:
    return pad(piece, (0, -piece.numel() % LINE)) if piece.numel() % LINE else piece


def _sweep(home: Path) -> None:
    """Removes what is of no use any more: of models that are gone, and files that were never finished."""
    for path in home.glob("*/*"):
        if path.suffix == ".partial":
            if time.time() - path.stat().st_mtime > GIVEN_UP:
                path.unlink(missing_ok=True)
        elif not any(map(os.path.isdir, _folders(path))):
            shutil.rmtree(path.parent, ignore_errors=True)


def _folders(path: Path) -> Iterator[str]:
    """The folder that a file was made from, if it says so."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        yield _header(file)["key"]["folder"]
