"""Tiny random models of transformers, and a small paged engine without an engine to run ours beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrt.attention.base import Attention, AttentionBatch
from agentrt.attention.torch_cpu import TorchAttention
from agentrt.engine.kv_store import KVStore
from agentrt.hub.gguf import BLOCKS_FILE

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 48, 6, 2, 10, 101

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that keep the signal alive, and norms and biases that are not their initial ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name and "embed_out" not in name:
            parameter.data = noise
        elif parameter.dim() >= 2:
            parameter.data = noise * 1.5 / parameter.shape[-1] ** 0.5
        elif "norm" in name.lower() and name.endswith("weight"):
            parameter.data = parameter.data + noise * 0.3
        else:
            parameter.data = noise * 0.3


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Makes a tiny random model: tiny("Llama", **config changes) is transformers' LlamaForCausalLM."""
    import transformers

    transformers.utils.logging.set_verbosity_error()

    def make(family: str, seed: int = 0, **changes: Any) -> Any:
        config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, config_name)(**{**BASE, **changes})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        randomise(model, seed)
        return model

    return make


class Paged:
    """Sequences over one store, each step a mixture of runs, slots dealt at random or as neighbours."""

    def __init__(self, model: Any, *, scattered: bool, slots: int = 512, attention: Attention | None = None, kv_dtype: torch.dtype | None = None) -> None:
        self.model, self.random = model, random.Random(0)
        self.store = KVStore(model.config, slots, kv_dtype or model.dtype)
        for layer in range(len(self.store)):
            for tensor in self.store[layer]:
                tensor.fill_(-1 if kv_dtype == torch.int8 else 1e4)  # whoever reads a slot that is not its own is found out
        self.free = list(range(slots))
        if scattered:
            self.random.shuffle(self.free)
        self.attention = attention or TorchAttention()
        self.slots: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def step(self, runs: dict[int, list[int]]) -> None:
        """Feeds each sequence its next tokens."""
        for sequence, tokens in runs.items():
            self.slots.setdefault(sequence, []).extend(self.free.pop(0) for _ in tokens)
        lengths = {sequence: len(tokens) for sequence, tokens in runs.items()}
        contexts = {sequence: len(self.slots[sequence]) - count for sequence, count in lengths.items()}
        slots = tuple(torch.tensor(self.slots[sequence]) for sequence in runs)
        batch = AttentionBatch(
            query_lengths=tuple(lengths.values()),
            context_lengths=tuple(contexts.values()),
            slots=slots,
            new_slots=torch.cat([slot[-count:] for slot, count in zip(slots, lengths.values(), strict=True)]),
        )
        positions = torch.cat([torch.arange(lengths[s]) + contexts[s] for s in runs])
        token_ids = torch.tensor([token for tokens in runs.values() for token in tokens])
        hidden = self.model.forward(token_ids, positions, batch, self.attention, self.store)
        for sequence, rows in zip(runs, self.model.logits(hidden).split(list(lengths.values())), strict=True):
            self.logits.setdefault(sequence, []).append(rows)

    def run(self, prompts: dict[int, list[int]], sizes: Callable[[int], int]) -> dict[int, torch.Tensor]:
        """Feeds whole prompts in runs of `sizes(sequence)` tokens; returns logits at every position."""
        left = {sequence: list(tokens) for sequence, tokens in prompts.items()}
        while left:
            runs = {}
            for sequence in list(left):
                size = sizes(sequence)
                runs[sequence], left[sequence] = left[sequence][:size], left[sequence][size:]
                if not left[sequence]:
                    del left[sequence]
            self.step(runs)
        return {sequence: torch.cat(rows) for sequence, rows in self.logits.items()}


#: New tokens of each run on top of the shared prefix of 70, and which of them are wanted: drafts, a decode, what a grammar forced, a prompt's middle.
BRANCHES = ((3, (0, 2)), (1, (0,)), (5, (4,)), (20, ()))


