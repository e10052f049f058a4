"""Builds ``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF's metadata.

Two kinds of vocabulary: byte-level BPE (``tokenizer.ggml.model`` is "gpt2"), whose pre-tokenizer the file only names,
and SentencePiece's BPE with byte fallback ("llama"), whose merges follow from its scores. The names and what they
stand for are llama.cpp's; the splits are those of the models' own published tokenizers. Invariant: ids are the file's;
a pre-tokenizer that is not known is a `ModelError`, never a guess, since a wrong one shifts every id in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from agentrt.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN = _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL

_GPT2_SPLIT, _DIGITS_THEN_GPT2 = "gpt-2", "digits, then gpt-2"

_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")

_KINDS: dict[str, tuple[str, ...]] = {
    _GPT2_SPLIT: ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "gigachat", "mellum"),
    _DIGITS_THEN_GPT2: ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    _LLAMA3: (*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    _QWEN2: ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"),
    _TEKKEN: ("tekken",),
    _GPT4O: ("gpt-4o", "llama4", "kanana2"),
}
#: Name in ``tokenizer.ggml.pre`` -> how text is split before merging.
_PRE_TOKENIZERS = {name: split for split, names in _KINDS.items() for name in names}

#: With these a word that is a token as a whole is taken as that, whatever the merges say; and a text begins with BOS.
_WHOLE_WORDS = frozenset((*_LLAMA3_NAMES, "tekken"))

_SPACE = "\u2581"  # SentencePiece's sign for a space


def write_tokenizer_files(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` to `folder`.

    Args:
        metadata: The GGUF's header.
        folder: Where to write.

    Raises:
        ModelError: The file has no tokenizer, or one that is not supported.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    config = tokenizer_config(metadata)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds ``tokenizer_config.json``: the named tokens, whether a text begins with BOS, the chat template."""
    tokens = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether the model was trained with BOS before every text; where the file does not say, as llama.cpp assumes."""
    assumed = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", assumed))


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF's metadata describes.

    Raises:
        ModelError: There is none, or its kind is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(f"tokenizer.ggml.model is {model!r}, which is not supported; supported: gpt2, llama", param="model")
    _add_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata)
    return tokenizer


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the file has no tokenizer (tokenizer.ggml.tokens)", param="model")
    return tokens


def _typed_tokens(metadata: Mapping[str, Any]) -> Iterable[tuple[int, str, int]]:
    """(id, token, type) of every token that stands for something."""
    tokens = _tokens(metadata)
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED:
            yield token_id, token, kind


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    spelling = byte_spelling()
    alphabet = set(spelling)
    vocab: dict[str, int] = {}
    for token_id, token, kind in _typed_tokens(metadata):
        if kind == _NORMAL and not alphabet.issuperset(token):
            token = "".join(spelling[byte] for byte in token.encode())
        vocab.setdefault(token, token_id)
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    name = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    split = _PRE_TOKENIZERS.get(name)
    if split is None:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"tokenizer.ggml.pre is {name!r}, which is not known; known: {known}", param="model")
    if split == _GPT2_SPLIT:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == _DIGITS_THEN_GPT2:
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    first = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_spelling() -> list[str]:
    """How byte-level BPE (GPT-2) spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    vocab: dict[str, int] = {}
    for token_id, token, _ in _typed_tokens(metadata):
        vocab.setdefault(token, token_id)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = _tokens(metadata)[unknown_id] if unknown_id is not None else None
    merges = _merges_of_scores(metadata, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_sign = normalizers.Replace(" ", _SPACE)
    to_space: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_sign])
        to_space.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_sign
    tokenizer.decoder = decoders.Sequence(to_space)
    return tokenizer


def _merges_of_scores(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE makes: two neighbours join when their union is a token, the best score first.

    Gemma's scores do not follow its merges, but the order of its tokens does.
    """
    by_position = str(metadata.get("general.architecture", "")).startswith("gemma")
    scores: Sequence[float] = metadata.get("tokenizer.ggml.scores") or []
    if not by_position and len(scores) != len(_tokens(metadata)):
        raise ModelError("the file has a SentencePiece vocabulary without scores", param="model")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id, token, kind in _typed_tokens(metadata):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        rank = token_id if by_position else -scores[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((rank, -len(left), -len(right), left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are matched whole: control tokens as special ones, the file's user-defined ones as plain text."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token_id, token, kind in _typed_tokens(metadata):
        if not token or tokenizer.token_to_id(token) != token_id:
            continue  # a second id for the same text can never come out of text
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not adds_bos(metadata):
        return
    bos = _tokens(metadata)[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
    )
