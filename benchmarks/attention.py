"""Attention on a CPU, native kernel beside torch's operators: decodes, a shared prefix, prefill chunks; 30 layers of the default model's shape.

Activations in float32, KV in float32 or whole numbers (as under int4 and int8), in the engine's own store. One thread and its own processor time, each layer's KV memory of its own
and none of it in the cache at first, as after a step's matrices; the two take turns, the best of five; what counts are the ratios.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.native_cpu import NativeAttention, cpu_attention
from agentrt.attention.torch_cpu import TorchAttention, narrowed
from agentrt.engine.kv_store import KVStore

SEED, LAYERS, HEADS, KV_HEADS, DIM = 0, 30, 9, 3, 64
SLOTS = 1 << 14  #: At least, of a store: as many as make it worth large pages.
CACHE = 1 << 26  #: Bytes that no cache holds beside others.
#: Name, sequences, new tokens of each, context, of which shared; layers that are computed (the rest is multiplied).
SHAPES = (
    ("1 decode, 300 tokens", 1, 1, 299, 0, 30),
    ("8 decodes, 300 tokens", 8, 1, 299, 0, 30),
    ("32 decodes, 95 tokens", 32, 1, 94, 0, 30),
    ("32 decodes, 300 tokens", 32, 1, 299, 0, 30),
    ("32 decodes, 1,400 tokens, 1,300 shared", 32, 1, 1399, 1300, 5),
    ("a chunk of 512", 1, 512, 0, 0, 5),
    ("a chunk of 512 on 1,500", 1, 512, 1500, 0, 3),
)


def batch(sequences: int, new: int, context: int, shared: int, scattered: bool) -> AttentionBatch:
    own = context + new - shared
    free = torch.randperm(shared + sequences * own) if scattered else torch.arange(shared + sequences * own)
    slots = tuple(torch.cat((free[:shared], part)) for part in free[shared:].split(own))
    groups = ((tuple(range(sequences)), shared),) if shared else ()
    return AttentionBatch((new,) * sequences, (context,) * sequences, slots, torch.cat([slot[context:] for slot in slots]), groups)


def filled_store(slots: int, layers: int, dtype: torch.dtype) -> KVStore:
    store = KVStore(SimpleNamespace(layers=layers, kv_heads=KV_HEADS, head_dim=DIM), max(slots, SLOTS), dtype)  # type: ignore[arg-type]
    for layer in range(layers):
        for tensor in store[layer]:
            tensor[:slots] = narrowed(torch.randn(slots, KV_HEADS, DIM), tensor)
    return store


def milliseconds(attentions: tuple[Attention, ...], step: AttentionBatch, store: KVStore) -> list[float]:
    """Of a step of 30 layers, by each."""
    tokens = sum(step.query_lengths)
    q, k, v = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    spec, others = AttentionSpec(DIM**-0.5), torch.zeros(CACHE // 4)
    best = [float("inf")] * len(attentions)
    for _ in range(5):
        for i, attention in enumerate(attentions):
            step.prepared.clear()
            others.add_(1)
            started = time.thread_time()
            for layer in range(len(store)):
                attention(q, k, v, store[layer], step, spec)
            best[i] = min(best[i], time.thread_time() - started)
    return [seconds / len(store) * LAYERS * 1e3 for seconds in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    native = cpu_attention()
    if not isinstance(native, NativeAttention):
        raise SystemExit("there is no native kernel here: no compiler, or AGENTRT_NATIVE=0")
    found = []
    print("| step | KV | slots | native, ms | torch, ms | torch / native |\n|---|---|---|---|---|---|")
    for name, sequences, new, context, shared, layers in SHAPES:
        for dtype in (torch.float32, torch.int8):
            for scattered in (False, True):
                step = batch(sequences, new, context, shared, scattered)
                size = max(int(slots.max()) for slots in step.slots) + 1
                with torch.inference_mode():
                    mine, theirs = milliseconds((native, TorchAttention()), step, filled_store(size, layers, dtype))
                row = (name, "float32" if dtype == torch.float32 else "whole numbers", "scattered" if scattered else "in order", mine, theirs)
                found.append(row)
                print("| {} | {} | {} | {:.1f} | {:.1f} | {:.1f} |".format(*row, theirs / mine), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
