"""A float copy, in Hugging Face's layout and names, of a model whose weights were quantised, for peers that cannot read its GGUF.

It is made from our own converted folder, whose fused tensors are taken apart again, and kept beside the peers' environments.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from environments import ENVIRONMENTS

from agentrt.hub import ModelFiles

NOT_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def float_copy(model: ModelFiles) -> Path:
    """The folder of the copy, made if there is none."""
    folder = ENVIRONMENTS / "float" / model.name
    if not (folder / "config.json").exists():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        for name in NOT_WEIGHTS:
            if (model.folder / name).exists():
                shutil.copy(model.folder / name, folder / name)
        _write_weights(model, folder / "model.safetensors")
        config = {key: value for key, value in model.config.items() if not key.startswith("agentrt_")}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _write_weights(model: ModelFiles, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    apart: dict[str, Any] = {}
    for file in model.weights:
        for name, tensor in load_file(file).items():
            apart |= {name: tensor.contiguous() for name, tensor in taken_apart(name, tensor, model.config)}
    save_file(apart, path, metadata={"format": "pt"})


def taken_apart(name: str, tensor: Any, config: dict[str, Any]) -> list[tuple[str, Any]]:
    """The tensors that a fused one is made of, by name; any other tensor as it is."""
    if "qkv_proj" in name:
        heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        parts = tensor.split([heads * dim, kv * dim, kv * dim])
        return [(name.replace("qkv_proj", f"{letter}_proj"), part) for letter, part in zip("qkv", parts, strict=True)]
    if "gate_up_proj" in name:
        return [(name.replace("gate_up_proj", f"{half}_proj"), part) for half, part in zip(("gate", "up"), tensor.chunk(2), strict=True)]
    return [(name, tensor)]
