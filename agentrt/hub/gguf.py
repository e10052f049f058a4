"""Converts a GGUF file, once, to a folder in Hugging Face's layout that can be mapped into memory.

The weights become float32 under Hugging Face's names, except that the rows of q, k and v are joined to
``self_attn.qkv_proj`` and those of gate and up to ``mlp.gate_up_proj``, as the decoder multiplies them
(``"agentrt_fused": true`` in ``config.json``). What llama.cpp did to the weights is undone: the order of q's and k's
rows for the architecture llama, and the 1 added to Gemma's norms. Tensors go through a few rows at a time, so memory
stays small whatever the model's size. Quantised matrices are kept beside that as they are, block for block, in
`BLOCKS_FILE`, so that they can be multiplied in their own bits. Invariant: the folder appears by one rename, when everything in it is complete.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import ModelError
from agentrt.hub.gguf_config import generation_config, model_config
from agentrt.hub.gguf_file import UNQUANTISED, GgufFile
from agentrt.hub.model_cache import BLOCKS_FILE, conversion_key, converted_path, is_complete, locked
from agentrt.hub.tokenizer_files import write_tokenizer_files

_Value = TypeVar("_Value", bound=np.generic)

_ALIGNMENT = 64  # of the tensors in the result, so that a mapped tensor suits any kernel

#: GGUF leaf -> Hugging Face leaf, of a layer. Gemma's differ, since it has norms after its blocks too.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the result: the rows of its sources, one after the other."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor to be written: what a safetensors header says of it, and its content, piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Iterator[NDArray[Any]]


def convert(path: Path) -> Path:
    """Converts a GGUF file, unless the model cache has the result already.

    Returns:
        The folder, in the model cache.

    Raises:
        ModelError: The file is broken, or something in it is not supported.
    """
    key = conversion_key(path)
    target = converted_path(key)
    if is_complete(target):
        return target
    with locked(f"convert-{key}"):
        if not is_complete(target):  # another process may have converted it while this one waited
            _convert_into(path, target)
    return target


def _convert_into(path: Path, target: Path) -> None:
    for stale in target.parent.glob(f"{target.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)  # of a conversion that was interrupted; the lock is ours
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        with GgufFile(path) as file:
            write_model_folder(file, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_model_folder(file: GgufFile, folder: Path) -> None:
    """Writes a GGUF's model to `folder`: weights, configs and tokenizer.

    Raises:
        ModelError: Something in the file is not supported.
    """
    try:
        names = frozenset(file.tensors)
        factors = file.read("rope_freqs.weight") if "rope_freqs.weight" in names else None
        config = model_config(file.metadata, names, factors)
        if "token_embd.weight" not in names:
            raise ModelError("the file lacks the tensor token_embd.weight", param="model")
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]  # it may have rows without a token
        outputs = _plan(file, config)
        write_tokenizer_files(file.metadata, folder)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}", param="model") from error
    weights = [_weight_entry(file, output, config) for output in outputs]
    _write_safetensors(weights, {"format": "pt"}, folder / "model.safetensors")
    blocks = {name: entry for output in outputs for name, entry in _block_entries(file, output, config)}
    _write_safetensors([entry for _, entry in blocks.values()], {n: t for n, (t, _) in blocks.items()}, folder / BLOCKS_FILE)
    _write_json(folder / "generation_config.json", generation_config(file.metadata))
    named = {"agentrt_fused": True, "agentrt_name": file.metadata.get("general.name"), "agentrt_gguf": str(file.path)}
    _write_json(folder / "config.json", config | named)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _plan(file: GgufFile, config: Mapping[str, Any]) -> list[_Output]:
    """Which tensors make which, layer by layer; every tensor of the file is used or is known to be of no use."""
    used = {"rope_freqs.weight"}
    outputs: list[_Output] = []

    def add(name: str, sources: tuple[str, ...]) -> None:
        shapes = [file.tensors[source].shape for source in sources]
        rows = sum(shape[0] for shape in shapes)
        outputs.append(_Output(name, (rows, *shapes[0][1:]), sources))
        used.update(sources)

    for leaf, theirs in _TOP_NAMES.items():
        if f"{leaf}.weight" in file.tensors:
            add(f"{theirs}.weight", (f"{leaf}.weight",))
    for layer in range(config["num_hidden_layers"]):
        for name, sources in _layer_outputs(file, layer, gemma=config["model_type"].startswith("gemma")):
            add(name, sources)
    if unknown := sorted(set(file.tensors) - used):
        raise ModelError(f"tensors that this architecture should not have: {', '.join(unknown[:5])}", param="model")
    return outputs


def _layer_outputs(file: GgufFile, layer: int, *, gemma: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    names = _LAYER_NAMES | _GEMMA_NAMES if gemma else _LAYER_NAMES
    for suffix in ("weight", "bias"):
        for theirs, leaves in _FUSED.items():
            sources = tuple(f"blk.{layer}.{leaf}.{suffix}" for leaf in leaves)
            missing = [source for source in sources if source not in file.tensors]
            if missing and (suffix == "weight" or len(missing) < len(sources)):
                raise ModelError(f"the file lacks the tensor {missing[0]}", param="model")
            if not missing:
                yield f"model.layers.{layer}.{theirs}.{suffix}", sources
        for leaf, theirs in names.items():
            source = f"blk.{layer}.{leaf}.{suffix}"
            if source in file.tensors:
                yield f"model.layers.{layer}.{theirs}.{suffix}", (source,)


def _weight_entry(file: GgufFile, output: _Output, config: Mapping[str, Any]) -> _Entry:
    rows = (rows for source in output.sources for rows in _restored(file, source, config))
    content = (np.ascontiguousarray(part, dtype="<f4") for part in rows)
    return _Entry(output.name, "F32", output.shape, math.prod(output.shape) * 4, content)


def _block_entries(file: GgufFile, output: _Output, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, _Entry]]]:
    """The quantised sources of a matrix, if all of them are: (name, (GGML type, bytes))."""
    sources = [file.tensors[source] for source in output.sources]
    if len(output.shape) != 2 or any(source.type_name in UNQUANTISED for source in sources):
        return
    for part, source in enumerate(sources):
        name = f"{output.name}.{part}"
        shape = (source.shape[0], source.nbytes // source.shape[0])
        yield name, (source.type_name, _Entry(name, "U8", shape, source.nbytes, _restored_blocks(file, source.name, shape, config)))


def _write_safetensors(entries: list[_Entry], metadata: Mapping[str, str], path: Path) -> None:
    """Writes the tensors in turn. The safetensors package would want them all in memory at once."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in entries:
            for content in entry.content:
                out.write(content.data)


