"""What each token id stands for: its bytes, its text, or that it is a control token or no token at all.

Worked out once from a tokenizer in the `tokenizers` library's format, for the two kinds whose bytes are certain:
byte-level BPE, and SentencePiece-style vocabularies with a sign for the space. Invariant: the bytes of the ids of an
encoded text, one after the other, are the bytes of that text, but for what `Tokenizer.rewrites_text` tells of.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from agentrt.errors import ModelError
from agentrt.hub.tokenizer_files import byte_spelling

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Tables by token id; ids without an entry have no token.

    Attributes:
        bytes_of: The bytes, None for a control token and an id without a token.
        text_of: The text where the bytes are whole characters, else None.
        control: Control token's id to its text.
    """

    bytes_of: tuple[bytes | None, ...]
    text_of: tuple[str | None, ...]
    control: dict[int, str]


def build_table(tokenizer: tokenizers.Tokenizer, size: int) -> TokenTable:
    """Works out the table.

    Args:
        tokenizer: The tokenizer.
        size: How many ids there are.

    Raises:
        ModelError: It is of a kind whose bytes are not certain.
    """
    added = tokenizer.get_added_tokens_decoder()
    control = {token_id: token.content for token_id, token in added.items() if token.special and token_id < size}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    bytes_of: list[bytes | None] = [None] * size
    as_bytes = _byte_level_bytes if _is_byte_level(tokenizer) else _sentencepiece_bytes
    plain = {token: token_id for token, token_id in vocab.items() if token_id < size and token_id not in added}
    for token_id, content in as_bytes(plain):
        bytes_of[token_id] = content
    for token_id, token in added.items():
        if token_id < size and not token.special:
            bytes_of[token_id] = token.content.encode()
    return TokenTable(tuple(bytes_of), tuple(map(_whole_text, bytes_of)), control)


def kinds_of(component: Any) -> set[str]:
    """Names of all the parts of a tokenizer's component (normaliser, pre-tokenizer, decoder), nested ones too."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("type"), str):
                found.add(value["type"])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(state_of(component))
    return found


def state_of(component: Any) -> Any:
    """A tokenizer's component as JSON, None if there is none."""
    return None if component is None else json.loads(component.__getstate__())


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    kinds = kinds_of(tokenizer.decoder)
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return False
    raise ModelError(
        f"the tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}, so its tokens' bytes are not certain; "
        f"supported: byte-level BPE, and SentencePiece-style vocabularies",
        param="model",
    )


def _byte_level_bytes(vocab: dict[str, int]) -> list[tuple[int, bytes]]:
    spelling = byte_spelling()
    alphabet = set(spelling)
    if not alphabet.issuperset("".join(vocab)):  # a token that is spelled in plain text, which is rare
        plain = {token: token_id for token, token_id in vocab.items() if not alphabet.issuperset(token)}
        spelled = {token: token_id for token, token_id in vocab.items() if token not in plain}
        return [*_byte_level_bytes(spelled), *((token_id, token.encode()) for token, token_id in plain.items())]
    # All tokens in one go: a character is a byte, so a token is a slice. One at a time takes four times as long.
    content = "".join(vocab).translate({ord(char): byte for byte, char in enumerate(spelling)}).encode("latin-1")
    ends = list(itertools.accumulate(map(len, vocab)))
    slices = map(slice, [0, *ends], ends)
    return list(zip(vocab.values(), map(content.__getitem__, slices), strict=True))


def _sentencepiece_bytes(vocab: dict[str, int]) -> list[tuple[int, bytes]]:
    def as_bytes(token: str) -> bytes:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()

    return [(token_id, as_bytes(token)) for token, token_id in vocab.items()]


def _whole_text(content: bytes | None) -> str | None:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
