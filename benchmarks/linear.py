"""Milliseconds that a step spends in its matrices, by dtype and number of rows, beside torch in float32.

All linears of all layers of the default model, then the output head, in the order of a step, each weight read from its
own memory. The dtypes take turns within each repeat, and what counts is the ratio of medians. 512 rows are a chunk of a
prompt: there the head scores one row.

    python benchmarks/linear.py [--model smollm2-135m] [--dtypes int8 int4 bfloat16] [--repeats 9] [--out linear.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from agentrt.kernels.cpu.build import built
from torch import Tensor

from agentrt.hub import resolve_model
from agentrt.models.decoder import Decoder
from agentrt.models.loader import load_model

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
PREFILL = 512
Part = tuple[Callable[[Tensor], Tensor], int]  #: a matrix, and how wide its input is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("linear.json"))
    options = parser.parse_args()
    dtypes = ("float32", *options.dtypes)
    parts = {dtype: load(options.model, dtype) for dtype in dtypes}
    print(f"{options.model}, {platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads; {built('linear').found.partition(',')[0]}")
    print(f"{'rows':>5}" + "".join(f"{dtype:>22}" for dtype in dtypes) + "    ms: layers + head (times as fast as float32)")
    report: dict[str, dict[str, list[float]]] = {}
    for rows in options.rows:
        medians = measure(parts, rows, options.repeats if rows < 64 else 3)
        report[str(rows)] = {dtype: list(pair) for dtype, pair in medians.items()}
        base = sum(medians["float32"])
        cells = (f"{layers:.1f} + {head:.1f} ({base / (layers + head):.1f})" for layers, head in medians.values())
        print(f"{rows:5}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def load(model: str, dtype: str) -> tuple[list[Part], Part, torch.dtype]:
    """The matrices of all layers in the order of a step, the head, and the activations' dtype."""
    bits = int(dtype.removeprefix("int")) if dtype.startswith("int") else None
    activations = torch.float32 if bits else getattr(torch, dtype)
    decoder = load_model(resolve_model(model).folder, activations, bits=bits).decoder
    if not isinstance(decoder, Decoder):
        raise SystemExit(f"{model} has no native decoder")
    flags, config = decoder.config.decoder, decoder.config
    width, heads = flags.width, config.heads * config.head_dim
    layers: list[Part] = []
    for layer in decoder._layers:
        layers += [(layer.qkv, width), (layer.output, heads), (layer.gate_up, width), (layer.down, flags.mlp_width)]
    return layers, (decoder._head, width), activations


@torch.inference_mode()
def measure(parts: dict[str, tuple[list[Part], Part, torch.dtype]], rows: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of (layers, head) by dtype, the dtypes taking turns."""
    torch.manual_seed(0)
    times: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in parts}
    for _ in range(repeats + 1):  # the first one warms up
        for dtype, (layers, head, activations) in parts.items():
            inputs = {width: torch.randn(rows, width, dtype=activations) for _, width in (*layers, head)}
            first = inputs[head[1]][:1] if rows == PREFILL else inputs[head[1]]
            times[dtype].append((seconds(layers, inputs), seconds([head], {head[1]: first})))
    return {dtype: (_median([a for a, _ in found[1:]]), _median([b for _, b in found[1:]])) for dtype, found in times.items()}


def seconds(parts: Sequence[Part], inputs: dict[int, Tensor]) -> float:
    started = time.perf_counter()
    for multiply, width in parts:
        multiply(inputs[width])
    return time.perf_counter() - started


def _median(values: list[float]) -> float:
    return statistics.median(values) * 1e3


if __name__ == "__main__":
    main()