def _heads_to_restore(source: str, file: GgufFile, config: Mapping[str, Any]) -> int | None:
    """How many heads' rows llama.cpp has put in another order; None if it has not."""
    leaf = _leaf(source)
    if file.metadata["general.architecture"] in ("llama", "mistral") and leaf in ("attn_q", "attn_k"):
        return int(config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"])
    return None


def _restored(file: GgufFile, source: str, config: Mapping[str, Any]) -> Iterator[NDArray[np.float32]]:
    """The source's rows as Hugging Face has them, a few at a time."""
    if heads := _heads_to_restore(source, file, config):
        yield _halves_together(file.read(source), heads)
    elif file.metadata["general.architecture"].startswith("gemma") and _leaf(source).endswith("norm"):
        yield file.read(source) - np.float32(1)  # Gemma multiplies by 1 + weight, and llama.cpp stores the sum
    else:
        yield from file.rows(source)


def _restored_blocks(file: GgufFile, source: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Iterator[NDArray[np.uint8]]:
    """The source's bytes, its rows as Hugging Face has them: blocks lie along a row, so they move with it."""
    rows = np.frombuffer(file.raw(source), np.uint8).reshape(shape)
    heads = _heads_to_restore(source, file, config)
    yield np.ascontiguousarray(_halves_together(rows, heads)) if heads else rows


def _leaf(source: str) -> str:
    return match[2] if (match := _LAYER.fullmatch(source)) else source.partition(".")[0]


def _halves_together(weight: NDArray[_Value], heads: int) -> NDArray[_Value]:
    """Undoes llama.cpp's order of a head's rows, in which the two halves that rotate together alternate.

    Args:
        weight: [heads * head_dim, ...].
        heads: How many heads.

    Returns:
        The same rows, each head's first halves before its second.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
