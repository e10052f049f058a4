"""The catalogue's models: greedy answers of ours are those that transformers would give, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from agentrt.hub import resolve_model
from agentrt.models.loader import load_model

TIE = 1e-4  #: Two logits closer than this may come out either way.
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "List three uses of a brick.",
    "Translate to German: good morning",
    "7 * 8 =",
    "Explain photosynthesis to a child.",
    "Once upon a time",
    "SELECT name FROM users WHERE",
    "Who wrote Hamlet, and when?",
    "Summarise: The cat sat on the mat. It was raining.",
    "Give me a JSON object with a name and an age.",
    "Why is the sky blue?",
    "The quick brown fox",
    "How do I sort a list in Python?",
    "Say hello in five languages.",
    "What weighs more, a kilogram of feathers or of lead?",
    "Complete: to be or not to be,",
    "naïve café, 東京, 😀",
    "Name a prime number between 90 and 100.",
)


def chats(folder: Path, count: int) -> dict[int, list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return {i: tokenizer.encode(chat.format(prompt)).ids for i, prompt in enumerate(PROMPTS[:count])}


def unfused(folder: Path) -> Any:
    """The same weights in transformers' own model."""
    import transformers

    hf = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, hf["architectures"][0])
    with torch.device("meta"):
        model = model_class(transformers.AutoConfig.for_model(**hf))
    sizes = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    state = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            if ".qkv_proj." in name:
                rows = [heads * hf["head_dim"] for heads in (*sizes.values(), sizes["k_proj"])]
                parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split(rows), strict=True)
                state.update({name.replace("qkv_proj", part): rows for part, rows in parts})
            elif ".gate_up_proj." in name:
                gate, up = tensor.chunk(2)
                state.update(
                    {name.replace("gate_up_proj", "gate_proj"): gate, name.replace("gate_up_proj", "up_proj"): up}
                )
            else:
                state[name] = tensor
    if hf["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are not in the file
    return model.eval()


@torch.no_grad()
def check(name: str, prompts: int, tokens: int, paged: Callable[..., Any]) -> None:
    """Greedy decoding together on the paged store; each token is transformers' choice after the same tokens.

    If every token is the choice after the tokens before it, transformers' greedy answer is the same by induction.
    """
    folder = resolve_model(name).folder
    chosen = chats(folder, prompts)
    ours = paged(load_model(folder).decoder, scattered=True, slots=8192)
    ours.step(chosen)
    answers = {i: [int(rows[-1][-1].argmax())] for i, rows in ours.logits.items()}
    for _ in range(tokens - 1):
        ours.step({i: answer[-1:] for i, answer in answers.items()})
        for i, answer in answers.items():
            answer.append(int(ours.logits[i][-1][-1].argmax()))
    theirs = unfused(folder)
    for i, prompt in chosen.items():
        fed = torch.tensor([prompt + answers[i][:-1]])
        logits = theirs(fed, use_cache=False).logits[0, len(prompt) - 1 :]
        mine = torch.cat(ours.logits[i])[len(prompt) - 1 :]
        torch.testing.assert_close(mine, logits, atol=2e-3, rtol=1e-3)
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(answers[i])[:, None])[:, 0]
        assert len(gap) == tokens
        assert gap.max() <= TIE, f"prompt {i} parts from transformers after {int(gap.argmax())} tokens"


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model(paged: Callable[..., Any]) -> None:
    check("smollm2-135m", prompts=20, tokens=64, paged=paged)


@pytest.mark.slow
@pytest.mark.model
def test_the_qwen_model(paged: Callable[..., Any]) -> None:
    check("qwen2.5-coder-0.5b", prompts=5, tokens=32, paged=paged)
