"""Whether torch.compile would pay: a decode step of the float decoder as it is and compiled, in turns, and what compiling took.

Only the float path without native kernels has something to compile: with few bits all layers are one native call, and native norms,
activations and attention are calls that no compiler looks into. What is compiled is `Decoder.forward`, with attention as a break in its
graph. Steps to break even: compile time over what a step saves.

    AGENTRT_NATIVE=0 python benchmarks/torch_compile.py [--model smollm2-135m] [--dtype float32] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from agentrt.config import CacheConfig, EngineConfig
from agentrt.engine.assembly import build_engine
from agentrt.hub import resolve_model
from agentrt.request import Request, SamplingParams
from agentrt.text import load_tokenizer

SEED, CONTEXT, STEPS, SIZES = 0, 300, 30, (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    files = resolve_model(options.model)
    tokenizer = load_tokenizer(str(files.folder))
    room = CacheConfig(kv_tokens=2 * max(SIZES) * CONTEXT)
    config = EngineConfig(model=options.model, dtype=options.dtype, threads=options.threads, cache=room)
    core, facts = build_engine(config, files.folder, tokenizer)
    runner = core._executor._runner
    decoder, runner._attention = runner._decoder, torch.compiler.disable(runner._attention.__call__)
    plain, compiled = decoder.forward, torch.compile(decoder.forward, dynamic=True)
    print(f"{files.name}, {facts.dtype}, {facts.threads} threads, {CONTEXT} tokens of context, torch {torch.__version__}")
    print(f"{'sequences':>9}{'plain ms':>10}{'compiled ms':>13}{'compiling s':>13}{'steps to break even':>21}")
    random = torch.Generator().manual_seed(SEED)
    for size in SIZES:
        for _ in range(size):
            ids = tuple(torch.randint(100, tokenizer.vocab_size, (CONTEXT,), generator=random).tolist())
            core.submit(Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)), None)
        while sum(1 for delta in core.step() if delta.token_ids) < size:
            pass
        decoder.forward, began = compiled, time.perf_counter()
        for _ in range(3):
            core.step()
        compiling = time.perf_counter() - began
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * STEPS):
            decoder.forward = compiled if turn % 2 else plain
            began = time.perf_counter()
            core.step()
            took[bool(turn % 2)].append(time.perf_counter() - began)
        before, after = (statistics.median(took[turn]) for turn in (False, True))
        even = f"{(compiling - 3 * after) / (before - after):,.0f}" if after < before else "never"
        print(f"{size:>9}{1e3 * before:>10.2f}{1e3 * after:>13.2f}{compiling - 3 * after:>13.1f}{even:>21}", flush=True)
        decoder.forward = plain
        while not core.idle:
            core.step()
        core.flush_cache()
    core.close()


if __name__ == "__main__":
    main()
