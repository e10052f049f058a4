from __future__ import annotations

from pathlib import Path

import pytest

from agentrt.errors import ModelError
from agentrt.hub import CATALOG, DEFAULT_MODEL, resolve, resolve_model


def test_names_stand_for_what_they_say(tmp_path: Path) -> None:
    assert resolve(None).entry == CATALOG[DEFAULT_MODEL]
    assert resolve("SmolLM2").name == "smollm2-135m"
    assert resolve("qwen2.5-coder-0.5b").kind == "catalog"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert (resolve(str(tmp_path)).kind, resolve(str(tmp_path)).path) == ("folder", tmp_path)
    assert resolve(str(tmp_path / "m.gguf")).kind == "gguf"
    hub = resolve("hf:org/name@v1.0")
    assert (hub.kind, hub.hub_id, hub.revision) == ("hub", "org/name", "v1.0")


def test_every_entry_adds_up() -> None:
    for entry in CATALOG.values():
        assert all(len(part.sha256) == 64 and "==" in part.requirement for part in entry.parts)
        assert sum(part.size for part in entry.parts) < entry.size * 1.05  # wheels hold little but the model


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135m", r"did you mean smollm2-135m.*Known names: smollm2-135m, qwen2\.5-coder-0\.5b"),
        ("org/name", "write hf:org/name"),
        ("hf:name", "not a hub id"),
        ("/nowhere/model.gguf", "no file or folder"),
        ("", "no model is named ''"),
    ],
)
def test_what_is_no_model_says_what_could_be_written(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(name)


def test_a_folder_without_its_parts_says_which(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks one\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "one.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "T"}]}')
    files = resolve_model(str(tmp_path))
    assert (files.weights, files.chat_template, files.gguf) == ((tmp_path / "one.safetensors",), "T", None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        resolve_model(str(tmp_path))
