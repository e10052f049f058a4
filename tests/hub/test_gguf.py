from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from agentrt.errors import ModelError
from agentrt.hub import gguf as conversion
from agentrt.hub import list_cached, resolve_model
from agentrt.hub.gguf_config import llama3_scaling, model_config
from agentrt.hub.model_cache import conversion_key, converted_path

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 32, 64, 4, 2, 8, 2
SHAPE = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": DIM,
    "attention.value_length": DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}


def tiny_tensors(rows: int, *, biases: bool = False, head: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if head:
        shapes["output.weight"] = (rows, HIDDEN)
    for layer in range(LAYERS):
        for leaf, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * DIM, HIDDEN),
            "attn_k": (KV_HEADS * DIM, HIDDEN),
            "attn_v": (KV_HEADS * DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * DIM),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{leaf}.weight"] = shape
            if biases and leaf in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{layer}.{leaf}.bias"] = shape[:1]
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def as_llama_cpp_orders(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to q and k of the architecture llama."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def read_all(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_llama_is_converted_once_with_its_rows_in_order(write_gguf: Any, byte_level_vocabulary: Any, own_cache: Path) -> None:
    rows = len(byte_level_vocabulary["tokens"]) + 3  # an embedding wider than the vocabulary
    plain = tiny_tensors(rows)
    stored = {
        name: as_llama_cpp_orders(t, HEADS if "attn_q" in name else KV_HEADS) if "attn_q" in name or "attn_k" in name else t
        for name, t in plain.items()
    }
    path = write_gguf("llama", SHAPE, stored, more={"general.name": "Tiny"})
    files = resolve_model(str(path))
    assert files.folder.parent == own_cache / "converted"
    assert files.gguf == path
    tensors = read_all(files.folder)
    for layer in range(LAYERS):
        before, after = f"blk.{layer}.", f"model.layers.{layer}."
        qkv = np.concatenate([plain[f"{before}attn_{part}.weight"] for part in "qkv"])
        np.testing.assert_array_equal(tensors.pop(f"{after}self_attn.qkv_proj.weight"), qkv)
        gate_up = np.concatenate([plain[f"{before}ffn_{part}.weight"] for part in ("gate", "up")])
        np.testing.assert_array_equal(tensors.pop(f"{after}mlp.gate_up_proj.weight"), gate_up)
        for theirs, mine in {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_output": "self_attn.o_proj",
            "ffn_down": "mlp.down_proj",
        }.items():
            np.testing.assert_array_equal(tensors.pop(f"{after}{mine}.weight"), plain[f"{before}{theirs}.weight"])
    np.testing.assert_array_equal(tensors.pop("model.embed_tokens.weight"), plain["token_embd.weight"])
    np.testing.assert_array_equal(tensors.pop("model.norm.weight"), plain["output_norm.weight"])
    assert not tensors
    assert files.config["agentrt_fused"] is True
    assert files.config["vocab_size"] == rows
    assert files.config["tie_word_embeddings"] is True
    header = (files.folder / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 64 == 56  # the first tensor lies at a multiple of 64


def test_the_same_content_is_converted_once_wherever_it_lies(write_gguf: Any, tmp_path: Path, byte_level_vocabulary: Any) -> None:
    path = write_gguf("llama", SHAPE, tiny_tensors(len(byte_level_vocabulary["tokens"])))
    first = resolve_model(str(path)).folder
    stamp = (first / "config.json").stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert resolve_model(str(copy)).folder == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")  # other content under the same name
    assert resolve_model(str(path)).folder != first


def test_an_interrupted_conversion_leaves_nothing_and_is_done_again(
    write_gguf: Any, own_cache: Path, byte_level_vocabulary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf("qwen2", SHAPE, tiny_tensors(len(byte_level_vocabulary["tokens"]), biases=True, head=True))
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(path))
    assert list((own_cache / "converted").iterdir()) == []
    left_by_a_killed_process = converted_path(conversion_key(path) + ".0.partial")
    left_by_a_killed_process.mkdir()
    assert [model.kind for model in list_cached()] == ["partial"]
    files = resolve_model(str(path))
    assert [folder.name for folder in (own_cache / "converted").iterdir()] == [files.folder.name]
    assert files.config["attention_bias"] is True
    assert read_all(files.folder)["model.layers.1.self_attn.qkv_proj.bias"].shape == ((HEADS + 2 * KV_HEADS) * DIM,)
    assert "lm_head.weight" in read_all(files.folder)


def test_two_processes_convert_without_harm(write_gguf: Any, byte_level_vocabulary: Any) -> None:
    path = write_gguf("llama", SHAPE, tiny_tensors(len(byte_level_vocabulary["tokens"])))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(conversion.convert, [path, path], chunksize=1)
    assert folders[0] == folders[1]
    assert resolve_model(str(path)).weights[0].is_file()


def test_gemmas_norms_and_what_llama_cpp_keeps_in_its_code(write_gguf: Any, byte_level_vocabulary: Any) -> None:
    plain = tiny_tensors(len(byte_level_vocabulary["tokens"]))
    for layer in range(LAYERS):
        for leaf in ("post_attention_norm", "post_ffw_norm"):
            plain[f"blk.{layer}.{leaf}.weight"] = np.full(HIDDEN, 0.25, np.float32)
    stored = {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in plain.items()}
    metadata = SHAPE | {"attention.sliding_window": 16, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    files = resolve_model(str(write_gguf("gemma2", metadata, stored)))
    tensors = read_all(files.folder)
    for leaf, name in (("ffn_norm", "pre_feedforward_layernorm"), ("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")):
        np.testing.assert_allclose(tensors[f"model.layers.1.{name}.weight"], plain[f"blk.1.{leaf}.weight"], atol=1e-6)
    np.testing.assert_array_equal(  # Gemma's q is not reordered
        tensors["model.layers.0.self_attn.qkv_proj.weight"][: HEADS * DIM], plain["blk.0.attn_q.weight"]
    )
    expected = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "query_pre_attn_scalar": DIM,
        "attn_logit_softcapping": 40.0,
        "final_logit_softcapping": 20.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert {key: files.config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_of_the_header(change: dict[str, Any], expected: dict[str, Any]) -> None:
    metadata = {"general.architecture": "qwen2"} | {f"qwen2.{key}": value for key, value in (SHAPE | change).items()}
    assert model_config(metadata, frozenset(), None)["rope_scaling"] == expected


@pytest.mark.parametrize(("factor", "high", "original"), [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (4.0, 3.0, 2048)])
def test_llama3_scaling_is_found_from_its_divisors(factor: float, high: float, original: int) -> None:
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(64) / 64)
    divisors = []
    for wavelength in wavelengths:  # as published with Llama 3.1
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (high - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    found = llama3_scaling(500_000.0, np.array(divisors, np.float32))
    assert found["rope_type"] == "llama3"
    assert found["factor"] == factor
    assert found["high_freq_factor"] == pytest.approx(high, rel=1e-3)
    assert found["original_max_position_embeddings"] == pytest.approx(original, rel=1e-3)
    with pytest.raises(ModelError, match="rope_freqs"):
        llama3_scaling(500_000.0, np.linspace(1, 9, 64, dtype=np.float32))


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported: llama"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope.dimension_count": 4}, "rotary dimensions"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"block_count": 3}, r"blk\.2\.attn_q\.weight"),
        ("llama", {"block_count": 1}, "should not have"),
    ],
)
def test_what_is_not_supported_is_named(
    write_gguf: Any, own_cache: Path, byte_level_vocabulary: Any, architecture: str, change: dict[str, Any], words: str
) -> None:
    path = write_gguf(architecture, SHAPE | change, tiny_tensors(len(byte_level_vocabulary["tokens"])))
    with pytest.raises(ModelError, match=words) as raised:
        resolve_model(str(path))
    assert "tiny.gguf" in str(raised.value)
    assert not any((own_cache / "converted").iterdir())


