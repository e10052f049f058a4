from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt.errors import ModelError
from agentrt.hub import gguf_file
from agentrt.hub.gguf_file import TENSOR_TYPES, GgufFile

QUANTIZABLE = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def values_of_q4_k_or_q5_k(block: bytes, bits: int) -> list[float]:
    """One super-block of 256 values, worked out value by value as GGML's format describes it."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    scales = block[4:16]
    high = block[16:48] if bits == 5 else b""
    low = block[48:] if bits == 5 else block[16:]
    values = []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, minimum = scales[j] & 63, scales[j + 4] & 63
        else:
            scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6 << 4)
            minimum = (scales[j + 4] >> 4) | (scales[j] >> 6 << 4)
        byte = low[i // 64 * 32 + i % 32]
        quant = byte >> 4 if i // 32 % 2 else byte & 15
        if bits == 5:
            quant |= (high[i % 32] >> j & 1) << 4
        values.append(d * scale * quant - dmin * minimum)
    return values


def values_of_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = float(np.frombuffer(block[208:], np.float16)[0])
    values = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, lane = divmod(within, 32)
        byte = low[half * 64 + (quarter % 2) * 32 + lane]
        quant = (byte >> 4 if quarter >= 2 else byte & 15) | (high[half * 32 + lane] >> (2 * quarter) & 3) << 4
        values.append(d * float(scales[i // 16]) * (quant - 32))
    return values


def test_every_quantised_type_is_read_as_it_was_written(write_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_ROWS_AT_ONCE", 256 * 3)  # several blocks of rows, the last one short
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(8, 256)).astype(np.float32)
    tensors: dict[str, Any] = {"F32": plain} | dict.fromkeys(QUANTIZABLE, plain)
    for kind in K_TYPES:
        size = TENSOR_TYPES[int(gguf.GGMLQuantizationType[kind])][2]
        blocks = rng.integers(0, 256, (8, size), dtype=np.uint8)
        at = 208 if kind == "Q6_K" else 0
        blocks[:, at : at + (2 if kind == "Q6_K" else 4)] = rng.uniform(0.01, 0.1, (8, 1 if kind == "Q6_K" else 2)).astype(np.float16).view(np.uint8)
        tensors[kind] = blocks
    path = write_gguf("llama", {}, tensors, types={kind: kind for kind in tensors})
    step = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.03, "Q4_0": 0.5, "Q4_1": 0.4, "Q5_0": 0.3, "Q5_1": 0.2}
    with GgufFile(path) as file:
        assert {t.type_name for t in file.tensors.values()} == {name for name, _, _ in TENSOR_TYPES.values()}
        for kind in ("F32", *QUANTIZABLE):
            assert np.abs(file.read(kind) - plain).max() <= step[kind], kind
        for kind in K_TYPES:
            worked_out = {"Q4_K": lambda b: values_of_q4_k_or_q5_k(b, 4), "Q5_K": lambda b: values_of_q4_k_or_q5_k(b, 5), "Q6_K": values_of_q6_k}
            expected = [worked_out[kind](row.tobytes()) for row in tensors[kind]]
            np.testing.assert_allclose(file.read(kind), expected, rtol=1e-5, atol=1e-5)
            assert file.raw(kind) == tensors[kind].tobytes()


def test_the_header_is_what_the_gguf_package_reads(write_gguf: Any) -> None:
    more = {"a.bool": True, "a.float": 0.1, "a.text": "héllo", "a.list": [1, 2, 3], "a.texts": ["x", ""]}
    path = write_gguf("llama", {"block_count": 3}, {"w": np.ones((3, 5), np.float32), "v": np.ones(7, np.float32)}, more=more)
    theirs = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        assert file.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        for tensor in theirs.tensors:
            mine = file.tensors[tensor.name]
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert (mine.offset, mine.nbytes, mine.type_name) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)


def test_a_type_that_is_not_supported_is_named(write_gguf: Any) -> None:
    path = write_gguf("llama", {}, {"odd": np.zeros((1, 84), np.uint8)}, types={"odd": "Q2_K"})
    with pytest.raises(ModelError, match=r"tiny\.gguf: tensor 'odd' has the type Q2_K"):
        GgufFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_a_model_error_or_reads(write_gguf: Any, tmp_path: Path, data: st.DataObject) -> None:
    small = {"model": "gpt2", "tokens": ["a", "b"]}
    whole = write_gguf("llama", {"block_count": 3}, {"w": np.ones((2, 4), np.float32)}, vocabulary=small).read_bytes()
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError), GgufFile(path) as file:
        for name, tensor in file.tensors.items():
            assert file.read(name).size == math.prod(tensor.shape)
