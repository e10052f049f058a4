"""The GPU path, checked and timed in one go: run it once where a GPU is, and keep what it prints.

    python benchmarks/gpu_check.py [--json gpu_check.json] [--seconds 330] [--small]

It needs torch with CUDA, Triton and this checkout, installed or not. A model of Llama 3.2 1B's shape gets random bfloat16 weights in
place. In this order: every kernel against its reference on the GPU itself (bfloat16 included, which the interpreter cannot do);
decode steps at 1, 8, 64 and 256 sequences of 1,000 tokens, as captured graphs, launched one by one, and on torch's own attention;
the same as graphs with the matrices in few bits, in each layout that a checkpoint may have;
64 branches of one prompt of 4,000 tokens with the prefix read once and 64 times; prefill; each kernel's time against the floor that
this very GPU sets (bytes at the speed of a large copy, operations at the speed of a large bfloat16 product, both measured first);
and transformers' Llama, eager and SDPA, where it is installed. What fails or finds no time left is a line that says so; the table is
printed last. `--small` runs everything at toy sizes on the CPU, in Triton's interpreter (float32): a test of this script.
"""

# ruff: noqa: E402, I001  (what can be imported is settled before the imports)
from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


if "--small" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
find_agentrt()

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.sharing import shared_prefixes
from agentrt.attention.triton_paged import TritonAttention
from agentrt.engine.batch import ForwardBatch
from agentrt.engine.step_graphs import StepGraphs
from agentrt.engine.kv_store import KVStore
from agentrt.kernels.awq_matmul import awq_matmul, awq_weight
from agentrt.kernels.gate_up import gate_up, gate_up_reference
from agentrt.kernels.paged_attention import PagedKV, Scores, attend_reference
from agentrt.kernels.q4_matmul import q4_matmul, q4_weight
from agentrt.kernels.q8_matmul import q8_matmul, q8_weight
from agentrt.kernels.quantize_rows import quantize_rows, quantize_rows_reference
from agentrt.kernels.quantized_linear import QuantizedWeight
from agentrt.kernels.rms_norm import rms_norm, rms_norm_reference
from agentrt.kernels.rotary_kv import rotate_and_write, rotate_reference
from agentrt.kernels.sample import sample, sample_reference
from agentrt.kernels.scaled_matmul import scaled_matmul, scaled_matmul_reference
from agentrt.kernels.token_mask import mask_reference, mask_tokens
from agentrt.models.config import ModelConfig
from agentrt.models.decoder import Decoder, weight_shapes
from agentrt.models.device_linear import DeviceLinears
from agentrt.models.linear import dense
from agentrt.models.quantized_checkpoint import AwqWeight, RowScaled

SEED = 0
PAGE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how large."""

    device: torch.device
    dtype: torch.dtype
    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    mlp: int = 8192
    vocab: int = 128_256
    context: int = 1024
    batches: tuple[int, ...] = (1, 8, 64, 256)
    branches: int = 64
    prompt: int = 4096
    prefill: int = 2048
    repeats: int = 20

    def config(self) -> dict[str, Any]:
        """As the model's config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.width, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
            "vocab_size": self.vocab, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
            "tie_word_embeddings": True,
        }  # fmt: skip


SMALL = {
    "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128, "vocab": 320, "context": 40, "batches": (1, 3),
    "branches": 3, "prompt": 144, "prefill": 40, "repeats": 1,
}  # fmt: skip


@dataclass(slots=True)
class Line:
    """One row of the table.

    Attributes:
        section, what: Of it.
        value, unit: What was measured; None: it failed or was left out.
        floor: What the GPU cannot beat, in the same unit.
        note: In words.
    """

    section: str
    what: str
    value: float | None
    unit: str = ""
    floor: float | None = None
    note: str = ""


