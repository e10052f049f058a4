"""The whole engine of a tiny model on Triton's kernels, in their interpreter: the same answers as on torch's operators."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from agentrt.kernels.quantized_linear import QuantizedWeight
from safetensors.torch import load_file, save_file

import agentrt
from agentrt import Engine, SamplingParams
from agentrt.attention.base import AttentionBatch, FusedAttention, HostPlanned
from agentrt.attention.torch_cpu import TorchAttention
from agentrt.attention.triton_paged import TritonAttention
from agentrt.config import EngineConfig
from agentrt.engine.batch import ForwardBatch
from agentrt.engine.kv_store import KVStore
from agentrt.engine.step_graphs import StepGraphs
from agentrt.engine.step_parts import step_parts
from agentrt.models.loader import load_model

PREFIX = [(7 * place) % 300 for place in range(133)]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def answers(folder: Path, **options: object) -> list[list[int]]:
    with Engine(str(folder), **{"process": False, "check": True, "dtype": "float32", "kv_tokens": 2048, "threads": 1, **options}) as engine:
        completions = engine.generate([[*PREFIX, 5, branch] for branch in range(2)], GREEDY)  # one prefix under two branches
        completions.append(engine.generate([1, 2, 3], SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=2)))
        completions.append(engine.generate("yes or no? ", SamplingParams(temperature=0, max_tokens=8, grammar=agentrt.GrammarSpec("choices", '["yes", "no"]'))))
        return [list(completion.token_ids) for completion in completions]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_same_answers_as_on_torch(tiny_model):
    assert answers(tiny_model, attention="triton", page_size=16) == answers(tiny_model, attention="torch")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_few_bits_answer_as_what_they_mean(tiny_model, tmp_path, dtype):
    """Quantised at load and multiplied by the kernels, beside the same numbers in float32 on torch's operators."""
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or "lm_head" in name:
            weights[name] = QuantizedWeight.of(weight, 8 if dtype == "int8" or "lm_head" in name else 4).dequantize().contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    assert answers(tiny_model, attention="triton", page_size=16, dtype=dtype) == answers(tmp_path, attention="torch")


def step(store_slots: list[list[int]], tokens: list[int]) -> ForwardBatch:
    """A decode of each sequence, whose slots are given; the last one is the new token's."""
    lengths = [len(slots) - 1 for slots in store_slots]
    attention = AttentionBatch(
        (1,) * len(tokens), tuple(lengths), tuple(torch.tensor(slots) for slots in store_slots), torch.tensor([slots[-1] for slots in store_slots])
    )
    return ForwardBatch(torch.tensor(tokens), torch.tensor(lengths), attention, torch.arange(len(tokens)), 0)


def mixed(runs: list[tuple[list[int], int]], rows: list[int], scored: int) -> ForwardBatch:
    """Runs given as the sequence's slots and how many of its tokens are new; which tokens' logits are wanted, and how many to score."""
    news, contexts = tuple(new for _, new in runs), tuple(len(slots) - new for slots, new in runs)
    fresh = torch.tensor([slot for slots, new in runs for slot in slots[len(slots) - new :]])
    attention = AttentionBatch(news, contexts, tuple(torch.tensor(slots) for slots, _ in runs), fresh)
    positions = torch.cat([torch.arange(context, context + new) for context, new in zip(contexts, news, strict=True)])
    return ForwardBatch(torch.arange(7, 7 + len(fresh)), positions, attention, torch.tensor(rows, dtype=torch.int64), scored)


@pytest.mark.slow
@torch.inference_mode()
def test_replayed_steps_are_the_steps(tiny_model):
    """Captured for one step and run for others, in padded memory; what a CUDA graph would replay is called again here."""
    model = load_model(tiny_model, torch.float32)
    config, captured = model.config, []

    def capture(run):
        captured.append(run)
        return run

    def new_store() -> KVStore:
        store = KVStore(config, 64, torch.float32)
        for keys, values in (store[layer] for layer in range(len(store))):
            keys.normal_(generator=torch.Generator().manual_seed(1))
            values.normal_(generator=torch.Generator().manual_seed(2))
        return store

    attention = TritonAttention(config.heads, config.kv_heads, config.head_dim, 1, torch.device("cpu"))
    assert isinstance(attention, FusedAttention)
    assert isinstance(attention, HostPlanned)
    ours, theirs = new_store(), new_store()
    graphs = StepGraphs(
        model.decoder.forward, ours, attention, config.windows, most_new=8, most_tokens=100, device=torch.device("cpu"), capture=capture
    )
    steps = [step([[3, 4, 9], [5], [60, 61]], [1, 2, 3]), step([[3, 4, 9, 10], [5, 11], [60, 61, 62], [1]], [4, 5, 6, 7]), step([[20, 30]], [9])]
    steps.append(mixed([([3, 4, 9, 10, 12], 1), ([5, 11, 13, 14], 2)], [0, 2], 0))  # a decode and a forced run
    steps.append(mixed([([40, 41, 42, 43, 44], 5), ([5, 11, 13, 14, 15], 1)], [1, 2, 4, 5], 2))  # a prompt, scored in part, and a decode
    for batch in steps:
        assert graphs.cover(batch)
        expected = model.decoder.forward(batch.token_ids, batch.positions, batch.attention, TorchAttention(), theirs)
        torch.testing.assert_close(graphs.forward(batch), expected[batch.logits_rows], atol=2e-4, rtol=1e-4)
        for layer in range(len(ours)):
            for mine, other in zip(ours[layer], theirs[layer], strict=True):
                torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert len(captured) == 3  # 4 tokens, 1 and 8
    assert not graphs.cover(step([list(range(60)), list(range(60))], [1, 2]))  # more tokens than there is room for
    assert not graphs.cover(step([[1]] * 9, [1] * 9))
    assert not graphs.cover(mixed([([40, 41, 42], 3)], [], 0))  # nobody would wait for it


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(agentrt.UserError, match="need a GPU"):
        step_parts("triton", None, None, 1, torch.device("cpu"), 1)  # type: ignore[arg-type]
    with pytest.raises(agentrt.UserError, match="attention is 'cuda'"):
        EngineConfig(attention="cuda")


def test_a_batch_that_was_sent_is_the_batch():
    batch = step([[3, 4, 9], [5], [60, 61]], [1, 2, 3])
    for slots in (True, False):
        sent = batch.on(torch.device("cpu"), slots=slots)
        for name in ("token_ids", "positions", "logits_rows"):
            assert torch.equal(getattr(sent, name), getattr(batch, name))
        assert torch.equal(sent.attention.new_slots, batch.attention.new_slots)
        assert [own.tolist() for own in sent.attention.slots] == [own.tolist() for own in batch.attention.slots]
        assert sent.attention.prepared is not batch.attention.prepared
