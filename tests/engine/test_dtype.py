"""The dtype setting: what runs is what was asked for, says so, and answers the same alone and in company."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agentrt import Engine, SamplingParams
from agentrt.attention.native_cpu import NativeAttention, cpu_attention
from agentrt.config import EngineConfig
from agentrt.engine import assembly
from agentrt.engine.assembly import build_engine
from agentrt.errors import UserError
from agentrt.text import load_tokenizer


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_few_bits_answer_the_same_alone_and_in_company(tiny_model, dtype):
    prompts = [list(range(3 + n, 20 + 2 * n)) for n in range(5)]
    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    with Engine(str(tiny_model), dtype=dtype, threads=1, kv_tokens=1024, process=False, prefix_cache=False) as engine:
        assert engine.facts.dtype == dtype
        together = engine.generate(prompts, sampling)
        alone = [engine.generate(prompt, sampling) for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        scores = [[token.logprob for token in completion.logprobs] for completion in (one, other)]
        torch.testing.assert_close(*(torch.tensor(values[:1]) for values in scores), atol=0.02, rtol=0)


def test_auto_leaves_a_float_model_in_float(tiny_model):
    core, facts = build_engine(EngineConfig(model=str(tiny_model), threads=1), tiny_model, load_tokenizer(str(tiny_model)))
    core.close()
    assert facts.dtype in ("float32", "bfloat16", "float16")


def test_few_bits_need_triton_on_a_gpu(tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assembly, "find_spec", lambda name: None)
    config = EngineConfig(model=str(tiny_model), dtype="int4", device="cuda", threads=1)
    with pytest.raises(UserError, match=r"pip install 'agentrt\[triton\]'"):
        build_engine(config, tiny_model, load_tokenizer(str(tiny_model)))


@pytest.mark.skipif(not isinstance(cpu_attention(), NativeAttention), reason="no native kernels here: no compiler, or AGENTRT_NATIVE=0")
@pytest.mark.parametrize(
    ("attention", "head_dim", "bits", "device", "expected"),
    [
        ("auto", 64, 4, "cpu", torch.int8),
        ("auto", 256, 8, "cpu", torch.int8),
        ("auto", 80, 4, "cpu", torch.float16),  # no whole vectors
        ("auto", 288, 4, "cpu", torch.float16),  # sums of so many would leave queries few bits
        ("torch", 64, 4, "cpu", torch.float16),
        ("auto", 64, None, "cpu", torch.float32),
        ("auto", 64, 4, "cuda", torch.float32),
    ],
)
def test_keys_and_values_are_whole_numbers_where_a_kernel_takes_them(attention, head_dim, bits, device, expected):
    model = SimpleNamespace(config=SimpleNamespace(head_dim=head_dim))
    assert assembly._kv_dtype(attention, model, torch.float32, bits, torch.device(device)) == expected


def test_steps_run_on_the_gpu_that_was_asked_for(tiny_model, monkeypatch):
    """Triton launches on the thread's current device, wherever the tensors are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made_current = []

    def make_current(device):
        made_current.append(device)
        raise KeyboardInterrupt  # there is none here

    monkeypatch.setattr(torch.cuda, "set_device", make_current)
    with pytest.raises(KeyboardInterrupt):
        build_engine(EngineConfig(model=str(tiny_model), device="cuda:1"), tiny_model, load_tokenizer(str(tiny_model)))
    assert made_current == [torch.device("cuda:1")]
    with pytest.raises(UserError, match="torch sees 2 GPUs"):
        build_engine(EngineConfig(model=str(tiny_model), device="cuda:2"), tiny_model, load_tokenizer(str(tiny_model)))
