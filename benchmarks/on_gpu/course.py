"""The course of the check: what is run in which order, until no time is left, and what is told at the end."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from .clock import Gpu
from .correctness import check_all
from .model import make_model
from .report import Report, table
from .single_kernels import measure_attention, measure_kernels
from .sizes import SEED, SMALL, Sizes
from .whole_steps import (
    measure_branches,
    measure_decode,
    measure_few_bits,
    measure_mixed,
    measure_prefill,
    measure_transformers,
)


@torch.inference_mode()
def run(to: Path, most_seconds: float, *, small: bool) -> int:
    """Runs everything; returns the exit status: 1 if anything was wrong, 2 without a GPU.

    Args:
        to: The JSON file.
        most_seconds: What has not begun by then is left out.
        small: Whether at toy sizes, on the CPU.
    """
    if not small and not torch.cuda.is_available():
        print("no GPU here; --small tests the script itself", file=sys.stderr)
        return 2
    torch.manual_seed(SEED)
    sizes = Sizes(torch.device("cpu"), torch.float32, **SMALL) if small else Sizes(torch.device("cuda"), torch.bfloat16)  # type: ignore[arg-type]
    begun = time.monotonic()
    report = Report(begun + most_seconds)
    gpu = Gpu(sizes)
    machine = {
        "device": torch.cuda.get_device_name() if gpu.cuda else "cpu, interpreter",
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "copy_GB_per_second": gpu.bytes_per_second / 1e9, "product_TFLOP_per_second": gpu.flops / 1e12,
    }  # fmt: skip
    print(machine, flush=True)
    check_all(report, sizes)
    measure_all(report, gpu, sizes)
    seconds = time.monotonic() - begun
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps({"machine": machine, "seconds": seconds, "lines": [asdict(line) for line in report.lines]}, indent=1))
    print(f"\n{machine}\n{table(report.lines)}\n{seconds:.0f} s")
    return 1 if any(line.note == "WRONG" or (line.section == "correct" and line.value is None) for line in report.lines) else 0


def measure_all(report: Report, gpu: Gpu, sizes: Sizes) -> None:
    """What matters most comes first, since time may run out."""
    model = make_model(sizes)
    measure_decode(report, gpu, model, sizes)
    measure_mixed(report, gpu, model, sizes)
    measure_branches(report, gpu, model, sizes)
    measure_prefill(report, gpu, model, sizes)
    del model
    measure_few_bits(report, gpu, sizes)
    measure_attention(report, gpu, sizes)
    measure_kernels(report, gpu, sizes)
    measure_transformers(report, gpu, sizes)
