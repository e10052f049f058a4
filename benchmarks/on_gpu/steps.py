"""Batches of a step, and the ways to run one: as a captured graph, launched kernel by kernel, on torch's attention."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import torch
from agentrt.kernels.sample import sample
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrt.attention.base import Attention, AttentionBatch, AttentionSpec
from agentrt.attention.sharing import shared_prefixes
from agentrt.attention.triton_paged import TritonAttention
from agentrt.engine.batch import ForwardBatch
from agentrt.engine.kv_store import KVStore
from agentrt.engine.step_graphs import StepGraphs
from agentrt.models.config import ModelConfig
from agentrt.models.decoder import Decoder, weight_shapes

from .clock import Gpu
from .sizes import PAGE, SEED, Sizes


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


def slots_of(batch: ForwardBatch) -> int:
    return max(int(slots.max()) for slots in batch.attention.slots) // PAGE * PAGE + PAGE


def new_store(config: ModelConfig, slots: int, sizes: Sizes) -> KVStore:
    store = KVStore(config, slots, sizes.dtype, sizes.device)
    for layer in range(len(store)):
        for tensor in store[layer]:
            tensor.normal_()
    return store


def ways_of(rows: int, device: torch.device, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    numbers = np.random.default_rng(SEED).random(rows).tolist()
    return torch.tensor([[temperature] * rows, [top_k] * rows, [top_p] * rows, [0.0] * rows, numbers], dtype=torch.float64, device=device)


def new_attention(sizes: Sizes) -> TritonAttention:
    return TritonAttention(sizes.heads, sizes.kv_heads, sizes.head_dim, PAGE, sizes.device)


def weight_bytes(model: Decoder, sizes: Sizes) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(model.config).values()) * sizes.dtype.itemsize


def kv_bytes(tokens: int, sizes: Sizes) -> int:
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize * tokens


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
