"""Tiny GGUF files, written by the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from agentrt.hub.tokenizer_files import byte_spelling

WriteGguf = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path | None:
    """Every test has a model cache of its own, but for those of the real models."""
    if request.node.get_closest_marker("model"):
        return None
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AGENTRT_HOME", str(home))
    return home


@pytest.fixture
def byte_level_vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary: all bytes, a few merges, control and user-defined tokens, one id without a token."""
    merges = ["Ġ h", "e l", "l o", "Ġh el", "1 2", "Ġ Ġ"]
    tokens = [*byte_spelling(), *(merge.replace(" ", "") for merge in merges), "<|im_start|>", "<|im_end|>", "<think>", "[PAD]"]
    types = [1] * (len(tokens) - 4) + [3, 3, 4, 5]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }


@pytest.fixture
def write_gguf(tmp_path: Path, byte_level_vocabulary: dict[str, Any]) -> WriteGguf:
    """Writes a GGUF: metadata without the architecture's prefix, tensors by name."""

    def write(
        architecture: str,
        metadata: dict[str, Any],
        tensors: dict[str, Any],
        *,
        vocabulary: dict[str, Any] | None = None,
        types: dict[str, str] | None = None,
        more: dict[str, Any] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        _add_vocabulary(writer, byte_level_vocabulary if vocabulary is None else vocabulary)
        for key, value in ({f"{architecture}.{k}": v for k, v in metadata.items()} | (more or {})).items():
            _add(writer, key, value)
        for tensor_name, tensor in tensors.items():
            kind = (types or {}).get(tensor_name, "F32")
            if kind == "F32":
                writer.add_tensor(tensor_name, np.ascontiguousarray(tensor, dtype=np.float32))
            else:
                raw = gguf.GGMLQuantizationType[kind]
                content = tensor if tensor.dtype == np.uint8 else gguf.quantize(tensor, raw)
                writer.add_tensor(tensor_name, content, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: dict[str, Any]) -> None:
    for key, value in vocabulary.items():
        _add(writer, "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}", value)
