"""From process start to first token with a warm model cache, beside what importing torch alone takes.

    python benchmarks/start.py [--repeats 5] [--out start.json]

Each run is a fresh process; the kinds take turns, so that their difference holds on a noisy machine. Python may keep the modules that it has
compiled, as it has those of every installed package, whatever this environment says of a checkout's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

TORCH = "import torch"
THREAD = """
import agentrt
with agentrt.Engine(process=False) as engine:
    next(engine.stream("Once upon a time", agentrt.SamplingParams(max_tokens=1, temperature=0)))
"""
PROCESS = THREAD.replace("process=False", "")


def seconds(code: str) -> float:
    started = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds(THREAD)  # fetches and converts the model, if need be, and warms the disk's cache
    runs = [(seconds(TORCH), seconds(THREAD), seconds(PROCESS)) for _ in range(args.repeats)]
    torch, thread, process = (statistics.median(values) for values in zip(*runs, strict=True))
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "repeats": args.repeats,
        "import_torch_s": torch,
        "thread_s": thread,
        "process_s": process,
        "thread_beyond_torch_s": statistics.median(b - a for a, b, _ in runs),
        "process_beyond_torch_s": statistics.median(c - a for a, _, c in runs),
    }
    table = Table(title=f"{figures['machine']}; medians of {args.repeats}", title_justify="left", box=None, pad_edge=False)
    for column in ("from process start to", "seconds", "beyond importing torch"):
        table.add_column(column, justify="left" if column.startswith("from") else "right")
    table.add_row("torch imported", f"{torch:.2f}", "")
    table.add_row("first token, engine in a thread", f"{thread:.2f}", f"{figures['thread_beyond_torch_s']:.2f}")
    table.add_row("first token, engine in a process of its own", f"{process:.2f}", f"{figures['process_beyond_torch_s']:.2f}")
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
