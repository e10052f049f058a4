"""A model whose greedy answers go on and on, and which one character breaks: for what happens in the middle of an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

#: The model has no numbers for it, so that a request with it in its prompt fails.
POISON = "~"


@pytest.fixture(scope="session")
def talker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model that never ends an answer, with a long context, and NaN where `POISON` is embedded."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    specials = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    poison = tokenizer.encode(POISON).ids
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    tensors["lm_head.weight"][specials + poison] = 0  # never the likeliest
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    return folder
