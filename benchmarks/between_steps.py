"""What a GPU waits for between two steps: the host's time from a step's tokens to the launch of the next, with and without overlap.

The real engine, scheduler and attention lists of an 8-KV-head model on a GPU of 132 multiprocessors, without a GPU: the device takes no time and
answers random tokens, so what is measured is the host alone. Sequences share a prompt of 160 tokens, have 60 of their own and make 160 each. Every
other run overlaps; medians over steps.

    OMP_NUM_THREADS=1 python benchmarks/between_steps.py [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentrt.attention.triton_paged import TritonAttention
from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.engine.batch import NextDecode, SequenceStates, forward_batch, next_decode
from agentrt.engine.engine import EngineCore
from agentrt.request import Request, SamplingParams, TokenDelta
from agentrt.scheduling.plan import Sampled, StepOutput, StepPlan
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import Budget, Scheduler
from agentrt.text import load_tokenizer

SEED = 0
PAGE = 16
MULTIPROCESSORS = 132
SHARED, OWN, OUTPUT = 160, 60, 160
REPEATS = 3


class InstantDevice:
    """An executor whose device takes no time; notes how long the host took from one step's tokens to the next one's launch."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.between: list[float] = []
        self.foreseen = 0
        self._random = random.Random(SEED)
        self._states = SequenceStates(32_000)
        self._next: NextDecode | None = None
        self._attention = TritonAttention(32, 8, 64, PAGE, torch.device("cpu"))
        self._attention._limits = replace(self._attention._limits, wanted=2 * MULTIPROCESSORS // 8)
        self._tokens_at: float | None = None

    def launch(self, plan: StepPlan) -> InstantDevice:
        self._states.apply(plan)
        known, self._next = self._next, None
        hit = known is not None and known.is_start_of(plan)
        batch = known.batch(plan) if known is not None and hit else forward_batch(plan, self._states)
        self._attention.pack(batch.attention, None)
        self.foreseen += hit
        if self._tokens_at is not None:
            self.between.append(time.perf_counter() - self._tokens_at)
        self._plan = plan
        return self

    def foresee(self) -> None:
        self._next = next_decode(self._plan, self._states)
        if self._next is not None:
            self._attention.foresee(self._next.attention, None)

    def finish(self, masks: Mapping[int, Any]) -> StepOutput:
        del masks
        output = StepOutput({run.sequence_id: Sampled(tuple(self._random.randrange(1000, 30_000) for _ in run.sample_at)) for run in self._plan.runs})
        self._tokens_at = time.perf_counter()
        return output


def answered(sequences: int, asynchronous: bool, model: str) -> InstantDevice:
    """Runs so many sequences to their end."""
    pool = PagePool(sequences * (SHARED + OWN + OUTPUT + PAGE) // PAGE, PAGE)
    cache = PrefixCache(pool, eviction_policy("lru"))
    budget = Budget(step_tokens=8192, prefill_tokens=4096, max_running=sequences)
    scheduler = Scheduler(cache, budget, POLICIES["program"], clock=time.monotonic, max_wait=60)
    device = InstantDevice(asynchronous)
    core = EngineCore(scheduler, device, cache, load_tokenizer(model), eos_ids=[2], max_length=4096)
    words = random.Random(SEED)
    shared = [words.randrange(1000, 30_000) for _ in range(SHARED)]
    for number in range(sequences):
        prompt = (*shared, *(words.randrange(1000, 30_000) for _ in range(OWN)))
        core.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=SamplingParams(max_tokens=OUTPUT, ignore_eos=True)))

    def send(deltas: list[TokenDelta]) -> None:
        pickle.dumps(("deltas", deltas))

    while not core.idle:
        send(core.step(send))
    core.close()
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{platform.processor() or platform.machine()}, python {platform.python_version()}\n\nsequences   waited for   overlapped   of it   foreseen")
    for sequences in (1, 8, 64, 256):
        runs: dict[bool, list[InstantDevice]] = {False: [], True: []}
        for repeat in range(2 * REPEATS):
            runs[repeat % 2 == 1].append(answered(sequences, repeat % 2 == 1, options.model))
        plain, over = (statistics.median(time for device in runs[way] for time in device.between[10:-10]) * 1e3 for way in (False, True))
        share = runs[True][0].foreseen / len(runs[True][0].between)
        rows.append({"sequences": sequences, "waited_ms": plain, "overlapped_ms": over, "foreseen": share})
        print(f"{sequences:9} {plain:9.2f} ms {over:9.2f} ms {over / plain:7.0%} {share:10.0%}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
