"""One call from a model's name to the files that the rest of the engine reads.

Invariant: the folder that `resolve_model` gives is complete and in Hugging Face's layout, whatever the name stood for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrt.errors import ModelError
from agentrt.hub.catalog import resolve
from agentrt.hub.fetch import ProgressCallback, fetch
from agentrt.hub.model_cache import conversion_key, converted_path, is_complete


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: Short name, or what the user wrote.
        folder: Folder in Hugging Face's layout.
        config: ``config.json``; with ``"agentrt_fused": true`` the weights are fused as `agentrt.hub.gguf` says.
        generation_config: ``generation_config.json``, or empty.
        weights: The safetensors files, in order.
        tokenizer_json: The tokenizer, in the `tokenizers` library's format.
        tokenizer_config: ``tokenizer_config.json``, or empty.
        chat_template: The chat template, or None.
        gguf: The GGUF file that the folder was made from, or None.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: tuple[Path, ...]
    tokenizer_json: Path
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    gguf: Path | None


def resolve_model(name: str | None = None, progress: ProgressCallback | None = None) -> ModelFiles:
    """Finds a model; fetches and converts it first where that is needed. Fast once both have been done.

    Args:
        name: As for `agentrt.hub.resolve`; None is the default model.
        progress: Called now and then while fetching.

    Raises:
        ModelError: It cannot be found, fetched, read or is not supported; says what to do.
    """
    source = resolve(name)
    place = fetch(name, progress)
    if place.suffix.lower() != ".gguf":
        return _read_folder(source.name, place, None)
    return _read_folder(source.name, _converted(place), place)


def _converted(gguf: Path) -> Path:
    folder = converted_path(conversion_key(gguf))
    if is_complete(folder):
        return folder
    from agentrt.hub.gguf import convert  # with numpy and more, which a model that was converted needs no longer

    return convert(gguf)


def _read_folder(name: str, folder: Path, gguf: Path | None) -> ModelFiles:
    tokenizer_json = folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise ModelError(
            f"the folder {folder} holds no tokenizer.json; make one with the model's own tokenizer "
            f"(AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers)",
            param="model",
        )
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return ModelFiles(
        name=name,
        folder=folder,
        config=_read_json(folder / "config.json"),
        generation_config=_read_json(folder / "generation_config.json"),
        weights=_weights(folder),
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        gguf=gguf,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object", param="model")
    return value


def _weights(folder: Path) -> tuple[Path, ...]:
    index = _read_json(folder / "model.safetensors.index.json")
    if index:
        files = tuple(folder / name for name in sorted(set(index.get("weight_map", {}).values())))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"the folder {folder} lacks {missing[0]}, which its index names", param="model")
        return files
    return tuple(sorted(folder.glob("*.safetensors")))


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name: the default one
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
