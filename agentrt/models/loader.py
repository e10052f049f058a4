"""From a folder on disk to a model that runs: config, tensors, and the defaults of generation.

Safetensors only (nothing is ever unpickled), mapped into memory: tensors that are stored as the decoder wants them are
used where they lie. transformers is imported only for a model that the native decoder does not run.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch
from agentrt.errors import ModelError
from agentrt.kernels.quantized_linear import QuantizedWeight
from agentrt.models.config import (
    HF,
    DecoderConfig,
    ModelConfig,
    architecture_of,
    eos_ids,
    is_native,
    refuse_unsupported,
)
from agentrt.models.decoder import Decoder, LayeredStore, weight_shapes
from agentrt.models.gguf_blocks import GgufBlocks
from agentrt.models.linear import LinearFactory, Quantized, dense
from agentrt.models.packed_weights import packed_weights
from agentrt.models.quantized_checkpoint import AwqWeight, Files, QuantizedFiles, RowScaled

_PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_COMPUTED = ("rotary_emb.inv_freq",)  #: Tensors that old checkpoints carry although the config says them.


class CausalModel(Protocol):
    """What the engine calls: the native decoder, or a model of transformers behind the same face."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        store: LayeredStore,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Runs one step; returns hidden states [rows, width] of the wanted tokens, int64 [rows], or of all."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [rows, vocab_size] in float32 of hidden states [rows, width]."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend; None where they say nothing.

    Attributes:
        eos_ids: Every id that ends an answer, from generation_config.json and config.json.
        temperature: 0.0 if they ask for greedy decoding.
        top_k, top_p, min_p, repetition_penalty: As in SamplingParams.
        suppressed_ids: Ids that are never to be sampled.
    """

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    suppressed_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, generation: HF, config_eos: tuple[int, ...]) -> GenerationDefaults:
        """Reads a `generation_config.json` (empty: none) beside the end tokens of config.json."""
        samples = generation.get("do_sample")
        temperature = None if samples is None else float(generation.get("temperature") or 1.0) if samples else 0.0
        return cls(
            eos_ids=tuple(dict.fromkeys((*eos_ids(generation), *config_eos))),
            temperature=temperature,
            top_k=generation.get("top_k"),
            top_p=generation.get("top_p"),
            min_p=generation.get("min_p"),
            repetition_penalty=generation.get("repetition_penalty"),
            suppressed_ids=tuple(generation.get("suppress_tokens") or ()),
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        decoder: What computes.
        config: Its shape.
        generation: Its makers' defaults.
    """

    decoder: CausalModel
    config: ModelConfig
    generation: GenerationDefaults

    def allowed_tokens(self, token_ids: Iterable[int]) -> Tensor | None:
        """Which logits may ever be sampled: those of ids that have a token and are not suppressed.

        Args:
            token_ids: The ids that the tokenizer knows.

        Returns:
            bool [vocab_size], or None if every logit may.
        """
        known = torch.tensor(sorted(token_ids), dtype=torch.int64)
        allowed = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        allowed[known[known < self.config.vocab_size]] = True
        allowed[[token for token in self.generation.suppressed_ids if token < self.config.vocab_size]] = False
        return None if bool(allowed.all()) else allowed.to(self.decoder.device)


def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    linear: LinearFactory = dense,
    bits: int | None = None,
    *,
    triton: bool = False,
) -> LoadedModel:
    """Loads a model from a folder in Hugging Face's layout, or one that agentrt converted from a GGUF file.

    Args:
        folder: With config.json and safetensors (one file, or shards with their index).
        dtype: Of weights and activations.
        device: Where to.
        linear: How the native decoder holds its matrices.
        bits: Of a weight: 4 or 8, as the folder has them quantised or quantised here, instead of `linear`. None: as `linear` says.
        triton: Whether weights of few bits are multiplied by Triton's kernels, as on a GPU, or by a CPU's.

    Raises:
        ModelError: If the folder is incomplete or the model is one that agentrt does not run; says what and where.
    """
    hf = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    refuse_unsupported(hf)
    device = torch.device(device)
    decoder: CausalModel
    if is_native(hf):
        config = ModelConfig.from_hf(hf)
        with TensorFiles(folder) as files:
            stored = QuantizedFiles(files, hf["quantization_config"]) if hf.get("quantization_config") else files
            packed = packed_weights(folder, bits) if bits is not None and not triton else None
            unneeded = packed.names if packed is not None else frozenset[str]()
            weights = _FusedWeights(stored, config, dtype, device, exact=bits is not None, unneeded=unneeded)
            if bits is not None:
                linear = _few_bits(bits, weights, device, triton=triton)
            decoder = Decoder(config, weights, linear if packed is None else packed.before(linear))
            if packed is not None:
                packed.keep()
    elif bits is not None:
        raise ModelError(
            f"{architecture_of(hf)} runs through transformers, whose matrices agentrt does not quantise; leave out dtype, or"
            " give float32 or bfloat16",
            param="dtype",
        )
    else:
        from agentrt.models.hf_adapter import load_adapter  # imports transformers, which takes seconds

        decoder = load_adapter(folder, dtype, device)
        config = decoder.config
    return LoadedModel(decoder, config, GenerationDefaults.from_hf(generation, config.eos_ids))


def _few_bits(bits: int, weights: _FusedWeights, device: torch.device, *, triton: bool) -> LinearFactory:
    if not triton:
        return Quantized(bits, weights.stored)
    from agentrt.models.device_linear import DeviceLinears  # imports Triton

    return DeviceLinears(bits, weights.stored, weights.packed, device)


