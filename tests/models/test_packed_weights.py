"""Packed matrices in the model cache: what a second start reads gives the same bits, and whatever is not right is made anew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrt.kernels.cpu import build
from agentrt.kernels.quantized_linear import QuantizedWeight

from agentrt.hub import list_cached, remove
from agentrt.hub.model_cache import converted_path, packed_path
from agentrt.models import packed_weights as packed
from agentrt.models.linear import Quantized
from agentrt.models.loader import load_model

pytestmark = pytest.mark.skipif(build.load("linear") is None, reason=build.built("linear").found)
X = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model cache of the test's own, where the smallest of models are kept. Kernels are not built anew for it."""
    home = tmp_path_factory.mktemp("cache")
    for name in ("linear", "attention", "fused", "decoder", "logits"):
        build.load(name)
    monkeypatch.setenv("AGENTRT_HOME", str(home))
    monkeypatch.setattr(packed, "SMALLEST", 1)
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files for a model, of which only the packer reads the content."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


class Start:
    """What a start does: two matrices with random weights (one of three parts, of two kinds), from the file or made."""

    def __init__(self, folder: Path, bits: int = 4) -> None:
        self.made: list[str] = []
        found = packed.packed_weights(folder, bits)
        assert found is not None
        generator = torch.Generator().manual_seed(7)
        weights = {"a": torch.randn(40, 96, generator=generator), "b": torch.randn(33, 96, generator=generator)}
        bias = torch.randn(40, generator=generator)
        pieces = [QuantizedWeight.of(piece, bits) for piece, bits in zip(weights["a"].split((9, 21, 10)), (4, 4, 8), strict=True)]
        make = Quantized(bits, lambda name: pieces if name == "a.weight" else [])

        def spy(name: str, weight: torch.Tensor, own: torch.Tensor | None) -> Any:
            self.made.append(name)
            return make(name, weight, own)

        linear = found.before(spy)
        meta = {name: torch.empty(weight.shape, device="meta") if f"{name}.weight" in found.names else weight for name, weight in weights.items()}
        self.answers = torch.cat([linear("a", meta["a"], bias)(X), linear("b", meta["b"], None)(X)], 1)
        found.keep()


def files(folder: Path) -> list[Path]:
    return sorted(packed_path(folder).glob("*"))


def test_a_second_start_makes_nothing_and_gives_the_same_bits(folder):
    first, second = Start(folder), Start(folder)
    assert (first.made, second.made) == (["a", "b"], [])
    assert torch.equal(first.answers, second.answers)
    assert len(files(folder)) == 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_model_of_packed_matrices_is_the_model(bits: int, family: str, tiny: Callable[..., Any], tmp_path: Path, paged: Any, monkeypatch: Any) -> None:
    tiny(family).save_pretrained(tmp_path)
    prompts = {0: list(range(3, 40)), 1: list(range(60, 90))}
    models = [load_model(tmp_path, bits=bits)]
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedWeight, "of", None)  # nothing is quantised now
        models.append(load_model(tmp_path, bits=bits))
    made, read = (paged(model.decoder, scattered=False).run(prompts, lambda _: 16) for model in models)
    assert all(torch.equal(made[sequence], read[sequence]) for sequence in prompts)


