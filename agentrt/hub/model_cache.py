"""The model cache: where fetched and converted models lie, what is there, and one writer at a time.

It is platformdirs' user cache folder ``agentrt``, or ``AGENTRT_HOME``::

    <home>/models/<short name>/<file>.gguf       fetched
    <home>/models/<short name>/.partial/         still arriving; parts that were checked are used again
    <home>/converted/<key>/                      a GGUF in Hugging Face's layout, keyed by its content
    <home>/packed/<name>-<key>/                  matrices of a model's folder as kernels want them, keyed by the folder's path
    <home>/hashes/<key>.json                     content hash of a file, remembered by path, size and time
    <home>/locks/<name>.lock                     held by the process that fetches or converts

Invariant: a name without ``.partial`` is complete, since it appears by one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock
import platformdirs

from agentrt.errors import ModelError
from agentrt.hub.catalog import CATALOG, CatalogEntry, resolve

#: Part of a converted folder's name; raise it when the result of a conversion changes.
CONVERTED_LAYOUT = 2

#: In a converted folder, safetensors with the bytes of the quantised matrices: "<name>.<part>", uint8 [rows, bytes a row], the parts of a
#: fused matrix one after the other, each with its GGML type in the metadata.
BLOCKS_FILE = "gguf.blocks"

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class CachedModel:
    """Something in the model cache.

    Attributes:
        name: Short name of a fetched model; for a converted one, the model's name as its file has it.
        path: File or folder.
        bytes: Its size on the disk.
        kind: "fetched", "converted", "packed", or "partial" for a fetch or a conversion that did not finish.
    """

    name: str
    path: Path
    bytes: int
    kind: Literal["fetched", "converted", "packed", "partial"]


def cache_home() -> Path:
    """The model cache's folder; it need not exist."""
    home = os.environ.get("AGENTRT_HOME")
    return Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("agentrt", appauthor=False))


def fetched_path(entry: CatalogEntry) -> Path:
    """Where the model of a catalogue entry lies once it was fetched."""
    return cache_home() / "models" / entry.name / entry.file


def conversion_key(path: Path) -> str:
    """Name of the folder that holds the converted form of a GGUF: of its content, not of its path."""
    return f"{file_sha256(path)[:32]}-v{CONVERTED_LAYOUT}"


def is_complete(folder: Path) -> bool:
    """Whether a folder is a finished conversion: it gets its name last, and this file before that."""
    return (folder / "config.json").is_file() and folder.suffix != ".partial"


def converted_path(key: str) -> Path:
    """Where the converted form of a GGUF with that key lies."""
    return cache_home() / "converted" / key


def packed_path(folder: Path) -> Path:
    """Where a model's packed matrices lie: a folder for each folder that holds a model."""
    whole = folder.resolve()
    return cache_home() / "packed" / f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:16]}"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the cache's lock of that name; another process that wants it waits.

    Raises:
        ModelError: The cache folder cannot be written.
    """
    try:
        folder = cache_home() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / f"{name}.lock")
        lock.acquire()
    except OSError as error:
        raise ModelError(
            f"the model cache {cache_home()} cannot be written ({error}); set AGENTRT_HOME to a folder that can"
        ) from error
    try:
        yield
    finally:
        lock.release()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, remembered until its size or time changes (hashing 500 MB takes a second).

    A memory that cannot be written is no error; the next call hashes again.
    """
    status = path.stat()
    where = str(path.resolve())
    stamp = {"path": where, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    memory = cache_home() / "hashes" / (hashlib.sha256(where.encode()).hexdigest()[:32] + ".json")
    remembered = _read_json(memory)
    if {key: remembered.get(key) for key in stamp} == stamp:
        return str(remembered["sha256"])
    digest = hash_file(path)
    with suppress(OSError):
        write_atomically(memory, json.dumps(stamp | {"sha256": digest}).encode())
    return digest


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, read now."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # what a full disk left of it


def list_cached() -> list[CachedModel]:
    """What is in the model cache, fetched models first."""
    found: list[CachedModel] = []
    for entry in CATALOG.values():
        path = fetched_path(entry)
        if path.is_file():
            found.append(CachedModel(entry.name, path, path.stat().st_size, "fetched"))
        partial = path.parent / ".partial"
        if partial.is_dir():
            found.append(CachedModel(entry.name, partial, folder_bytes(partial), "partial"))
    for folder in _subfolders(cache_home() / "converted"):
        kind: Literal["converted", "partial"] = "converted" if is_complete(folder) else "partial"
        found.append(CachedModel(_converted_name(folder), folder, folder_bytes(folder), kind))
    for folder in _subfolders(cache_home() / "packed"):
        found.append(CachedModel(_packed_name(folder), folder, folder_bytes(folder), "packed"))
    return found


def remove(name: str) -> list[CachedModel]:
    """Removes a model of the catalogue from the cache, with all that was made of it; or one folder that was made, by its name.

    Returns:
        What was removed.

    Raises:
        ModelError: There is no such model.
    """
    cached, made = list_cached(), (cache_home() / "converted", cache_home() / "packed")
    chosen = [model for model in cached if model.path.name == name and model.path.parent in made]
    of_chosen = {packed_path(model.path) for model in chosen}
    chosen += [model for model in cached if model.path in of_chosen]
    chosen = chosen or _of_catalog_entry(resolve(name).entry, name)
    for model in chosen:
        if model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            model.path.unlink()
    return chosen


def _of_catalog_entry(entry: CatalogEntry | None, name: str) -> list[CachedModel]:
    if entry is None:
        raise ModelError(f"{name!r} is not in the model cache, so it cannot be removed from it", param="model")
    return [model for model in list_cached() if model.name == entry.name]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _converted_name(folder: Path) -> str:
    key = folder.name.partition("-")[0]
    for entry in CATALOG.values():
        if entry.sha256.startswith(key):
            return entry.name
    name = _read_json(folder / "config.json").get("agentrt_name")
    return str(name) if name else folder.name


def _packed_name(folder: Path) -> str:
    """The model's name if it is of a converted folder; else the folder's own, which `remove` takes."""
    source = converted_path(folder.name.rpartition("-")[0])
    return _converted_name(source) if packed_path(source) == folder else folder.name


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
