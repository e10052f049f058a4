"""Tokenizers made on the spot, and those of the two real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrt.hub import list_cached, resolve_model
from agentrt.hub.tokenizer_files import byte_spelling, write_tokenizer_files
from agentrt.text import Tokenizer, load_tokenizer

MakeTokenizer = Callable[..., Tokenizer]

#: As many real templates do: markers, a default for the system message, trimmed contents.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_PIECES = ["\u2581", "a", "b", "c", "\u2581a", "ab", "\u2581ab", "<", "|", "_", ">", "i", "m"]


@pytest.fixture
def byte_level(tmp_path: Path) -> MakeTokenizer:
    """Makes a byte-level tokenizer whose tokens are bytes and a few merges."""

    def make(template: str | None = CHATML, **vocabulary: Any) -> Tokenizer:
        merges = ["i m", "Ġ Ġ", "e n", "en d"]
        tokens = [*byte_spelling(), *(merge.replace(" ", "") for merge in merges), "<|im_start|>", "<|im_end|>", "</s>", "<think>", "[PAD]"]
        types = [1] * (len(tokens) - 5) + [3, 3, 3, 4, 5]
        words = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges}
        words |= {"bos_token_id": tokens.index("<|im_start|>"), "eos_token_id": tokens.index("<|im_end|>")}
        return _write(tmp_path, words | vocabulary, template)

    return make


@pytest.fixture
def sentencepiece(tmp_path: Path) -> MakeTokenizer:
    """Makes a SentencePiece-style tokenizer with byte fallback."""

    def make(template: str | None = CHATML, **vocabulary: Any) -> Tokenizer:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, "<|im_start|>", "<|im_end|>"]
        words = {
            "model": "llama",
            "tokens": tokens,
            "scores": [float(-i) for i in range(len(tokens))],
            "token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES) + [3, 3],
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return _write(tmp_path, words | vocabulary, template)

    return make


def _write(folder: Path, words: dict[str, Any], template: str | None) -> Tokenizer:
    metadata = {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    write_tokenizer_files(metadata, folder)
    width = len(words["tokens"]) + 3  # logits wider than the vocabulary
    (folder / "config.json").write_text(json.dumps({"vocab_size": width}))
    return Tokenizer(resolve_model(str(folder)))


@pytest.fixture(scope="session")
def small_model() -> Tokenizer:
    """The default model's tokenizer."""
    return load_tokenizer()


@pytest.fixture(scope="session")
def tool_model() -> Tokenizer:
    """The tokenizer of the model that calls tools, if it was fetched."""
    name = "qwen2.5-coder-0.5b"
    if not any(model.name == name and model.kind == "fetched" for model in list_cached()):
        pytest.skip(f"{name} is not in the model cache; fetch it with `agentrt models fetch {name}`")
    return load_tokenizer(name)
