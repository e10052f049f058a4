"""What choosing tokens costs: every kind of sampling, alone in a batch of equal rows, at the widths of three models.

Logits have one clear peak and a long tail, as a model's do (`peaked`), or none (`normal`: top-p then keeps a good part of the
vocabulary, the worst case). Time is the thread's own, so that what else the machine does counts little; the best of some runs.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py [--rows 1 8 32] [--vocab 49152 151936] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrt.engine.penalties import Penalties, wants_penalties
from agentrt.engine.sampler import Row, Sampler
from agentrt.request import SamplingParams

SEED = 0
HISTORY, PROMPT = 2000, 1500
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k 20, top_p .8": {"top_k": 20, "top_p": 0.8},
    "top_p .95": {"top_p": 0.95},
    "min_p .05": {"min_p": 0.05},
    "repetition 1.1": {"temperature": 0, "repetition_penalty": 1.1},
    "300 biases": {"temperature": 0, "logit_bias": {token: 1.0 for token in range(300)}},
    "min_tokens": {"temperature": 0, "min_tokens": HISTORY},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "mask": {"temperature": 0},
}


def logits_of(shape: str, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(SEED)) * 3
    return logits if shape == "normal" else logits.sort(-1, descending=True).values.exp_().pow_(0.25).mul_(2).gather(1, shuffled(rows, vocab))


def shuffled(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])


def rows_of(kind: str, count: int, vocab: int) -> list[Row]:
    random = np.random.default_rng(SEED)
    rows = []
    for seed in range(count):
        sampling = SamplingParams(**KINDS[kind])
        history = random.integers(0, vocab, HISTORY).tolist()
        penalties = Penalties(vocab, history, PROMPT) if wants_penalties(sampling) else None
        mask = random.integers(-(2**31), 2**31, -(-vocab // 32), dtype=np.int64).astype(np.int32) if kind == "mask" else None
        rows.append(Row(sampling, seed, HISTORY, HISTORY - PROMPT, penalties, (), mask))
    return rows


def milliseconds(logits: torch.Tensor, rows: list[Row], runs: int) -> float:
    valid = torch.ones(logits.shape[1], dtype=torch.bool)
    valid[-100:] = False
    sampler = Sampler(valid, (2,))
    best = float("inf")
    for _ in range(runs):
        fresh = logits.clone()
        started = time.thread_time()
        sampler.sample(fresh, rows)
        best = min(best, time.thread_time() - started)
    return best * 1e3


def measured(shape: str, vocab: int, count: int, runs: int) -> list[dict[str, Any]]:
    logits = logits_of(shape, count, vocab)
    found = {kind: milliseconds(logits, rows_of(kind, count, vocab), runs) for kind in KINDS}
    return [
        {"logits": shape, "vocab": vocab, "rows": count, "kind": kind, "ms": round(ms, 3), "to_greedy": round(ms / found["greedy"], 2)}
        for kind, ms in found.items()
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.processor() or platform.machine()}, one thread, torch {torch.__version__}, seed {SEED}"
    print(machine)
    print(f"{'logits':8}{'vocab':>9}{'rows':>6}  {'kind':20}{'ms':>9}{'to greedy':>11}")
    lines = []
    for shape in ("peaked", "normal"):
        for vocab in asked.vocab:
            for count in asked.rows:
                for line in measured(shape, vocab, count, asked.runs):
                    lines.append(line)
                    print(f"{shape:8}{vocab:9,}{count:6}  {line['kind']:20}{line['ms']:9.2f}{line['to_greedy']:11.2f}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine, "results": lines}, indent=1))


if __name__ == "__main__":
    main()
