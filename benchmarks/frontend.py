"""How much the language costs by itself: gens a second through the interpreter, with a backend that answers at once.

    python benchmarks/frontend.py [--gens 20000] [--json out.json]

Every shape makes the same number of gens, on one core; "answers" is the scripted backend called without the language, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import threading
import time

from agentrt import backend as backends
from agentrt.backends.scripted import ScriptedBackend
from agentrt.lang.expressions import gen, select
from agentrt.lang.program import function
from agentrt.request import Request, SamplingParams

SEED = 0


@function
def chain(s, gens):
    s += "Count: "
    for _ in range(gens):
        s += gen("x", max_tokens=1)


@function
def reading(s, gens):
    s += "Count: "
    for _ in range(gens):
        s += "\n"
        s += gen("x", max_tokens=1)
        s["x"]


@function
def forking(s, gens):
    s += "A prompt that all branches share: " * 15
    forks = s.fork(gens)
    forks += gen("x", max_tokens=1)
    forks.join()


@function
def choosing(s, gens):
    s += "Is it? "
    for _ in range(gens // 2):
        s += select("x", ["yes", "no"])


def answers(backend: ScriptedBackend, gens: int) -> None:
    ids = tuple(backend.tokenizer.encode("Count: "))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    for _ in range(gens):
        backends.complete(backend, Request(prompt_ids=ids, sampling=sampling))


def measure(name, work, gens):
    times = []
    for _ in range(3):
        backend = ScriptedBackend("a", inline=True)
        begin = time.process_time()
        work(backend)
        times.append(time.process_time() - begin)
    seconds = min(times)
    return {"shape": name, "gens": gens, "seconds": round(seconds, 4), "gens_per_second": round(gens / seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gens", type=int, default=20_000)
    parser.add_argument("--json")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # Linux: one core for all threads together
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    gens, each = given.gens, 10
    programs = gens // each
    options = {"temperature": 0, "seed": SEED}
    rows = [
        measure("answers (no language)", lambda b: answers(b, gens), gens),
        measure("chains of 10", lambda b: [chain.run(each, backend=b, **options) for _ in range(programs)], gens),
        measure(
            "chains of 10, read each time",
            lambda b: [reading.run(each, backend=b, **options) for _ in range(programs)],
            gens,
        ),
        measure(
            "the same, sampled", lambda b: [reading.run(each, backend=b, temperature=1) for _ in range(programs)], gens
        ),
        measure(
            "one batch of those", lambda b: reading.run_batch([{"gens": each}] * programs, backend=b, **options), gens
        ),
        measure(
            "forks of 1,000",
            lambda b: [forking.run(1000, backend=b, **options) for _ in range(max(gens // 1000, 1))],
            gens,
        ),
        measure("selects of two", lambda b: [choosing.run(each, backend=b, **options) for _ in range(programs)], gens),
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"{'shape':32}{'gens':>8}{'CPU s':>9}{'gens/s':>9}   ({machine}; CPU seconds, best of 3, seed {SEED})")
    for row in rows:
        print(f"{row['shape']:32}{row['gens']:8}{row['seconds']:9.3f}{row['gens_per_second']:9,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory {peak} MiB, {threading.active_count()} threads")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"rows": rows, "machine": machine, "seed": SEED, "peak_mib": peak}, file, indent=1)


if __name__ == "__main__":
    main()
