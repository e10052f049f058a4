"""How long each kernel takes by itself, beside what the device cannot beat."""

from __future__ import annotations

from collections.abc import Callable

import torch
from agentrt.kernels.awq_matmul import awq_matmul
from agentrt.kernels.gate_up import gate_up
from agentrt.kernels.q4_matmul import q4_matmul
from agentrt.kernels.q8_matmul import q8_matmul
from agentrt.kernels.rms_norm import rms_norm
from agentrt.kernels.sample import sample
from agentrt.kernels.scaled_matmul import scaled_matmul
from agentrt.kernels.token_mask import mask_tokens

from agentrt.attention.base import AttentionBatch, AttentionSpec

from .clock import Gpu
from .report import Report
from .sizes import PAGE, Sizes
from .steps import (
    decode_batch,
    new_attention,
    slots_of,
    ways_of,
)


def measure_attention(report: Report, gpu: Gpu, sizes: Sizes) -> None:
    """One layer's attention alone."""
    store_bytes = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize

    def timed(what: str, batch: AttentionBatch, slots: int, read: float, operations: float) -> None:
        with report.section("kernels", what, needs=5) as add:
            tokens = sum(batch.query_lengths)
            store = tuple(torch.randn(slots, sizes.kv_heads, sizes.head_dim, device=sizes.device).to(sizes.dtype) for _ in range(2))
            qkv = torch.randn(tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim, device=sizes.device).to(sizes.dtype)
            angles = torch.randn(2, tokens, 1, sizes.head_dim, device=sizes.device).to(sizes.dtype)
            attention, spec = new_attention(sizes), AttentionSpec(sizes.head_dim**-0.5)
            moved = AttentionBatch(batch.query_lengths, batch.context_lengths, batch.slots, batch.new_slots.to(sizes.device), batch.shared)
            seconds = gpu.seconds(lambda: attention.from_qkv(qkv, (angles[0], angles[1]), sizes.heads, (store[0], store[1]), moved, spec))
            add(seconds * 1e6, "us", gpu.floor(read=read, operations=operations) * 1e6)

    for runs in (1, sizes.batches[-1]):
        batch = decode_batch(runs, sizes.context, sizes)
        timed(f"attention, {runs} decodes of {sizes.context}", batch.attention, slots_of(batch), store_bytes * runs * sizes.context, 0)
    long = 32_768 if gpu.cuda else 600
    batch = decode_batch(1, long, sizes)
    timed(f"attention, one decode of {long} (split)", batch.attention, slots_of(batch), store_bytes * long, 0)
    batch = decode_batch(sizes.branches, sizes.prompt + 64, sizes, shared=sizes.prompt // PAGE * PAGE)
    timed(f"attention, {sizes.branches} branches of {sizes.prompt}", batch.attention, slots_of(batch), store_bytes * (sizes.prompt + 64 * sizes.branches), 0)
    slots = torch.arange(sizes.prompt)
    timed(
        f"attention, prefill of {sizes.prompt}", AttentionBatch((sizes.prompt,), (0,), (slots,), slots), sizes.prompt, 0,
        2 * sizes.prompt**2 * sizes.heads * sizes.head_dim,
    )  # fmt: skip


def measure_kernels(report: Report, gpu: Gpu, sizes: Sizes) -> None:
    device, dtype, width, mlp = sizes.device, sizes.dtype, sizes.width, sizes.mlp
    item = dtype.itemsize

    def timed(what: str, call: Callable[[], object], read: float, operations: float = 0.0) -> None:
        with report.section("kernels", what, needs=5) as add:
            add(gpu.seconds(call) * 1e6, "us", gpu.floor(read=read, operations=operations) * 1e6)

    for rows in (1, 64, 2048) if gpu.cuda else (3,):
        x, big = torch.randn(rows, width, device=device).to(dtype), torch.randn(rows, 2 * mlp, device=device).to(dtype)
        weight, added = torch.ones(width, device=device).to(dtype), torch.randn(rows, width, device=device).to(dtype)
        timed(f"norm with addition, {rows} x {width}", lambda x=x, weight=weight, added=added: rms_norm(x, weight, 1e-5, added), 4 * rows * width * item)
        timed(f"gate, {rows} x {mlp}", lambda big=big: gate_up(big, "silu"), 3 * rows * mlp * item)
        dense = torch.randn(mlp, width, device=device).to(dtype)
        int8 = torch.randint(-127, 128, (mlp, width), dtype=torch.int8, device=device)
        codes = torch.randint(0, 256, (mlp, width // 2), dtype=torch.uint8, device=device)
        blocks = torch.rand(width // 32, mlp, device=device).to(dtype)
        words = torch.randint(-(2**31), 2**31 - 1, (width, mlp // 8), dtype=torch.int32, device=device)
        group = min(128, width)
        zeros, scales = words[: width // group].clone(), torch.rand(width // group, mlp, device=device).to(dtype)
        outs = torch.rand(mlp, device=device)
        operations, shape = 2.0 * rows * mlp * width, f"{rows} x {width} x {mlp}"
        activations = rows * (mlp + width) * item
        timed(f"torch's product, {shape}", lambda x=x, dense=dense: x @ dense.T, mlp * width * item + activations, operations)
        timed(f"int8 product, {shape}", lambda x=x, w=int8, s=outs: scaled_matmul(x, w, s), mlp * width + activations, operations / 2)
        timed(f"q4 product, {shape}", lambda x=x, c=codes, b=blocks: q4_matmul(x, c, b, b), mlp * width * 0.625 + activations, operations)
        timed(f"q8 product, {shape}", lambda x=x, c=int8, b=blocks: q8_matmul(x, c, b), mlp * width * 1.0625 + activations, operations)
        timed(f"awq product, {shape}", lambda x=x, c=words, z=zeros, s=scales: awq_matmul(x, c, z, s), mlp * width * 0.53 + activations, operations)
        if not gpu.cuda or torch.cuda.get_device_capability() >= (8, 9):
            fp8 = torch.randn(mlp, width, device=device).to(torch.float8_e4m3fn)
            timed(f"fp8 product, {shape}", lambda x=x, w=fp8, s=outs: scaled_matmul(x, w, s), mlp * width + activations, operations / 2)
    for rows in (1, sizes.batches[-1]):
        logits = torch.randn(rows, sizes.vocab, device=device) * 3
        read = rows * sizes.vocab * 4.0
        words = torch.full((rows, sizes.vocab // 32), -1, dtype=torch.int32, device=device)
        index = torch.arange(rows, dtype=torch.int32, device=device)
        timed(f"mask, {rows} rows", lambda logits=logits, words=words, index=index: mask_tokens(logits, words, index), rows * sizes.vocab / 8)
        for name, way in {"greedy": {}, "plain": {"temperature": 1.0}, "top-p .9": {"temperature": 1.0, "top_p": 0.9}, "top-k 40": {"temperature": 1.0, "top_k": 40}}.items():
            ways = ways_of(rows, device, **way)
            timed(f"sample {name}, {rows} rows", lambda logits=logits, ways=ways: sample(logits, ways), read)
        timed(f"torch.sort, {rows} rows", lambda logits=logits: logits.sort(-1), read)
