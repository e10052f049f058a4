"""The GPU path, checked and timed in one go: run it once where a GPU is, and keep what it prints.

    python benchmarks/gpu_check.py [--json gpu_check.json] [--seconds 330] [--small]

It needs torch with CUDA, Triton and this checkout, installed or not. A model of Llama 3.2 1B's shape gets random bfloat16 weights in
place. In this order: every kernel against its reference on the GPU itself (bfloat16 included, which the interpreter cannot do);
decode steps at 1, 8, 64 and 256 sequences of 1,000 tokens, as captured graphs, launched one by one, and on torch's own attention;
the same as graphs with the matrices in few bits, in each layout that a checkpoint may have;
64 branches of one prompt of 4,000 tokens with the prefix read once and 64 times; prefill; each kernel's time against the floor that
this very GPU sets (bytes at the speed of a large copy, operations at the speed of a large bfloat16 product, both measured first);
and transformers' Llama, eager and SDPA, where it is installed. What fails or finds no time left is a line that says so; the table is
printed last. `--small` runs everything at toy sizes on the CPU, in Triton's interpreter (float32): a test of this script. What is
measured, and how, stands in `on_gpu/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def find_agentrt() -> None:
    """Makes `agentrt` and `agentrt.kernels` importable from the checkout, where it is not installed."""
    if importlib.util.find_spec("agentrt") is None:
        sys.path.insert(0, str(CHECKOUT))
    if importlib.util.find_spec("agentrt.kernels") is None:
        place = CHECKOUT / "kernels"
        spec = importlib.util.spec_from_file_location("agentrt.kernels", place / "__init__.py", submodule_search_locations=[str(place)])
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["agentrt.kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if importlib.util.find_spec("platformdirs") is None:
        sys.modules["platformdirs"] = types.ModuleType("platformdirs")  # imported by the CPU's kernels, which are not used here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_check.json")
    parser.add_argument("--seconds", type=float, default=330.0, help="what has not begun by then is left out")
    parser.add_argument("--small", action="store_true", help="toy sizes on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    if options.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    find_agentrt()

    from on_gpu.course import run

    return run(options.json, options.seconds, small=options.small)


if __name__ == "__main__":
    sys.exit(main())
