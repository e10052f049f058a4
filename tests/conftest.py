"""What all tests share: corpora from outside the project, and the default model where it is cached."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CHECKOUT = Path(__file__).resolve().parent.parent

# The kernels run in Triton's interpreter here. Triton reads this as its functions are made, so before whoever imports it first.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Where a change is judged, the same examples every time; elsewhere new ones, which find what those do not. How long it takes to make
# one is no fault of it on a machine that is busy elsewhere.
unhurried = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", unhurried, derandomize=True)
settings.register_profile("dev", unhurried)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def torch_draws_the_same_every_time() -> None:
    """What a test draws from torch without a generator of its own; tests that need no torch do not import it for this."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that needs it is skipped where there is none."""
    folder = Path(os.environ.get("AGENTRT_CORPORA", CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}; set AGENTRT_CORPORA")
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_tokenizer(folder: Path) -> int:
    """A byte-level BPE with a few merges, so that tokens span and split characters; returns its size."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the quick brown fox jumps over the lazy dog", 'true false null {"name": "value"}', "naïve café 你好 🙂🙃", "0123456789"]
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_tiny_llama(folder: Path, *, seed: int = 0, holes: int = 7) -> None:
    """A random Llama in Hugging Face's layout whose answers vary; its logits are wider than its vocabulary by `holes`."""
    import json

    import torch
    from safetensors.torch import save_file

    vocab = write_tiny_tokenizer(folder)
    width, heads, kv_heads, head_dim, inner, layers = 48, 6, 2, 8, 96, 2
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.6 / columns**0.5)

    tensors = {"model.embed_tokens.weight": matrix(vocab + holes, width) * 4, "model.norm.weight": torch.ones(width)}
    tensors["lm_head.weight"] = matrix(vocab + holes, width) * 2
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(width),
            f"{at}post_attention_layernorm.weight": torch.ones(width),
            f"{at}self_attn.q_proj.weight": matrix(heads * head_dim, width),
            f"{at}self_attn.k_proj.weight": matrix(kv_heads * head_dim, width),
            f"{at}self_attn.v_proj.weight": matrix(kv_heads * head_dim, width),
            f"{at}self_attn.o_proj.weight": matrix(width, heads * head_dim),
            f"{at}mlp.gate_proj.weight": matrix(inner, width),
            f"{at}mlp.up_proj.weight": matrix(inner, width),
            f"{at}mlp.down_proj.weight": matrix(width, inner),
        }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocab + holes,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocab - 1, vocab - 3]}))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(folder)
    return folder
