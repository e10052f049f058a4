"""Attention on a CPU, native kernel beside torch's operators: decodes, a shared prefix, prefill chunks; 30 layers of the default model's shape.

Activations in float32, KV in float32 or float16 (as under int4 and int8). One thread and its own processor time, each layer's KV memory of its own, the better of three; what counts are the ratios.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.native_cpu import NativeAttention, cpu_attention
from agentrt.attention.torch_cpu import TorchAttention

SEED, LAYERS, HEADS, KV_HEADS, DIM = 0, 30, 9, 3, 64
#: Name, sequences, new tokens of each, context, of which shared; layers that are computed (the rest is multiplied).
SHAPES = (
    ("1 decode, 300 tokens", 1, 1, 299, 0, 30),
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


def milliseconds(attention: Attention, step: AttentionBatch, stores: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of a step of 30 layers."""
    tokens = sum(step.query_lengths)
    q, k, v = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    spec, times = AttentionSpec(DIM**-0.5), []
    for _ in range(3):
        step.prepared.clear()
        started = time.thread_time()
        for store in stores:
            attention(q, k, v, store, step, spec)
        times.append(time.thread_time() - started)
    return min(times) / len(stores) * LAYERS * 1e3


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
        for dtype in (torch.float32, torch.float16):
            for scattered in (False, True):
                step = batch(sequences, new, context, shared, scattered)
                size = max(int(slots.max()) for slots in step.slots) + 1
                stores = [tuple(torch.randn(size, KV_HEADS, DIM).to(dtype) for _ in range(2)) for _ in range(layers)]
                with torch.inference_mode():
                    mine, theirs = (milliseconds(attention, step, stores) for attention in (native, TorchAttention()))
                row = (name, str(dtype).removeprefix("torch."), "scattered" if scattered else "in order", mine, theirs)
                found.append(row)
                print("| {} | {} | {} | {:.1f} | {:.1f} | {:.1f} |".format(*row, theirs / mine), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
