"""A copy of a GGUF file whose tensors of types that a peer cannot read are written in 8 bits, which loses next to nothing of 5."""

from __future__ import annotations

from pathlib import Path

import gguf
from environments import ENVIRONMENTS
from gguf import GGMLQuantizationType, quants

from agentrt.hub import ModelFiles

#: What OpenVINO GenAI's reader takes, and numbers that no one packs.
READABLE = frozenset(GGMLQuantizationType[name] for name in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"))


def readable_gguf(model: ModelFiles) -> Path:
    """The model's own file if all its tensors can be read; else the copy, made if there is none."""
    reader = gguf.GGUFReader(model.gguf)
    if all(tensor.tensor_type in READABLE for tensor in reader.tensors):
        return Path(str(model.gguf))
    path = ENVIRONMENTS / "gguf" / f"{model.name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(reader, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
    return path


def _write(reader: gguf.GGUFReader, path: Path) -> None:
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            listed = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if listed else None)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if kind not in READABLE:
            data, kind = quants.quantize(quants.dequantize(data, kind), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
