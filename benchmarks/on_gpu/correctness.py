"""Every kernel against its reference on the device itself; a store is NaN where nothing may be read."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from agentrt.kernels.awq_matmul import awq_matmul, awq_weight
from agentrt.kernels.gate_up import gate_up, gate_up_reference
from agentrt.kernels.paged_attention import PagedKV, Scores, attend_reference
from agentrt.kernels.q4_matmul import q4_matmul, q4_weight
from agentrt.kernels.q8_matmul import q8_matmul, q8_weight
from agentrt.kernels.quantize_rows import quantize_rows, quantize_rows_reference
from agentrt.kernels.rms_norm import rms_norm, rms_norm_reference
from agentrt.kernels.rotary_kv import rotate_and_write, rotate_reference
from agentrt.kernels.sample import sample, sample_reference
from agentrt.kernels.scaled_matmul import scaled_matmul, scaled_matmul_reference
from agentrt.kernels.token_mask import mask_reference, mask_tokens
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec
from agentrt.attention.sharing import shared_prefixes
from agentrt.attention.triton_paged import TritonAttention

from .report import Report
from .sizes import PAGE, SEED, Sizes


def off(ours: Tensor, wanted: Tensor) -> float:
    """Largest difference, as a share of the largest number wanted."""
    if bool(ours.isnan().any()):
        raise ValueError("NaN")
    return float((ours.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30))


def check_attention(sizes: Sizes, head_dim: int, group: int, window: int | None, softcap: float | None) -> float:
    """Prefill, decode, a forced run and a shared prefix in one batch over a store that is NaN where nothing may be read."""
    generator = torch.Generator(sizes.device).manual_seed(SEED)
    kv_heads = 2
    news, contexts = (1, 1, 3, 70, 1), (210, 190, 200, 30, 900 if sizes.device.type == "cuda" else 300)
    shared = 160
    random = np.random.default_rng(SEED)
    free = random.permutation(sum(-(-(new + context) // PAGE) for new, context in zip(news, contexts, strict=True)) + 2).tolist()
    total = len(free) * PAGE
    common = [free.pop() for _ in range(shared // PAGE)]
    slots = []
    for run, (new, context) in enumerate(zip(news, contexts, strict=True)):
        pages = (common if run < 3 else []) + [free.pop() for _ in range(-(-(new + context) // PAGE) - (len(common) if run < 3 else 0))]
        slots.append((torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).view(-1)[: new + context])
    store = tuple(torch.full((total, kv_heads, head_dim), math.nan, dtype=sizes.dtype, device=sizes.device) for _ in range(2))
    for mine, context in zip(slots, contexts, strict=True):
        for tensor in store:
            tensor[mine[:context].to(sizes.device)] = torch.randn(context, kv_heads, head_dim, generator=generator, device=sizes.device).to(sizes.dtype)
    fresh = torch.cat([mine[context:] for mine, context in zip(slots, contexts, strict=True)]).to(sizes.device)
    batch = AttentionBatch(news, contexts, tuple(slots), fresh, shared_prefixes(slots, contexts))
    q, k, v = (
        torch.randn(sum(news), heads, head_dim, generator=generator, device=sizes.device).to(sizes.dtype) for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    attention = TritonAttention(kv_heads * group, kv_heads, head_dim, PAGE, sizes.device)
    out = attention(q, k, v, (store[0], store[1]), batch, AttentionSpec(head_dim**-0.5, window, softcap))
    worst, row = 0.0, 0
    for mine, new, context in zip(slots, news, contexts, strict=True):
        pages = (mine[::PAGE] // PAGE).int().to(sizes.device)
        wanted = attend_reference(
            q[row : row + new], PagedKV(store[0], store[1], pages, PAGE), 0, list(range(context + 1, context + new + 1)), Scores(head_dim**-0.5, window, softcap)
        )
        worst, row = max(worst, off(out[row : row + new], wanted)), row + new
    return worst


def check_rows(sizes: Sizes) -> float:
    """Norm, gate and rotary with its write."""
    device, dtype = sizes.device, sizes.dtype
    rows, added, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((7, sizes.width), (7, sizes.width), (sizes.width,)))
    total = rows + added
    worst = off(rms_norm(rows, weight, 1e-5, added), rms_norm_reference(total, weight, 1e-5))
    worst = max(worst, off(rows, total))
    fused = torch.randn(7, 2 * sizes.mlp, device=device).to(dtype)
    worst = max(worst, *(off(gate_up(fused, kind), gate_up_reference(fused, kind)) for kind in ("silu", "gelu", "gelu_tanh")))
    qkv = torch.randn(5, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim, device=device).to(dtype)
    cos, sin = torch.randn(2, 5, 1, sizes.head_dim, device=device).to(dtype)
    keys, values = (torch.full((9, sizes.kv_heads, sizes.head_dim), math.nan, device=device, dtype=dtype) for _ in range(2))
    slots = torch.tensor([3, -1, 8, 0, 5], device=device)
    q = rotate_and_write(qkv, cos, sin, slots, keys, values, sizes.heads)
    wanted = rotate_reference(qkv[:, : sizes.heads + sizes.kv_heads], cos, sin)
    written = slots >= 0
    worst = max(worst, off(q, wanted[:, : sizes.heads]), off(keys[slots[written]], wanted[written][:, sizes.heads :]))
    if not torch.equal(values[slots[written]], qkv[written][:, sizes.heads + sizes.kv_heads :]) or int(keys.isnan().all(-1).all(-1).sum()) != 5:
        raise ValueError("values are not where they belong")
    return worst


def check_products(sizes: Sizes, rows: int) -> dict[str, float]:
    """Each quantised product against float64."""
    device, dtype, out, inputs = sizes.device, sizes.dtype, 200, 256
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    words = torch.randint(-(2**31), 2**31 - 1, (inputs, out // 8), dtype=torch.int32, generator=generator).to(device)
    zeros = words[: inputs // 128].clone()
    scales = torch.rand(inputs // 128, out, generator=generator).to(device, dtype)
    int8 = torch.randint(-127, 128, (out, inputs), dtype=torch.int8, generator=generator).to(device)
    codes = torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8, generator=generator).to(device)
    blocks = torch.rand(inputs // 32, out, generator=generator).to(device, dtype)
    per_output = torch.rand(out, generator=generator).to(device)
    worst = {
        "int8": off(scaled_matmul(x, int8, per_output), scaled_matmul_reference(*quantize_rows_reference(x, torch.int8), int8, per_output)),
        "q4": off(q4_matmul(x, codes, blocks, -8 * blocks), x.double() @ q4_weight(codes, blocks, -8 * blocks).T),
        "q8": off(q8_matmul(x, int8, blocks), x.double() @ q8_weight(int8, blocks).T),
        "awq": off(awq_matmul(x, words, zeros, scales), x.double() @ awq_weight(words, zeros, scales)),
    }
    if sizes.device.type != "cuda" or torch.cuda.get_device_capability() >= (8, 9):
        weight = torch.randn(out, inputs, generator=generator).to(device).to(torch.float8_e4m3fn)
        quantized, row_scales = quantize_rows(x, torch.float8_e4m3fn)
        worst["fp8"] = off(scaled_matmul(x, weight, per_output), scaled_matmul_reference(quantized, row_scales, weight, per_output))
        if sizes.device.type == "cuda":  # the interpreter rounds otherwise
            exact, _ = quantize_rows_reference(x, torch.float8_e4m3fn)
            worst["fp8 rounding"] = float((quantized.float() != exact.float()).float().mean())
    return worst


def check_sampling(sizes: Sizes) -> float:
    """Share of rows whose token is not the reference's: only a number within rounding of a boundary may differ."""
    vocab, device = sizes.vocab, sizes.device
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05), (0.8, 50, 0.9, 0.02)]
    count = 60 if device.type == "cuda" else 6
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(SEED)).to(device) * 4
    numbers = np.random.default_rng(SEED).random(count)
    ways = [(*kinds[row % len(kinds)], number) for row, number in enumerate(numbers)]
    mask = torch.randint(-(2**31), 2**31 - 1, (count, vocab // 32), dtype=torch.int32, generator=torch.Generator().manual_seed(1)).to(device)
    masked = torch.stack([mask_reference(row, words) for row, words in zip(logits, mask, strict=True)])
    mask_tokens(logits, mask, torch.arange(count, dtype=torch.int32, device=device))
    if not torch.equal(logits, masked):
        raise ValueError("the mask kernel and its reference differ")
    ours = sample(logits, torch.tensor(ways, dtype=torch.float64, device=device).T.contiguous()).tolist()
    narrow = [(*(float(np.float32(one)) for one in way[:4]), way[4]) for way in ways]
    wanted = [sample_reference(row.cpu(), way[0], int(way[1]), *way[2:]) for row, way in zip(logits, narrow, strict=True)]
    return sum(one != two for one, two in zip(ours, wanted, strict=True)) / count


def check_all(report: Report, sizes: Sizes) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4}[sizes.dtype]

    def told(section: str, what: str, check: Callable[[], float | dict[str, float]], limit: float) -> None:
        with report.section(section, what) as add:
            answer = check()
            for name, error in answer.items() if isinstance(answer, dict) else [("", answer)]:
                add(error, "error", limit, "ok" if error <= limit else "WRONG", f"{what} {name}".strip())

    heads = (64, 80, 96, 128, 256) if sizes.device.type == "cuda" else (64,)
    for head_dim in heads:
        told("correct", f"attention, heads of {head_dim}", lambda head_dim=head_dim: check_attention(sizes, head_dim, 4, None, None), tolerance)
    told("correct", "attention, 7 heads a KV head, window", lambda: check_attention(sizes, 64, 7, 50, None), tolerance)
    told("correct", "attention, one KV head each, soft cap", lambda: check_attention(sizes, 128, 1, None, 30.0), tolerance)
    told("correct", "norm, gate, rotary, KV write", lambda: check_rows(sizes), tolerance)
    for rows in (1, 40, 300) if sizes.device.type == "cuda" else (3,):
        told("correct", f"products of {rows} rows:", lambda rows=rows: check_products(sizes, rows), tolerance)
    told("correct", "masks and sampling", lambda: check_sampling(sizes), 0.02)
