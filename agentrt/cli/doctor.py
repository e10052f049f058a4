"""``agentrt doctor``: looks at what agentrt stands on, and says what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: Its name.
        found: What was found.
        mend: What to do about it; "" if it is well.
        fatal: Whether nothing works until it is mended.
    """

    what: str
    found: str
    mend: str = ""
    fatal: bool = False


def run() -> int:
    """Prints every finding; returns 1 if something has to be mended before anything works."""
    findings = list(examine())
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = "[green]ok[/]" if not finding.mend else "[red]no[/]" if finding.fatal else "[yellow]hm[/]"
        mend = ("\n" + finding.mend, "bold") if finding.mend else ""
        table.add_row(mark, finding.what, Text.assemble(finding.found, mend))
    Console().print(table, highlight=False)
    return int(any(finding.fatal for finding in findings))


def examine() -> Iterator[Finding]:
    """Looks at everything, the cheapest first."""
    yield _python()
    yield from _packages()
    yield _machine()
    yield from _torch()
    yield from _models()


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name in ("agentrt", "transformers", "tokenizers", "safetensors", "llguidance", "outlines-core"):
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", "pip install agentrt, in this environment", fatal=True)


def _machine() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{platform.machine()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
    found += f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    low = memory.available < 2e9
    return Finding("machine", found, "the default model wants about 2 GB; close something, or give --kv-tokens a small number" if low else "")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", f"does not import: {error}", "pip install 'torch>=2.11,<2.14'", fatal=True)
        return
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    yield _threads(torch.get_num_threads())
    if torch.cuda.is_available():
        yield Finding("gpu", torch.cuda.get_device_name())
        yield _triton()
    else:
        yield Finding("gpu", "none that torch sees; the CPU is used")
        yield from _native_kernels()


def _threads(threads: int) -> Finding:
    cores = psutil.cpu_count(logical=False) or threads
    limit = os.environ.get("OMP_NUM_THREADS")
    if threads < cores and limit:
        return Finding("threads", f"OMP_NUM_THREADS={limit} holds torch to {threads} of {cores} cores", "unset OMP_NUM_THREADS to use them all")
    return Finding("threads", f"{threads} for {cores} cores")


def _native_kernels() -> Iterator[Finding]:
    """Which path each kernel takes; those that were never built are built now, in seconds."""
    from agentrt.kernels.cpu.build import SOURCES, built
    from agentrt.kernels.quantized_linear import isa

    for name in sorted(source.stem for source in SOURCES.glob("*.cpp")):
        kernel = built(name)
        yield Finding(f"{name} kernels", kernel.found.partition("\n")[0], "" if kernel.library else "install a C++ compiler, such as g++, to be faster")
    if instructions := isa():
        yield Finding("matrices", f"of few bits in {instructions}")


def _triton() -> Finding:
    try:
        return Finding("triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("triton", "not installed; attention runs in torch, int8 and int4 do not", "pip install 'agentrt[triton]'")


def _models() -> Iterator[Finding]:
    from agentrt.hub import DEFAULT_MODEL, cache_home, list_cached

    home = cache_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            free = shutil.disk_usage(home).free
    except OSError as error:
        yield Finding("model cache", f"{home} cannot be written: {error}", "set AGENTRT_HOME to a folder that can", fatal=True)
        return
    tight = free < 3e9
    yield Finding("model cache", f"{home}, {free / 1e9:.1f} GB free", "free some space, or set AGENTRT_HOME to another disk" if tight else "")
    names = {model.name for model in list_cached() if model.kind != "partial"}
    if DEFAULT_MODEL in names:
        yield Finding("default model", DEFAULT_MODEL)
    else:
        yield Finding("default model", f"{DEFAULT_MODEL} is not fetched yet", f"agentrt models fetch {DEFAULT_MODEL}")