@dataclass(slots=True)
class Report:
    """Lines so far, and the time that is left."""

    until: float
    lines: list[Line] = field(default_factory=list)

    @contextmanager
    def section(self, name: str, what: str, *, needs: float = 0.0) -> Iterator[Callable[..., None]]:
        """Runs one measurement: its failure is a line of the table, and with less than `needs` seconds left it is skipped."""

        def add(value: float, unit: str, floor: float | None = None, note: str = "", what: str = what) -> None:
            self.lines.append(Line(name, what, value, unit, floor, note))
            print(f"{name}: {what}: {value:.4g} {unit} {note}", flush=True)

        try:
            if time.monotonic() + needs > self.until:
                raise TimeoutError("no time left")
            yield add
        except Exception as error:  # every failure is a result here
            self.lines.append(Line(name, what, None, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"))
            print(f"{name}: {what}: {self.lines[-1].note}", flush=True)


class Gpu:
    """The device: its clock, and the two speeds that floors are made of."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.cuda = sizes.device.type == "cuda"
        self._sweep = torch.empty(256 << 20 if self.cuda else 1, dtype=torch.uint8, device=sizes.device)
        big = (1 << 30) if self.cuda else 1 << 16
        source, target = (torch.empty(big, dtype=torch.uint8, device=sizes.device) for _ in range(2))
        self.bytes_per_second = 2 * big / self.seconds(lambda: target.copy_(source))
        side = 8192 if self.cuda else 64
        a, b = (torch.randn(side, side, device=sizes.device).to(sizes.dtype) for _ in range(2))
        self.flops = 2 * side**3 / self.seconds(lambda: a @ b)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, cold: bool = True) -> float:
        """Median time of a call on the device, with its inputs out of the cache if `cold`."""
        for _ in range(3 if self.cuda else 1):
            call()
        times = []
        for _ in range(self.sizes.repeats):
            if cold:
                self._sweep.zero_()
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def floor(self, *, read: float = 0.0, operations: float = 0.0) -> float:
        """Seconds that so many bytes or operations take, whichever is more."""
        return max(read / self.bytes_per_second, operations / self.flops)


# -- the model ---------------------------------------------------------------------------------------------------------------


class Sdpa:
    """Attention as a plain torch program does it: each sequence's KV in one piece, one fused call a layer."""

    def __init__(self, runs: int) -> None:
        self._runs = runs

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, store: tuple[Tensor, Tensor], batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """All runs are of one length; their slots are neighbours, run after run."""
        keys, values = store
        keys.index_copy_(0, batch.new_slots, k)
        values.index_copy_(0, batch.new_slots, v)
        seen = batch.context_lengths[0] + batch.query_lengths[0]
        k, v = (tensor[: self._runs * seen].view(self._runs, seen, *tensor.shape[1:]).transpose(1, 2) for tensor in (keys, values))
        rows = q.view(self._runs, -1, *q.shape[1:]).transpose(1, 2)
        causal = rows.shape[2] > 1  # whole prompts only
        return scaled_dot_product_attention(rows, k, v, is_causal=causal, scale=spec.scale, enable_gqa=True).transpose(1, 2).reshape(q.shape)


def make_model(sizes: Sizes, layout: str | None = None) -> Decoder:
    """Random weights; matrices in a layout of few bits, if one is named."""
    config = ModelConfig.from_hf(sizes.config())
    generator = torch.Generator(sizes.device).manual_seed(SEED)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if layout is not None and "_proj" in name:
            weights[name] = torch.zeros(1).expand(shape)  # made below, not from this
            continue
        weight = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
        weights[name] = weight.fill_(1.0) if len(shape) == 1 else weight.normal_(0, shape[1] ** -0.5, generator=generator)
    return Decoder(config, weights, dense if layout is None else few_bits(layout, config, sizes.device))


#: Bits of a weight, scales included, in the layouts that a checkpoint may have.
LAYOUTS = {"q4": 5.0, "q8": 8.5, "awq": 4.16, "int8": 8.0, "fp8": 8.0}


def few_bits(layout: str, config: ModelConfig, device: torch.device) -> DeviceLinears:
    """Holds random matrices in that layout, and the head in groups of 8 bits."""
    shapes = weight_shapes(config)

    def grouped(name: str, values: Tensor) -> list[QuantizedWeight]:
        del values
        out, inputs = shapes["model.embed_tokens.weight" if "lm_head" in name else name]
        scale = torch.full((out, inputs // 32), inputs**-0.5 / (40 if layout == "q8" or "lm_head" in name else 5), device=device)
        if layout == "q8" or "lm_head" in name:
            return [QuantizedWeight(inputs, torch.randint(-80, 81, (out, inputs // 32, 32), dtype=torch.int8, device=device), scale)]
        return [QuantizedWeight(inputs, torch.randint(0, 16, (out, inputs // 32, 32), dtype=torch.uint8, device=device), scale, -7.5 * scale)]

    def packed(name: str) -> list[AwqWeight] | list[RowScaled]:
        if "lm_head" in name or layout in ("q4", "q8"):
            return []
        out, inputs = shapes[name]
        if layout == "awq":
            groups = max(inputs // 128, 1)
            words = torch.randint(-(2**31), 2**31 - 1, (inputs, out // 8), dtype=torch.int32, device=device)
            return [AwqWeight(words, words[:groups].clone(), torch.full((groups, out), inputs**-0.5 / 5, device=device).half())]
        numbers = torch.randn(out, inputs, device=device)
        codes = (numbers * 40).clamp(-127, 127).to(torch.int8) if layout == "int8" else numbers.to(torch.float8_e4m3fn)
        return [RowScaled(codes, torch.full((out,), inputs**-0.5 / (40 if layout == "int8" else 1), device=device))]

    return DeviceLinears(4 if layout in ("q4", "awq") else 8, grouped, packed, device)


def decode_batch(runs: int, context: int, sizes: Sizes, *, shared: int = 0, scattered: bool = True) -> ForwardBatch:
    """One new token for each of some sequences, on pages in random order; so many leading tokens are common to all."""
    random = np.random.default_rng(SEED)
    pages_each = -(-(context + 1) // PAGE)
    common = shared // PAGE
    count = common + runs * (pages_each - common)
    order = random.permutation(count) if scattered else np.arange(count)
    own = order[common:].reshape(runs, -1)
    slots = []
    for run in range(runs):
        pages = np.concatenate((order[:common], own[run]))
        if scattered:
            slots.append(torch.from_numpy((pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: context + 1]))
        else:
            slots.append(torch.arange(run * (context + 1), (run + 1) * (context + 1)))
    contexts = (context,) * runs
    attention = AttentionBatch((1,) * runs, contexts, tuple(slots), torch.stack([slot[-1] for slot in slots]), shared_prefixes(slots, contexts))
    tokens = torch.from_numpy(random.integers(0, sizes.vocab, runs))
    return ForwardBatch(tokens, torch.full((runs,), context), attention, torch.arange(runs), 0)


def new_store(config: ModelConfig, slots: int, sizes: Sizes) -> KVStore:
    store = KVStore(config, slots, sizes.dtype, sizes.device)
    for layer in range(len(store)):
        for tensor in store[layer]:
            tensor.normal_()
    return store


def slots_of(batch: ForwardBatch) -> int:
    return max(int(slots.max()) for slots in batch.attention.slots) // PAGE * PAGE + PAGE


def ways_of(rows: int, device: torch.device, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    numbers = np.random.default_rng(SEED).random(rows).tolist()
    return torch.tensor([[temperature] * rows, [top_k] * rows, [top_p] * rows, [0.0] * rows, numbers], dtype=torch.float64, device=device)


class Steps:
    """Decode steps of one model and attention, from the host's batch to the host's tokens."""

    def __init__(self, model: Decoder, store: KVStore, attention: Attention, sizes: Sizes, graphs: bool) -> None:
        self._model, self._store, self._attention, self._sizes = model, store, attention, sizes
        capture = None if sizes.device.type == "cuda" else (lambda step: step)
        self._graphs = (
            StepGraphs(model.forward, store, attention, model.config.windows, most_new=512, device=sizes.device, capture=capture)  # type: ignore[arg-type]
            if graphs
            else None
        )

    def __call__(self, batch: ForwardBatch) -> list[int]:
        """A step with greedy tokens, waited for, and planned anew."""
        batch.attention.prepared.clear()
        hidden = self._graphs.forward(batch) if self._graphs is not None else self._eager(batch)
        logits = self._model.logits(hidden)
        tokens: list[int] = sample(logits, ways_of(len(logits), logits.device)).tolist()
        return tokens

    def _eager(self, batch: ForwardBatch) -> Tensor:
        if self._sizes.device.type == "cuda":
            batch = batch.on(self._sizes.device, slots=False)
        return self._model.forward(batch.token_ids, batch.positions, batch.attention, self._attention, self._store, batch.logits_rows)

    def seconds(self, batch: ForwardBatch, gpu: Gpu) -> float:
        """Median seconds of a step, planning and waiting included."""
        for _ in range(3 if gpu.cuda else 1):
            self(batch)
        times = []
        for _ in range(gpu.sizes.repeats):
            begun = time.perf_counter()
            self(batch)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)


# -- correctness ---------------------------------------------------------------------------------------------------------------


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


# -- speed ----------------------------------------------------------------------------------------------------------------------


def weight_bytes(model: Decoder, sizes: Sizes) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(model.config).values()) * sizes.dtype.itemsize


def kv_bytes(tokens: int, sizes: Sizes) -> int:
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize * tokens


def new_attention(sizes: Sizes) -> TritonAttention:
    return TritonAttention(sizes.heads, sizes.kv_heads, sizes.head_dim, PAGE, sizes.device)


def measure_decode(report: Report, gpu: Gpu, model: Decoder, sizes: Sizes) -> None:
    """Tokens a second, from the host's batch to the host's tokens."""
    for runs in sizes.batches:
        floor = runs / gpu.floor(read=weight_bytes(model, sizes) + kv_bytes(runs * sizes.context, sizes))
        what = f"{runs} x {sizes.context} tokens"
        with report.section("decode", f"{what}, graphs", needs=15) as add:
            batch = decode_batch(runs, sizes.context, sizes)
            store = new_store(model.config, slots_of(batch), sizes)
            add(runs / Steps(model, store, new_attention(sizes), sizes, True).seconds(batch, gpu), "tokens/s", floor)
        with report.section("decode", f"{what}, launched", needs=15) as add:
            add(runs / Steps(model, store, new_attention(sizes), sizes, False).seconds(batch, gpu), "tokens/s", floor)
        with report.section("decode", f"{what}, torch SDPA, launched", needs=15) as add:
            plain = decode_batch(runs, sizes.context, sizes, scattered=False)
            store = new_store(model.config, slots_of(plain), sizes)
            add(runs / Steps(model, store, Sdpa(runs), sizes, False).seconds(plain, gpu), "tokens/s", floor)


def mixed_batch(runs: int, prompt: int, sizes: Sizes) -> ForwardBatch:
    """Decodes, every other one with a forced token behind it, and a new prompt."""
    decodes = decode_batch(runs, sizes.context, sizes)
    news = (*(1 + run % 2 for run in range(runs)), prompt)
    contexts = (*(sizes.context + 1 - new for new in news[:-1]), 0)
    slots = (*decodes.attention.slots, torch.arange(slots_of(decodes), slots_of(decodes) + prompt))
    fresh = torch.cat([own[context:] for own, context in zip(slots, contexts, strict=True)])
    positions = torch.cat([torch.arange(context, context + new) for context, new in zip(contexts, news, strict=True)])
    last = torch.tensor(news).cumsum(0) - 1
    attention = AttentionBatch(news, contexts, slots, fresh, shared_prefixes(slots, contexts))
    return ForwardBatch(torch.arange(len(fresh)) % sizes.vocab, positions, attention, last, 0)


def measure_mixed(report: Report, gpu: Gpu, model: Decoder, sizes: Sizes) -> None:
    """A small step of several kinds of runs, as one graph and launched: both must choose the same tokens."""
    runs, prompt = sizes.batches[-2], min(64, sizes.prefill)
    batch = mixed_batch(runs, prompt, sizes)
    store = new_store(model.config, slots_of(batch), sizes)
    chosen: dict[bool, list[int]] = {}
    for graphs in (True, False):
        with report.section("decode", f"{runs} decodes, forced tokens, a prompt of {prompt}, {'graph' if graphs else 'launched'}", needs=10) as add:
            steps = Steps(model, store, new_attention(sizes), sizes, graphs)
            chosen[graphs] = steps(batch)
            note = "" if graphs or chosen.get(True) == chosen[graphs] else "not the same tokens"
            add(steps.seconds(batch, gpu) * 1e3, "ms", note=note)


def measure_few_bits(report: Report, gpu: Gpu, sizes: Sizes) -> None:
    """The same decode steps, as graphs, with the matrices in few bits."""
    for layout, bits in LAYOUTS.items():
        if layout == "fp8" and gpu.cuda and torch.cuda.get_device_capability() < (8, 9):
            continue
        with report.section("decode", f"model in {layout}", needs=20):
            model = make_model(sizes, layout)
            head = sizes.vocab * sizes.width
            shapes = weight_shapes(model.config).values()
            matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2) - head
            for runs in dict.fromkeys((sizes.batches[0], sizes.batches[-2])):
                with report.section("decode", f"{runs} x {sizes.context} tokens in {layout}, graphs", needs=15) as add:
                    batch = decode_batch(runs, sizes.context, sizes)
                    store = new_store(model.config, slots_of(batch), sizes)
                    read = (matrices * bits + head * LAYOUTS["q8"]) / 8 + kv_bytes(runs * sizes.context, sizes)
                    add(runs / Steps(model, store, new_attention(sizes), sizes, True).seconds(batch, gpu), "tokens/s", runs / gpu.floor(read=read))


def measure_branches(report: Report, gpu: Gpu, model: Decoder, sizes: Sizes) -> None:
    """Branches of one prompt, the prompt read once for all, or by each."""
    runs, context = sizes.branches, sizes.prompt + 64
    what = f"{runs} branches of {sizes.prompt}"
    once = kv_bytes(sizes.prompt + runs * 64, sizes)
    for shared, read in ((True, once), (False, kv_bytes(runs * context, sizes))):
        name = f"{what}, prefix read {'once' if shared else 'by each'}"
        with report.section("branches", name, needs=15) as add:
            batch = decode_batch(runs, context, sizes, shared=sizes.prompt // PAGE * PAGE)
            if not shared:
                alone = AttentionBatch(
                    batch.attention.query_lengths, batch.attention.context_lengths, batch.attention.slots, batch.attention.new_slots
                )
                batch = ForwardBatch(batch.token_ids, batch.positions, alone, batch.logits_rows, 0)
            store = new_store(model.config, slots_of(batch), sizes)
            seconds = Steps(model, store, new_attention(sizes), sizes, True).seconds(batch, gpu)
            add(runs / seconds, "tokens/s", runs / gpu.floor(read=weight_bytes(model, sizes) + read))


def measure_prefill(report: Report, gpu: Gpu, model: Decoder, sizes: Sizes) -> None:
    """One prompt in one run, and a second chunk behind it."""
    tokens = sizes.prefill
    matrices = sum(math.prod(shape) for name, shape in weight_shapes(model.config).items() if len(shape) == 2 and "embed" not in name)

    def operations(context: int) -> float:
        pairs = tokens * context + tokens * tokens / 2
        return 2 * matrices * tokens + 4 * pairs * sizes.heads * sizes.head_dim * sizes.layers

    def batch_of(context: int) -> ForwardBatch:
        slots = torch.arange(context + tokens)
        attention = AttentionBatch((tokens,), (context,), (slots,), slots[context:])
        return ForwardBatch(torch.arange(tokens) % sizes.vocab, slots[context:], attention, torch.tensor([tokens - 1]), 0)

    def measured(attention: Attention, context: int) -> float:
        store = new_store(model.config, -(-(context + tokens) // PAGE) * PAGE, sizes)
        batch = batch_of(context)
        if gpu.cuda:
            batch = batch.on(sizes.device, slots=False)
        seconds = gpu.seconds(lambda: model.forward(batch.token_ids, batch.positions, batch.attention, attention, store))
        return operations(context) / seconds / 1e12

    for context in (0, tokens):
        with report.section("prefill", f"{tokens} tokens behind {context}", needs=10) as add:
            add(measured(new_attention(sizes), context), "TFLOP/s", gpu.flops / 1e12)
    with report.section("prefill", f"{tokens} tokens behind 0, torch SDPA", needs=10) as add:
        add(measured(Sdpa(1), 0), "TFLOP/s", gpu.flops / 1e12)


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


def measure_transformers(report: Report, gpu: Gpu, sizes: Sizes) -> None:
    """The same shape in transformers, one token at a time over a cache of its own."""
    for way in ("eager", "sdpa"):
        for runs in sizes.batches[:3]:
            with report.section("decode", f"{runs} x {sizes.context} tokens, transformers {way}", needs=25) as add:
                from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

                config = LlamaConfig(**{key: value for key, value in sizes.config().items() if key not in ("architectures", "model_type")})
                config._attn_implementation = way
                with torch.device(sizes.device):
                    model = LlamaForCausalLM(config).to(sizes.dtype).eval()
                cache = DynamicCache()
                ids = torch.zeros((runs, sizes.context), dtype=torch.int64, device=sizes.device)
                for piece in ids.split(256, 1):
                    model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)

                def step(model: Any = model, cache: Any = cache, runs: int = runs) -> None:
                    model(torch.zeros((runs, 1), dtype=torch.int64, device=sizes.device), past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()

                times = []
                for _ in range(4 + min(sizes.repeats, 10)):
                    begun = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - begun)
                add(runs / statistics.median(times[4:] or times), "tokens/s")


# -- the table --------------------------------------------------------------------------------------------------------------------


def table(lines: list[Line]) -> str:
    """Floors are times or errors that less is better than, or rates that more is better than."""
    text = [f"{'':64}{'measured':>12} {'':9}{'floor':>11}{'of floor':>10}"]
    for line in lines:
        name = f"{line.section}: {line.what}"[:63]
        if line.value is None:
            text.append(f"{name:64}{line.note}")
            continue
        share = ""
        if line.floor and line.value and line.unit != "error":
            share = f"{line.floor / line.value if line.unit == 'us' else line.value / line.floor:9.0%}"
        floor = "" if line.floor is None else f"{line.floor:11.4g}"
        text.append(f"{name:64}{line.value:12.4g} {line.unit:9}{floor:>11}{share:>10} {line.note}".rstrip())
    return "\n".join(text)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_check.json")
    parser.add_argument("--seconds", type=float, default=330.0, help="what has not begun by then is left out")
    parser.add_argument("--small", action="store_true", help="toy sizes on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        print("no GPU here; --small tests the script itself", file=sys.stderr)
        return 2
    torch.manual_seed(SEED)
    sizes = Sizes(torch.device("cpu"), torch.float32, **SMALL) if options.small else Sizes(torch.device("cuda"), torch.bfloat16)  # type: ignore[arg-type]
    report = Report(time.monotonic() + options.seconds)
    begun = time.monotonic()
    gpu = Gpu(sizes)
    machine = {
        "device": torch.cuda.get_device_name() if gpu.cuda else "cpu, interpreter",
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "copy_GB_per_second": gpu.bytes_per_second / 1e9, "product_TFLOP_per_second": gpu.flops / 1e12,
    }  # fmt: skip
    print(machine, flush=True)
    check_all(report, sizes)
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
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "seconds": time.monotonic() - begun, "lines": [asdict(line) for line in report.lines]}, indent=1))
    print(f"\n{machine}\n{table(report.lines)}\n{time.monotonic() - begun:.0f} s")
    return 1 if any(line.note == "WRONG" or (line.section == "correct" and line.value is None) for line in report.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