def steps_with_wanted(vocab: int = VOCAB) -> list[tuple[torch.Tensor, torch.Tensor, AttentionBatch, torch.Tensor]]:
    """A prompt of which nothing is wanted; then branches of it, a chunk of another prompt, and one to score: for `Decoder.forward`, and the wanted rows."""
    generator = torch.Generator().manual_seed(7)
    free = torch.randperm(256, generator=generator)
    prefix, free = free[:70], free[70:]

    def step(runs: list[tuple[torch.Tensor, int]], wanted: list[int], shared: Any) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch, torch.Tensor]:
        news, contexts = tuple(new for _, new in runs), tuple(len(slots) - new for slots, new in runs)
        fresh = torch.cat([slots[len(slots) - new :] for slots, new in runs])
        positions = torch.cat([torch.arange(context, context + new) for context, new in zip(contexts, news, strict=True)])
        token_ids = torch.randint(vocab, (len(fresh),), generator=generator)
        return token_ids, positions, AttentionBatch(news, contexts, tuple(slots for slots, _ in runs), fresh, shared), torch.tensor(wanted, dtype=torch.int64)

    runs, sampled = [], []
    for new, rows in BRANCHES:
        sampled += [sum(length for _, length in runs) + row for row in rows]
        runs.append((torch.cat((prefix, free[:new])), new))
        free = free[new:]
    first = sum(length for _, length in runs)
    runs += [(free[:40], 40), (free[40:52], 12)]
    scored = list(range(first + 40, first + 51))
    return [step([(prefix, 70)], [], ()), step(runs, [*scored, *sampled, first + 51], ((tuple(range(len(BRANCHES))), 70),))]


@torch.inference_mode()
def expect_wanted_alike(
    model: Any, attention: Attention, compare: Callable[[torch.Tensor, torch.Tensor], None], kv_dtype: torch.dtype | None = None
) -> None:
    """Wanted rows, and keys and values of all, are what they are when all rows are asked for."""
    stores = [KVStore(model.config, 256, kv_dtype or model.dtype) for _ in range(2)]
    for token_ids, positions, batch, wanted in steps_with_wanted(model.config.vocab_size):
        every = model.forward(token_ids, positions, batch, attention, stores[0])
        batch.prepared.clear()
        some = model.forward(token_ids, positions, batch, attention, stores[1], wanted)
        assert some.shape == (len(wanted), every.shape[1])
        assert every.isfinite().all()
        compare(some, every[wanted])
        for layer in range(model.config.layers):
            for mine, theirs in zip(stores[1][layer], stores[0][layer], strict=True):
                compare(mine[batch.new_slots], theirs[batch.new_slots])
    backwards = torch.arange(len(token_ids)).flip(0)  # all of them, in another order
    compare(model.forward(token_ids, positions, batch, attention, stores[1], backwards), every[backwards])


@pytest.fixture(scope="session")
def wanted_alike() -> Callable[..., None]:
    """`expect_wanted_alike(model, attention, compare, kv_dtype)`."""
    return expect_wanted_alike


def prompts_of(lengths: Iterable[int], vocab: int = VOCAB, seed: int = 3) -> dict[int, list[int]]:
    """Random prompts by sequence number."""
    generator = random.Random(seed)
    return {index: [generator.randrange(vocab) for _ in range(length)] for index, length in enumerate(lengths)}


@torch.no_grad()
def expect_equal(ours: Any, theirs: Any, lengths: Iterable[int] = (23, 35, 9)) -> None:
    """Every position's logits are transformers', however the prompts are cut and wherever their pages lie."""
    prompts = prompts_of(lengths, theirs.config.vocab_size)
    expected = {i: theirs(torch.tensor([tokens]), use_cache=False).logits[0] for i, tokens in prompts.items()}
    assert all(rows.std() > 0.3 for rows in expected.values()), "the tiny model's logits are degenerate"
    cuts = random.Random(5)
    ways: tuple[tuple[str, bool, Callable[[int], int]], ...] = (
        ("whole", False, lambda _: 1000),
        ("whole", True, lambda _: 1000),
        ("chunks", False, lambda _: 7),
        ("mixed", True, lambda sequence: (1, 5, 13)[sequence % 3]),
        ("ragged", True, lambda _: cuts.randrange(1, 12)),
        ("token by token", True, lambda _: 1),
    )
    for name, scattered, sizes in ways:
        got = Paged(ours, scattered=scattered).run(prompts, sizes)
        for sequence, rows in expected.items():
            where = f"{name}, scattered={scattered}"
            torch.testing.assert_close(
                got[sequence], rows, atol=1e-4, rtol=1e-4, msg=lambda message, where=where: f"{where}: {message}"
            )


