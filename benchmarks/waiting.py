"""How long the threads of the engine's process should spin at a barrier before they sleep: tokens/s alone, and beside a busy process.

    python benchmarks/waiting.py [--spins 0 500 5000] [--json waiting.json]

A step has hundreds of barriers. Spinning finds the others at once where every thread has a core; where it has none, it takes the core from the
thread that is waited for. `agentrt/backends/hosts.py` (`SPINS`) chooses between the two. The default model, all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrt import Engine, SamplingParams

REPEATS, TOKENS = 5, 32
SIZES = (1, 8)
#: What runs beside it: seconds of work and of sleep, in turns; "" for nothing.
COMPANIONS = {
    "alone": "",
    "beside one that is busy a third of the time": "work, rest = 0.002, 0.004",
    "beside one that is always busy": "work, rest = 1.0, 0.0",
}
BUSY = """
import time
{}
while True:
    end = time.perf_counter() + work
    while time.perf_counter() < end:
        pass
    time.sleep(rest)
"""


@contextmanager
def beside(companion: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(companion)]) if companion else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def tokens_a_second(engine: Engine, size: int) -> float:
    prompts = [[100 + place + 7 * number for place in range(40)] for number in range(size)]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    taken = []
    for _ in range(1 + REPEATS):  # the first computes the prompts
        started = time.perf_counter()
        engine.generate(prompts, sampling)
        taken.append(time.perf_counter() - started)
    return size * TOKENS / statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", type=int, default=[0, 500, 5000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[int, dict[int, float]]] = {}
    for name, companion in COMPANIONS.items():
        print(f"| {name} | " + " | ".join(f"{size} at once" for size in SIZES) + " |", flush=True)
        with beside(companion):
            for spins in options.spins:
                os.environ["GOMP_SPINCOUNT"] = str(spins)
                with Engine(kv_tokens=8192) as engine:
                    figures = found.setdefault(name, {})[spins] = {size: tokens_a_second(engine, size) for size in SIZES}
                print(f"| {spins} spins | " + " | ".join(f"{value:.0f} tokens/s" for value in figures.values()) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