CHANGES = {
    "another weight": lambda folder, patch: (folder / "model.safetensors").write_bytes(b"others!"),
    "another time": lambda folder, patch: os.utime(folder / "model.safetensors", ns=(1, 1)),
    "another config": lambda folder, patch: (folder / "config.json").write_text('{"a": 1}'),
    "one file more": lambda folder, patch: (folder / "gguf.blocks").write_bytes(b""),
    "another layout": lambda folder, patch: patch.setattr(packed, "_layout", lambda: "new"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_was_made_from_has_changed(change, folder, monkeypatch):
    Start(folder)
    time.sleep(0.02)  # so that a file of the same size has another time, on a clock of ticks
    CHANGES[change](folder, monkeypatch)
    assert Start(folder).made == ["a", "b"]
    assert Start(folder).made == []
    assert len(files(folder)) == 1, "the old one was replaced"


def test_other_bits_and_other_instructions_have_files_of_their_own(folder, monkeypatch):
    Start(folder)
    assert Start(folder, bits=8).made == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.setattr(packed, "isa", lambda: "instructions of tomorrow")
        assert Start(folder).made == ["a", "b"]
    assert len(files(folder)) == 3
    assert Start(folder).made == Start(folder, bits=8).made == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes(b'{"format": "pt"}' * 1000),
    "a bit of a matrix": flip(-5000),
    "a bit of the header": flip(100),
    "a bit of the header's length": flip(33),
    "never written": lambda path: path.write_bytes(path.read_bytes()[: packed.DATA].ljust(path.stat().st_size, b"\0")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(damage, folder):
    first = Start(folder)
    (path,) = files(folder)
    DAMAGES[damage](path)
    again = Start(folder)
    assert again.made == ["a", "b"]
    assert torch.equal(first.answers, again.answers)
    assert Start(folder).made == []


def test_a_cache_that_cannot_be_written_is_no_error(folder, own_cache):
    (own_cache / "packed").write_text("in the way")
    assert torch.equal(Start(folder).answers, Start(folder).answers)


def test_little_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", 1 << 20)
    Start(folder)
    assert files(folder) == []


def test_what_is_of_no_use_any_more_goes(folder, tmp_path_factory):
    gone = tmp_path_factory.mktemp("gone")
    shutil.copytree(folder, gone, dirs_exist_ok=True)
    Start(gone)
    left, fresh = (packed_path(gone) / f"int4-{name}.partial" for name in ("left", "fresh"))
    left.write_bytes(b"")
    fresh.write_bytes(b"")
    os.utime(left, (1, 1))
    Start(folder)
    assert fresh in files(gone)
    assert left not in files(gone)
    shutil.rmtree(gone)
    Start(folder, bits=8)
    assert not packed_path(gone).exists()
    assert len(files(folder)) == 2


def test_the_cache_tells_of_it_and_removes_it(folder, own_cache):
    converted = converted_path("0123-v2")
    shutil.copytree(folder, converted)
    (converted / "config.json").write_text(json.dumps({"agentrt_name": "Some Model"}))
    Start(converted)
    Start(folder)
    cached = {model.path: model for model in list_cached()}
    of_converted, of_folder = cached[packed_path(converted)], cached[packed_path(folder)]
    assert (of_converted.name, of_converted.kind) == ("Some Model", "packed")
    assert of_converted.bytes == sum(path.stat().st_size for path in files(converted))
    assert of_folder.name == packed_path(folder).name
    assert {model.path for model in remove(converted.name)} == {converted, packed_path(converted)}
    assert [model.path for model in remove(of_folder.name)] == [packed_path(folder)]
    assert list_cached() == []


#: A start in a process of its own, which says what the one matrix answers.
START = """
import sys
from pathlib import Path
import torch
from agentrt.models import packed_weights as packed
from agentrt.models.linear import Quantized
packed.SMALLEST = 1
found = packed.packed_weights(Path(sys.argv[1]), 4)
weight = torch.randn(700, 640, generator=torch.Generator().manual_seed(7))
print(found.before(Quantized(4, lambda name: []))("a", weight, None)(torch.ones(1, 640)).tolist())
found.keep()
"""


@pytest.mark.slow
def test_processes_that_start_at_once_do_no_harm(folder):
    command = [sys.executable, "-c", START, str(folder)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {start.communicate()[0] for start in starts}
    assert len(answers) == 1
    assert [start.returncode for start in starts] == [0, 0]
    assert len(files(folder)) == 1
    found = packed.packed_weights(folder, 4)
    assert found is not None
    assert found.names == {"a.weight"}
