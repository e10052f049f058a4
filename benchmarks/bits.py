"""What a product takes with weights of 4, 5, 6 and 8 bits, as a share of what it takes with 8: the same shapes in turns, in one process.

The shapes are those of 24 layers of Qwen 2.5 0.5B, each layer's weights in memory of their own, so that few rows read them from there. Numbers are random;
4 and 5 bits are without minima. With one thread it is one core.

    OMP_NUM_THREADS=1 python benchmarks/bits.py [--rows 1 8 512] [--layers 24] [--repeats 7]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from agentrt.kernels.quantized_linear import QuantizedWeight, isa, quantized_linear
from torch import Tensor

BITS = (8, 6, 5, 4)
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  #: outputs, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 32, 128, 512])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    held = {bits: layers(bits, options.layers) for bits in BITS}
    print(f"{isa()}, {platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {options.layers} layers")
    print(f"{'rows':>5}" + "".join(f"{f'{bits} bits':>24}" for bits in BITS) + "    ms, share of 8 bits, billions of multiplications a second")
    for rows in options.rows:
        inputs = {width: torch.randn(rows, width) for _, width in SHAPES}
        count = options.layers if rows < 64 else max(options.layers // 12, 1)
        medians = measure({bits: matrices[: count * len(SHAPES)] for bits, matrices in held.items()}, inputs, options.repeats)
        work = rows * count * sum(outputs * width for outputs, width in SHAPES)
        cells = (f"{ms:.1f} ({ms / medians[8]:.2f}) {work / ms / 1e6:.0f}" for ms in medians.values())
        print(f"{rows:5}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def layers(bits: int, count: int) -> list[tuple[Callable[[Tensor], Tensor], int]]:
    """Matrices in the order of a step, with how wide their inputs are."""
    weights = [random_weight(bits, *shape) for shape in SHAPES]
    return [(quantized_linear(weight, None), weight.inputs) for _ in range(count) for weight in weights]


def random_weight(bits: int, outputs: int, inputs: int) -> QuantizedWeight:
    groups = inputs // 32
    q = torch.randint(-127, 128, (outputs, groups, 32), dtype=torch.int8) if bits == 8 else torch.randint(0, 1 << bits, (outputs, groups, 32), dtype=torch.uint8)
    scale = torch.rand(outputs, groups).half()
    minimum = scale * -(1 << bits - 1) if bits < 6 else None
    return QuantizedWeight(inputs, bits, q, scale, minimum, torch.randint(-128, 128, (outputs, groups, 2), dtype=torch.int8) if bits == 6 else None)


def measure(held: dict[int, Sequence[tuple[Callable[[Tensor], Tensor], int]]], inputs: dict[int, Tensor], repeats: int) -> dict[int, float]:
    """Median milliseconds by bits, which take turns."""
    times: dict[int, list[float]] = {bits: [] for bits in held}
    for _ in range(repeats + 1):  # the first one warms up
        for bits, matrices in held.items():
            started = time.perf_counter()
            for multiply, width in matrices:
                multiply(inputs[width])
            times[bits].append((time.perf_counter() - started) * 1e3)
    return {bits: statistics.median(found[1:]) for bits, found in times.items()}


if __name__ == "__main__":
    main()
