from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import ModelError
from agentrt.hub.tokenizer_files import build_tokenizer, byte_spelling, tokenizer_config


def in_ggml_words(vocabulary: dict[str, Any], architecture: str = "llama") -> dict[str, Any]:
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}


def splits(name: str, text: str) -> list[str]:
    """How a text is cut before merging: with no merges and all bytes known, the pre-tokenizer alone says."""
    tokenizer = build_tokenizer(in_ggml_words({"model": "gpt2", "pre": name, "tokens": byte_spelling()}))
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "a  12 I'M\n\nx", ["a", "  ", "1", "2", " I", "'", "M", "\n", "\n", "x"]),
        ("gpt-2", "a  12 I'M\n\nx", ["a", " ", " 12", " I", "'", "M", "\n", "\n", "x"]),
        ("qwen2", "a  12 I'M\n\nx!\n", ["a", " ", " ", "1", "2", " I", "'M", "\n\n", "x", "!\n"]),
        ("llama-bpe", "a  1234 I'M\n\nx!\n", ["a", " ", " ", "123", "4", " I", "'M", "\n\n", "x", "!\n"]),
        ("tekken", "aB CamelCase 12/\n", ["a", "B", " Camel", "Case", " ", "1", "2", "/\n"]),
        ("gpt-4o", "CamelCase's 1234", ["Camel", "Case's", " ", "123", "4"]),
    ],
)
def test_text_is_split_as_the_models_own_tokenizers_do(name: str, text: str, expected: list[str]) -> None:
    assert splits(name, text) == expected


def test_control_tokens_are_special_and_users_tokens_are_text(byte_level_vocabulary: dict[str, Any]) -> None:
    tokens = byte_level_vocabulary["tokens"]
    tokenizer = build_tokenizer(in_ggml_words(byte_level_vocabulary))
    ids = tokenizer.encode("<|im_start|> hello<think>").ids
    assert [tokens[i] for i in ids] == ["<|im_start|>", "Ġhel", "lo", "<think>"]
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {"<|im_start|>": True, "<|im_end|>": True, "<think>": False}
    assert tokenizer.token_to_id("[PAD]") is None  # an unused entry has no token


def test_bos_is_put_where_the_file_says_or_llama_cpp_assumes(byte_level_vocabulary: dict[str, Any]) -> None:
    bos = byte_level_vocabulary["bos_token_id"]
    for change, begins in (({}, False), ({"add_bos_token": True}, True), ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False)):
        metadata = in_ggml_words(byte_level_vocabulary | change)
        assert (build_tokenizer(metadata).encode("h").ids[0] == bos) == begins
        assert tokenizer_config(metadata)["add_bos_token"] == begins


@pytest.mark.parametrize(
    ("change", "words"),
    [({"pre": "unheard-of"}, "'unheard-of', which is not known; known: default"), ({"model": "rwkv"}, "'rwkv'"), ({"tokens": []}, "no tokenizer")],
)
def test_what_is_not_known_is_refused(byte_level_vocabulary: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_tokenizer(in_ggml_words(byte_level_vocabulary | change))


PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -4.0, "▁a": -5.0, "ba": -6.0, "abba": -7.0, "▁ab": -8.0, "bab": -9.0, "▁▁": -10.0}


def sentencepiece(*, prefix: bool) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(PIECES.values()),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
    }


def best_pair_first(text: str) -> list[str]:
    """SentencePiece's BPE by brute force: while two neighbours make a piece, join those of the best score."""
    parts = list(text)
    while pairs := [(PIECES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ([part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()])]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab é", max_size=12), prefix=st.booleans())
def test_sentencepiece_joins_the_best_scores_first(text: str, prefix: bool) -> None:
    tokenizer = build_tokenizer(in_ggml_words(sentencepiece(prefix=prefix)))
    spelled = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    assert tokenizer.encode(text, add_special_tokens=False).tokens == best_pair_first(spelled)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(text).ids[0] == 1  # BOS, which such a file need not ask for