@pytest.fixture(scope="session")
def equal() -> Callable[..., None]:
    """`expect_equal(ours, theirs, lengths)`."""
    return expect_equal


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The small paged engine."""
    return Paged


#: GPTQ and AWQ pack eight outputs or inputs, and a group has 32 inputs.
QUANTISED_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def pack(values: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """[rows, values] to int32 [rows, words]; the i-th of a word's values goes to places[i], counted from the lowest bits."""
    words = torch.zeros(values.shape[0], values.shape[1] // len(places), dtype=torch.int64)
    for i, place in enumerate(places):
        words |= values[:, i :: len(places)].long() << (place * bits)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(weight: torch.Tensor, bits: int, *, group: int, plus: int, shuffled: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantises a matrix [out, in]; returns what is stored, and the values that it means."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs)
    groups = inputs // group
    q = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zero = torch.full((groups, outputs), 128) if bits == 8 else torch.randint(1, 16, (groups, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.01).half()
    g_idx = torch.arange(inputs) // group
    if shuffled:
        g_idx = g_idx[torch.randperm(inputs, generator=generator)]
    places = tuple(range(32 // bits))
    stored = {
        "qweight": pack(q.T, bits, places).T.contiguous(),
        "qzeros": pack(zero - plus, bits, places),
        "scales": scale,
        "g_idx": g_idx.to(torch.int32),
    }
    return stored, ((q - zero[g_idx]) * scale.float()[g_idx]).T.contiguous()


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stored, meant = gptq(weight, 4, group=32, plus=0, shuffled=False)
    # The same values, packed along the output, in AWQ's order: outputs 0 2 4 6 1 3 5 7 from the lowest bits upwards.
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    nibbles = torch.arange(8, dtype=torch.int32) * 4
    q = ((stored["qweight"].unsqueeze(1) >> nibbles[:, None]) & 15).flatten(0, 1)
    zero = ((stored["qzeros"].unsqueeze(-1) >> nibbles) & 15).flatten(1)
    return {"qweight": pack(q, 4, places), "qzeros": pack(zero, 4, places), "scales": stored["scales"]}, meant


def fp8(weight: torch.Tensor, block: tuple[int, int] | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = block or (1, weight.shape[1])
    generator = torch.Generator().manual_seed(weight.shape[0])
    scale = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), generator=generator) * 0.01 + 0.01
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    held = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": held, "weight_scale_inv" if block else "weight_scale": scale, "input_scale": torch.ones(1)}, held.float() * spread


def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    held = (weight / scale).round().to(torch.int8)
    return {"weight": held, "weight_scale": scale}, held.float() * scale


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "gptq": (lambda w: gptq(w, 4, group=32, plus=1, shuffled=False), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq in act order": (lambda w: gptq(w, 4, group=32, plus=1, shuffled=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "gptq of 8 bits": (lambda w: gptq(w, 8, group=32, plus=1, shuffled=False), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "gptq version 2": (lambda w: gptq(w, 4, group=32, plus=0, shuffled=False), {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8": (lambda w: fp8(w, (64, 64)), {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "compressed-tensors": (lambda w: fp8(w, None), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "compressed-tensors of int8": (int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


def write_quantised(folder: Path, model: Any, kind: str) -> None:
    """Saves the model quantised in `folder`/stored, and what that means in `folder`/meant."""
    pack_one, config = KINDS[kind]
    for name in ("stored", "meant"):
        model.save_pretrained(folder / name)
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "meant" / "model.safetensors").items():
        meant[name] = stored[name] = tensor
        if name.endswith("_proj.weight"):
            parts, meant[name] = pack_one(tensor)
            del stored[name]
            stored |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(meant, folder / "meant" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "stored" / "model.safetensors", metadata={"format": "pt"})
    file = folder / "stored" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


@pytest.fixture
def quantised(tiny: Callable[..., Any]) -> Callable[[Path, str], None]:
    """Writes a tiny model quantised in one of `KINDS`, and what that means; see `write_quantised`."""
    return lambda folder, kind: write_quantised(folder, tiny("Qwen2", **QUANTISED_SHAPE), kind)


@pytest.fixture
def in_blocks(tiny: Callable[..., Any]) -> Callable[[Path, Callable[[str], str]], None]:
    """Writes a tiny model as a converted GGUF whose matrices have the kinds that are told by name; the safetensors are what their blocks mean."""

    def write(folder: Path, kind_of: Callable[[str], str]) -> None:
        tiny("Qwen2", hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=16).save_pretrained(folder)
        tensors, blocks, kinds = load_file(folder / "model.safetensors"), {}, {}
        places = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stem, own, _ = name.rsplit(".", 2)
            fused, part = places.get(own, (own, 0))
            place = f"{stem}.{fused}.weight.{part}"
            kinds[place] = kind_of(own)
            kind = gguf.GGMLQuantizationType[kinds[place]]
            raw = q6_k(*tensors[name].shape) if kinds[place] == "Q6_K" else gguf.quants.quantize(tensors[name].numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.dequantize(raw, kind))
            blocks[place] = torch.from_numpy(np.ascontiguousarray(raw))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        save_file(blocks, folder / BLOCKS_FILE, metadata=kinds)

    return write


def q6_k(rows: int, columns: int) -> Any:
    """Random blocks, since the gguf package only reads this kind."""
    raw = np.random.default_rng(rows).integers(0, 256, (rows, columns // 256, 210), np.uint8)
    raw[..., 208:] = np.array([5e-5], np.float16).view(np.uint8)  # the scale of them all
    return raw.reshape(rows, -1)
