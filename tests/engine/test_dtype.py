"""The dtype setting: what runs is what was asked for, says so, and answers the same alone and in company."""

from __future__ import annotations

import pytest
import torch

from agentrt import Engine, SamplingParams
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
