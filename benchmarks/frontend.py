"""How much the language costs by itself: gens a second through the interpreter, with a backend that answers at once.

    python benchmarks/frontend.py [--gens 2000] [--rounds 10] [--json out.json]

Every shape makes the same number of gens a round, on one core; "answers" is the scripted backend called without the language, for
comparison. Shapes take turns, so that what else runs on the machine meets all of them; the best round is what the language costs, the
median what a busy machine and the garbage collector make of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
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


def seconds_of(work):
    """CPU seconds of one round."""
    backend = ScriptedBackend("a", inline=True)
    begin = time.process_time()
    work(backend)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gens", type=int, default=2000, help="a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # Linux: one core for all threads together
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    gens, each = given.gens, 10
    programs = gens // each
    options = {"temperature": 0, "seed": SEED}
    shapes = {
        "answers (no language)": lambda b: answers(b, gens),
        "chains of 10": lambda b: [chain.run(each, backend=b, **options) for _ in range(programs)],
        "chains of 10, read each time": lambda b: [reading.run(each, backend=b, **options) for _ in range(programs)],
        "the same, sampled": lambda b: [reading.run(each, backend=b, temperature=1) for _ in range(programs)],
        "one batch of those": lambda b: reading.run_batch([{"gens": each}] * programs, backend=b, **options),
        "forks of 1,000": lambda b: [forking.run(1000, backend=b, **options) for _ in range(max(gens // 1000, 1))],
        "selects of two": lambda b: [choosing.run(each, backend=b, **options) for _ in range(programs)],
    }
    seconds = {name: [] for name in shapes}
    for _ in range(given.rounds):
        for name, work in shapes.items():
            seconds[name].append(seconds_of(work))
    rows = [
        {"shape": name, "gens": gens, "best": round(gens / min(times)), "median": round(gens / statistics.median(times))}
        for name, times in seconds.items()
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"gens a CPU second on one core, {given.rounds} rounds of {gens:,} ({machine}, seed {SEED})\n")
    print(f"{'shape':32}{'best':>9}{'median':>9}")
    for row in rows:
        print(f"{row['shape']:32}{row['best']:9,}{row['median']:9,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory {peak} MiB, {threading.active_count()} threads")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"rows": rows, "machine": machine, "seed": SEED, "peak_mib": peak}, file, indent=1)


if __name__ == "__main__":
    main()
