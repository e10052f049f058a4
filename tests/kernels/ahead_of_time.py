"""Compiles every launch of the kernels for GPUs that are not there, and prints what each takes as JSON.

Run as a script, without the interpreter: a wrapper is called with CPU tensors, its launches are caught, and what would have
been launched is compiled with the same blocks, warps and stages. So what is checked here is what runs.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import launches
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
#: Shared memory that a block may have, bytes: what compiles for 8.0 also runs on 8.6 and 8.9, which have less.
SHARED = {80: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
_DTYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1",
}  # fmt: skip


def source_of(function: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    """What triton would compile for this call: types, constants, and which arguments are multiples of 16."""
    names = {name: value for name, value in kwargs.items() if name in function.arg_names}
    bound = inspect.signature(function.fn).bind(*args, **names).arguments
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(function.params):
        value = bound[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _DTYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(function, signature, constants, attributes)


def compiled(source: ASTSource, capability: int, options: dict[str, Any]) -> dict[str, int]:
    """Registers, bytes of stack and of local memory a thread, bytes of shared memory a block."""
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {**found, "shared": int(kernel.metadata.shared), "most_shared": SHARED[capability]}


def main(names: list[str]) -> None:
    """Compiles the named launches for every target that they are meant for."""
    caught: list[tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]] = []

    def catch(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        caught.append((self, args, kwargs))

    JITFunction.run = catch
    report: list[dict[str, Any]] = []
    for name in names:
        launch = launches.LAUNCHES[name]
        caught.clear()
        launch.call()
        for function, args, kwargs in caught:
            options = {key: value for key, value in kwargs.items() if key not in function.arg_names}
            for capability in launch.capabilities:
                used = compiled(source_of(function, args, kwargs), capability, options)
                report.append({"launch": name, "kernel": function.__name__, "capability": capability, **used})
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