def holds_few_bits(folder: Path) -> bool:
    """Whether the native decoder runs this model and its matrices lie there quantised, so that `bits=4` uses them as they are.

    Raises:
        ModelError: If there is no readable config.json.
    """
    hf = _read_json(folder / "config.json")
    method = (hf.get("quantization_config") or {}).get("quant_method")
    return is_native(hf) and (method in ("gptq", "awq") or bool(GgufBlocks(folder)))


class TensorFiles:
    """The safetensors of a folder, by tensor name; mapped, so a tensor's memory is the file's until it is changed.

    Attributes:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._file_of = dict(self._index())

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def read(self, name: str) -> Tensor:
        """The tensor of that name.

        Raises:
            ModelError: If it is not there.
        """
        if name not in self._file_of:
            raise ModelError(f"{self.folder} has no tensor {name!r}")
        tensor: Tensor = self._handle(self._file_of[name]).get_tensor(name)
        return tensor

    def _index(self) -> Iterator[tuple[str, Path]]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.exists():
            shards = _read_json(index).get("weight_map") or {}
            missing = sorted({shard for shard in shards.values() if not (self.folder / shard).exists()})
            if missing:
                raise ModelError(f"{index} lists files that are not there: {_some(missing)}; fetch the model again")
            yield from ((name, self.folder / shard) for name, shard in shards.items())
        elif single.exists():
            yield from ((name, single) for name in self._handle(single).keys())  # noqa: SIM118 - not a mapping
        else:
            raise ModelError(
                f"{self.folder} has neither model.safetensors nor model.safetensors.index.json; agentrt reads"
                " safetensors only (no pickled .bin weights)"
            )

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}; fetch the model again") from error
        return self._open[file]


class _FusedWeights(Mapping[str, Tensor]):
    """The files' tensors under the decoder's names: q, k and v in one, gate and up in one, in the dtype asked for.

    A tensor that is stored so already, in that dtype, is not copied. Others are made when they are asked for, so that
    no more than one exists twice. With `exact`, matrices that are to be quantised come in float32, on the CPU. Of those that are
    `unneeded` only the shape comes.
    """

    def __init__(
        self,
        files: Files,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
        unneeded: Container[str] = (),
    ) -> None:
        if config.decoder is None:
            raise ValueError(f"{config.architecture} has no native decoder")
        self._files, self._dtype, self._device, self._exact, self._unneeded = files, dtype, device, exact, unneeded
        self._shapes = weight_shapes(config)
        self._flags = _layout(files, config.decoder)
        self._blocks = GgufBlocks(files.folder)
        self._check()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._unneeded:
            return torch.empty(self._shapes[name], device="meta")
        parts = [self._files.read(stored) for stored in self._stored(name)]
        matrix = len(self._shapes[name]) == 2 and name != "model.embed_tokens.weight"
        place = (torch.device("cpu"), torch.float32) if matrix and self._exact else (self._device, self._dtype)
        parts = [part.to(*place) for part in parts]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(
                f"{self._files.folder}: tensor {', '.join(self._stored(name))} has shape {list(tensor.shape)};"
                f" config.json makes it {list(self._shapes[name])}"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def stored(self, name: str) -> Sequence[QuantizedWeight]:
        """A matrix as the folder has it quantised, part by part; empty if it has it in float."""
        if isinstance(self._files, QuantizedFiles):
            parts = [self._files.quantized(stored) for stored in self._stored(name)]
            return [] if None in parts else [part for part in parts if part is not None]
        return self._blocks("model.embed_tokens.weight" if name == "lm_head.weight" and self._flags.tied else name)

    def packed(self, name: str) -> list[AwqWeight] | list[RowScaled]:
        """A matrix as the folder has it packed, part by part; empty if not all of it is, in one way."""
        if not isinstance(self._files, QuantizedFiles):
            return []
        parts = [self._files.packed(stored) for stored in self._stored(name)]
        awq = [part for part in parts if isinstance(part, AwqWeight)]
        scaled = [part for part in parts if isinstance(part, RowScaled)]
        if len(awq) == len(parts) and len({part.zeros.shape[0] for part in awq}) == 1:
            return awq
        return scaled if len(scaled) == len(parts) and len({part.q.dtype for part in scaled}) == 1 else []

    def _stored(self, name: str) -> tuple[str, ...]:
        """Names in the files of what makes up a tensor of the decoder."""
        if name == "lm_head.weight":
            return (self._flags.head_name,)
        stored = self._flags.weight_prefix + name.removeprefix("model.")
        if not self._flags.fused:
            for fused, parts in _PARTS.items():
                if f".{fused}." in stored:
                    return tuple(stored.replace(fused, part) for part in parts)
        return (stored,)

    def _check(self) -> None:
        needed = {stored for name in self._shapes for stored in self._stored(name)}
        missing = sorted(name for name in needed if name not in self._files)
        if missing:
            raise ModelError(f"{self._files.folder} lacks {len(missing)} tensors: {_some(missing)}")
        surplus = sorted(name for name in self._files if name not in needed and not self._ignored(name))
        if surplus:
            raise ModelError(
                f"{self._files.folder} has {len(surplus)} tensors that its config.json has no place for:"
                f" {_some(surplus)}; the model is not what the config says"
            )

    def _ignored(self, name: str) -> bool:
        if name == self._flags.head_name:
            return self._flags.tied
        return name.endswith(_COMPUTED) or name.startswith(self._flags.ignored_prefixes)


def _layout(files: Files, flags: DecoderConfig) -> DecoderConfig:
    """The flags, with the names' prefix that these files use; some architectures have been saved under several."""
    for prefix, head in ((flags.weight_prefix, flags.head_name), *flags.other_layouts):
        if f"{prefix}embed_tokens.weight" in files:
            return flags.renamed(prefix, head)
    return flags


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is not there; a model is a folder with config.json and safetensors") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
