"""How long whole steps take, beside what the device cannot beat: decodes, mixed steps, branches of one prompt, prefill, transformers."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from agentrt.attention.base import Attention, AttentionBatch
from agentrt.engine.batch import ForwardBatch
from agentrt.models.decoder import Decoder, weight_shapes

from .clock import Gpu
from .model import LAYOUTS, make_model
from .report import Report
from .sizes import PAGE, Sizes
from .steps import (
    Sdpa,
    Steps,
    decode_batch,
    kv_bytes,
    mixed_batch,
    new_attention,
    new_store,
    slots_of,
    weight_bytes,
)


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