def test_every_end_token_and_the_sampling_defaults_are_kept(write_gguf: Any, byte_level_vocabulary: Any) -> None:
    tokens = [*byte_level_vocabulary["tokens"], "<|endoftext|>", "<|eot_id|>"]
    vocabulary = byte_level_vocabulary | {"tokens": tokens, "token_type": [*byte_level_vocabulary["token_type"], 3, 1]}
    more = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    files = resolve_model(str(write_gguf("llama", SHAPE, tiny_tensors(len(tokens)), vocabulary=vocabulary, more=more)))
    ends = [tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")]  # <|eot_id|> is a plain word here
    assert files.generation_config["eos_token_id"] == ends
    assert files.generation_config["temperature"] == 0.7
    assert files.generation_config["top_k"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_reads_the_config_and_the_tensors_are_its_own(
    write_gguf: Any, byte_level_vocabulary: Any, family: str
) -> None:
    """A tiny model of transformers, written as llama.cpp's converter would, comes back with its own tensors."""
    import gguf
    import transformers

    rows = len(byte_level_vocabulary["tokens"])
    kind = "gemma3_text" if family == "gemma3" else family
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=rows, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, query_pre_attn_scalar=DIM, rms_norm_eps=1e-5, max_position_embeddings=512, sliding_window=16,
    )  # fmt: skip
    state = {name: t.numpy() for name, t in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()}
    architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == family)
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    stored: dict[str, Any] = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = as_llama_cpp_orders(tensor, HEADS if "q_proj" in name else KV_HEADS)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        stored[f"{names.get_name(base)}.{suffix}"] = tensor
    base = 1_000_000.0 if family == "gemma3" else 10_000.0
    windowed = {"attention.sliding_window": 16, "rope.freq_base": base} if family.startswith("gemma") else {}
    files = resolve_model(str(write_gguf(family, SHAPE | windowed, stored)))
    theirs = transformers.AutoConfig.from_pretrained(files.folder)
    assert type(theirs) is type(config)
    told = ["hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"]
    told += ["rope_parameters", "layer_types", "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping"] if "gemma" in family else []
    for key in told:
        assert getattr(theirs, key) == getattr(config, key), key
    tensors = read_all(files.folder)
    for layer in range(LAYERS):
        for fused, parts in (("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")), ("mlp.gate_up", ("mlp.gate", "mlp.up"))):
            for suffix in ("weight", "bias"):
                joined = [state.pop(f"model.layers.{layer}.{part}_proj.{suffix}", None) for part in parts]
                if joined[0] is not None:
                    mine = tensors.pop(f"model.layers.{layer}.{fused}_proj.{suffix}")
                    np.testing.assert_allclose(mine, np.concatenate(joined), atol=1e-6)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert set(tensors) == set(state)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, state[name], atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_models_weights_are_those_that_the_gguf_package_reads() -> None:
    import gguf

    files = resolve_model()
    assert files.gguf is not None
    wanted = {f"blk.{layer}.{leaf}.weight" for layer in (0, 29) for leaf in ("attn_q", "attn_k", "attn_v", "ffn_down")}
    theirs = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(files.gguf).tensors
        if tensor.name in wanted | {"token_embd.weight"}
    }
    mine = read_all(files.folder)
    for layer in (0, 29):
        qkv = mine[f"model.layers.{layer}.self_attn.qkv_proj.weight"]
        q, k, v = np.split(qkv, [9 * 64, 12 * 64])
        np.testing.assert_array_equal(as_llama_cpp_orders(q, 9), theirs[f"blk.{layer}.attn_q.weight"])
        np.testing.assert_array_equal(as_llama_cpp_orders(k, 3), theirs[f"blk.{layer}.attn_k.weight"])
        np.testing.assert_array_equal(v, theirs[f"blk.{layer}.attn_v.weight"])
        np.testing.assert_array_equal(mine[f"model.layers.{layer}.mlp.down_proj.weight"], theirs[f"blk.{layer}.ffn_down.weight"])
    np.testing.assert_array_equal(mine["model.embed_tokens.weight"], theirs["token_embd.weight"])
    assert json.loads((files.folder / "config.json").read_text())["vocab_size"] == 49_152


def test_quantised_matrices_are_kept_block_for_block(write_gguf: Any, byte_level_vocabulary: Any) -> None:
    plain = tiny_tensors(len(byte_level_vocabulary["tokens"]))
    types = {name: "Q8_0" if "attn_v" in name else "Q4_1" for name in plain if name.startswith("blk") and "norm" not in name}
    folder = conversion.convert(write_gguf("llama", SHAPE, plain, types=types))
    tensors = read_all(folder)
    with safe_open(folder / conversion.BLOCKS_FILE, "np") as file:
        kinds = file.metadata()
        for name in {name.rpartition(".")[0] for name in kinds}:
            parts = [f"{name}.{part}" for part in range(3) if f"{name}.{part}" in kinds]
            values = [gguf.dequantize(file.get_tensor(part), gguf.GGMLQuantizationType[kinds[part]]) for part in parts]
            np.testing.assert_array_equal(np.concatenate(values), tensors[name])
    assert "model.embed_tokens.weight.0" not in kinds
    assert kinds["model.layers.0.self_attn.qkv_proj.weight.2"] == "Q8_0"
