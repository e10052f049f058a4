"""Compiles the C++ sources of this folder for the processor at hand, on first use, and loads them with ctypes.

A source `name.cpp` exports plain C functions, knows nothing of torch, and takes pointers and a number of threads. It is
compiled in seconds, once: the result lies in the cache folder's `kernels/`, under a key made of the sources, the
processor, the compiler and torch's OpenMP library. That library is the one it is linked with, so that kernels and torch
share one pool of threads. Invariant: a kernel is only ever a faster way; where it cannot be built, `load` says so once
in the log and answers None, and the caller takes its torch reference. A library appears by one rename.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

SOURCES = Path(__file__).parent
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp")
_SECONDS = 1800.0  # what takes ten seconds may take a hundred times that on a machine with much to do
_log = logging.getLogger(__name__)
_said: set[str] = set()
_saying = threading.Lock()


class _CannotBuild(Exception):
    """Why there is no native kernel; the message is for people."""


class _OutOfTime(_CannotBuild):
    """The compiler was not done in time, which says nothing about the next try."""


@dataclass(frozen=True, slots=True)
class Built:
    """What became of a source.

    Attributes:
        library: The loaded library; None where the torch reference has to do.
        found: A sentence that says which path runs, and why if it is the slow one.
    """

    library: ctypes.CDLL | None
    found: str


def load(name: str) -> ctypes.CDLL | None:
    """The library of `name.cpp`, built if need be.

    Args:
        name: Of a source in this folder.

    Returns:
        The library, the same object every time, or None: no compiler, no place to write, or AGENTRT_NATIVE=0.
    """
    return built(name).library


def prepare() -> None:
    """Builds what is not built yet of all sources, side by side, so that a first start waits for the slowest of them alone."""
    names = sorted(path.stem for path in SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(max(len(names), 1), thread_name_prefix="agentrt-build") as compilers:
        list(compilers.map(built, names))


def built(name: str) -> Built:
    """The library of `name.cpp` and a sentence about it, for `agentrt doctor`; remembered, unless time ran out."""
    try:
        return _built(name)
    except (_OutOfTime, filelock.Timeout) as error:
        return _without(error)


@functools.cache
def _built(name: str) -> Built:
    if os.environ.get("AGENTRT_NATIVE", "1") == "0":
        return Built(None, "off, since AGENTRT_NATIVE=0; the torch path runs")
    try:
        path = _library(name)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # cut short, by a machine that went down, say; once more, or the slow path would run for good
            path.unlink()
            library = ctypes.CDLL(str(_library(name)))
        return Built(library, f"native, {path}")
    except (_OutOfTime, filelock.Timeout):
        raise  # and so nothing is remembered
    except (_CannotBuild, OSError) as error:
        return _without(error)


def _without(error: Exception) -> Built:
    _say_once(str(error))
    return Built(None, f"the torch path runs: {error}")


def forget() -> None:
    """Makes the next `built` look again."""
    _built.cache_clear()
    with _saying:
        _said.clear()


def _say_once(reason: str) -> None:
    with _saying:
        if reason in _said:
            return
        _said.add(reason)
    _log.warning("no native kernels, the slower torch path runs: %s", reason)


def _library(name: str) -> Path:
    """Path of the compiled library; compiles it unless the cache has it."""
    compiler = _compiler()
    openmp = _openmp()
    source = SOURCES / f"{name}.cpp"
    key = _key(source, compiler, openmp)
    folder = _cache_home() / "kernels"
    target = folder / f"{name}-{key}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"{name}.lock", timeout=_SECONDS):
            if not target.exists():  # another process may have built it while this one waited
                _compile(source, target, compiler, openmp)
    return target


def _compile(source: Path, target: Path, compiler: tuple[str, ...], openmp: Path) -> None:
    """Compiles and links apart: at the link, -fopenmp would bring the compiler's own OpenMP library beside torch's."""
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    compiled = partial.with_suffix(".o")
    try:
        _run((*compiler, *_OPTIONS, "-c", str(source), "-o", str(compiled)), source)
        _run((*compiler, "-shared", str(compiled), str(openmp), f"-Wl,-rpath,{openmp.parent}", "-o", str(partial)), source)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
        compiled.unlink(missing_ok=True)


def _run(command: tuple[str, ...], source: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _OutOfTime(f"{command[0]} was not done with {source} after {_SECONDS:g} s") from error
    except OSError as error:
        raise _CannotBuild(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise _CannotBuild(f"{command[0]} fails on {source}:\n{done.stderr.strip()[-2000:]}")


def _compiler() -> tuple[str, ...]:
    """The command that compiles C++: CXX, or the first of the usual names."""
    for command in (shlex.split(os.environ.get("CXX", "")), ["g++"], ["c++"], ["clang++"]):
        if command and (path := shutil.which(command[0])):
            return (path, *command[1:])
    raise _CannotBuild("there is no C++ compiler (install g++, or name one in CXX)")


def _openmp() -> Path:
    """The OpenMP library that torch has loaded."""
    import torch  # the reference's library; asked here, so that a look at this module costs nothing

    folder = Path(torch.__file__).parent / "lib"
    for pattern in ("libgomp*.so*", "libiomp5.so", "libomp.so", "libomp.dylib"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise _CannotBuild(f"torch brings no OpenMP library in {folder}")


def _key(source: Path, compiler: tuple[str, ...], openmp: Path) -> str:
    """Of everything that the result depends on."""
    digest = hashlib.sha256()
    for path in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    status = Path(compiler[0]).resolve().stat()
    parts = (_processor(), *compiler, str(status.st_size), str(status.st_mtime_ns), *_OPTIONS, str(openmp))
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What tells one processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    kept = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features", "CPU part"))]
    return "\n".join((platform.machine(), platform.processor(), *kept))


def _cache_home() -> Path:
    """The model cache's folder (`agentrt.hub.cache_home`), which this room may not import."""
    home = os.environ.get("AGENTRT_HOME")
    return Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("agentrt", appauthor=False))
