"""Folders on disk: shards, fused files mapped without a copy, broken ones refused by name; generation defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrt.errors import ModelError
from agentrt.models.decoder import Decoder
from agentrt.models.loader import load_model


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def fuse(folder: Path) -> None:
    """Rewrites a saved model as agentrt's own conversion stores it."""
    tensors = load_file(folder / "model.safetensors")
    fused = {}
    for name in list(tensors):
        for joined, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if f".{parts[0]}." in name:
                fused[name.replace(parts[0], joined)] = torch.cat(
                    [tensors.pop(name.replace(parts[0], part)) for part in parts]
                )
    save_file({**tensors, **fused}, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, agentrt_fused=True)


def test_shards(tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path) -> None:
    model = tiny("Qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    equal(load_model(tmp_path).decoder, model, (13,))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc to see what is mapped")
def test_fused_files_are_mapped_not_copied(
    tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path
) -> None:
    model = tiny("Qwen2")
    model.save_pretrained(tmp_path)
    fuse(tmp_path)
    pointers = {}

    def spy(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        pointers[name] = weight.data_ptr()
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    loaded = load_model(tmp_path, linear=spy)
    equal(loaded.decoder, model, (13,))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in maps]
    assert len(pointers) == 4 * 3 + 1
    outside = [name for name, at in pointers.items() if not any(start <= at < end for start, end in ranges)]
    assert not outside, "these matrices were copied"


def test_another_dtype(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("Gemma2", sliding_window=8)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, torch.bfloat16).decoder
    assert isinstance(decoder, Decoder)
    assert decoder.dtype == torch.bfloat16
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    from agentrt.attention.base import AttentionBatch
    from agentrt.attention.torch_cpu import TorchAttention
    from agentrt.engine.kv_store import KVStore

    ids, slots = torch.arange(20) * 5, torch.arange(20)
    store = KVStore(decoder.config, 20, torch.bfloat16)
    batch = AttentionBatch((20,), (0,), (slots,), slots)
    ours = decoder.logits(decoder.forward(ids, slots, batch, TorchAttention(), store))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0].float()
        exact = model(ids[None]).logits[0]
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < 1.5 * (expected - exact).norm(), (
        "no further from float32 than transformers' bfloat16"
    )


@pytest.mark.parametrize("layout", ["model.language_model.", "language_model.model."])
def test_the_language_model_inside_a_multimodal_one(
    layout: str, tiny: Callable[..., Any], equal: Callable[..., None], tmp_path: Path
) -> None:
    model = tiny("Gemma3", sliding_window=8)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {layout + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.encoder.weight"] = torch.zeros(2)
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    equal(load_model(tmp_path).decoder, model, (13,))


class TestBrokenFolders:
    @pytest.fixture
    def folder(self, tiny: Callable[..., Any], tmp_path: Path) -> Path:
        tiny("Llama").save_pretrained(tmp_path)
        return tmp_path

    def rewrite(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    def test_missing_tensor(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ModelError, match=r"lacks 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
            load_model(folder)

    def test_unexpected_tensor(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(60)}))
        with pytest.raises(ModelError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
            load_model(folder)

    def test_wrong_shape(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
        with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[7\]; config\.json makes it \[48\]"):
            load_model(folder)

    def test_old_computed_buffers_are_no_surprise(self, folder: Path) -> None:
        self.rewrite(
            folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5)})
        )
        load_model(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="safetensors only"):
            load_model(folder)

    def test_cut_file(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
            load_model(folder)

    def test_missing_shard(self, folder: Path) -> None:
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"not there: model-00001-of-00002\.safetensors"):
            load_model(folder)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"config\.json is not there"):
            load_model(tmp_path / "absent")


def test_generation_defaults_and_allowed_tokens(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("Llama", eos_token_id=7).save_pretrained(tmp_path)
    generation = {
        "eos_token_id": [5, 7],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.8,
        "suppress_tokens": [3],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = load_model(tmp_path)
    defaults = loaded.generation
    assert defaults.eos_ids == (5, 7)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.6, 20, 0.8, None)
    allowed = loaded.allowed_tokens([*range(90), 95, 300])  # 300 has no logit
    assert allowed is not None
    assert allowed.nonzero().flatten().tolist() == [*range(3), *range(4, 90), 95]
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    greedy = load_model(tmp_path)
    assert greedy.generation.temperature == 0.0
    assert greedy.generation.eos_ids == (7,)
    assert greedy.allowed_tokens(range(101)) is None
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).generation.temperature is None


@pytest.mark.slow
def test_native_models_do_not_import_transformers(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    program = (
        "import sys; from pathlib import Path; from agentrt.models.loader import load_model;"
        f"load_model(Path({str(tmp_path)!r})); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
