"""A tokenizer's vocabulary in the shapes that masks need: made once per tokenizer, shared by every grammar.

It holds the bytes of all tokens as one flat array (for vectorised walks through an automaton), the canonical
tokenisation of a byte string, and llguidance's own table of the same tokens. It knows nothing of any grammar, and
nothing in it changes after it was made.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

from agentrt.backend import Tokenizer
from agentrt.errors import ModelError

#: Texts whose tokens, put together, must give the same bytes; a tokenizer that rewrites text cannot be forced along.
_PROBES = ('{"name": "get_weather", "arguments": {"n": 12}}', "a  b\n\tc", "é 漢字 🙂", ' "', "Don't")

#: Texts that llguidance prepares masks of, each without those before it: a string that has room for all of one takes its mask as it is. Its own
#: choice goes from 10 characters to 30, so strings with a `maxLength` paid for their last 30 characters; hardly a token has more than 15.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in (5, 10, 15, 20, 30)), f"{_CHARACTER}+"]

_serials = itertools.count()


class Vocabulary:
    """The tokens of one tokenizer.

    Attributes:
        size: Ids are below this.
        words: int32 words of a mask, ceil(size / 32).
        eos_ids: Ids that end an answer; the only control tokens a grammar ever allows.
        flat: uint8 [total], the bytes of all tokens in a row.
        starts: int64 [size], where each token's bytes begin in `flat`.
        lengths: int32 [size], bytes of each token; 0 for control tokens, which no grammar matches.
        canonical: Texts survive encoding and decoding, so that forced text may be tokenised.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        #: Tells vocabularies apart in caches; never used again.
        self.serial = next(_serials)
        self._encode = tokenizer.encode
        self.size = tokenizer.vocab_size
        self.words = (self.size + 31) // 32
        self.eos_ids = tuple(sorted({i for i in tokenizer.eos_ids if 0 <= i < self.size}))
        if not self.eos_ids:
            raise ModelError("the tokenizer has no end token inside its vocabulary, so constrained output could never end")
        pieces = [self._piece(tokenizer, i) for i in range(self.size)]
        self.lengths: NDArray[np.int32] = np.fromiter((len(p) for p in pieces), dtype=np.int32, count=self.size)
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(self.lengths[:-1], dtype=np.int64)))
        self.flat: NDArray[np.uint8] = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.canonical = all(self._survives(text) for text in _PROBES)

    def _piece(self, tokenizer: Tokenizer, token_id: int) -> bytes:
        return b"" if token_id in self.eos_ids else tokenizer.token_bytes(token_id) or b""

    def _survives(self, text: str) -> bool:
        return b"".join(map(self.token_bytes, self._encode(text))) == text.encode()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for a control token or an id outside the vocabulary."""
        if not 0 <= token_id < self.size:
            return b""
        start = int(self.starts[token_id])
        return self.flat[start : start + int(self.lengths[token_id])].tobytes()

    def tokenize(self, text: bytes) -> list[int]:
        """Canonical ids of `text`; from the first byte on that is not UTF-8, the longest tokens that fit."""
        head = _leading_text(text)
        ids = list(self._encode(head)) if head else []
        rest = text[len(head.encode()) :]
        while rest:
            length = next((n for n in range(len(rest), 0, -1) if rest[:n] in self.by_bytes), 0)
            if not length:
                break
            ids.append(self.by_bytes[rest[:length]])
            rest = rest[length:]
        return ids

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """The token of each byte string that has one (the lowest id where several do)."""
        return {self.token_bytes(i): i for i in reversed(range(self.size)) if self.lengths[i]}

    @cached_property
    def _by_text(self) -> tuple[list[bytes], NDArray[np.int64]]:
        order = sorted((i for i in range(self.size) if self.lengths[i]), key=self.token_bytes)
        return [self.token_bytes(i) for i in order], np.array(order, dtype=np.int64)

    def longer_than(self, prefix: bytes, following: bytes) -> Iterator[bytes]:
        """What is left of each token that begins with `prefix` and goes on with one of the bytes `following`."""
        texts, _ = self._by_text
        first = bisect.bisect_right(texts, prefix)
        if first == len(texts) or not texts[first].startswith(prefix):
            return
        for byte in following:
            begin = prefix + bytes((byte,))
            for place in range(bisect.bisect_left(texts, begin, first), len(texts)):
                if not texts[place].startswith(begin):
                    break
                yield texts[place][len(prefix) :]

    def prepare(self) -> None:
        """Makes the tables that an automaton needs now, while a grammar is compiled, and not in the middle of a step."""
        _ = self.by_bytes, self._by_text, self.by_first_byte, self.max_length

    @cached_property
    def by_first_byte(self) -> list[NDArray[np.int64]]:
        """For each byte, the ids of the tokens that begin with it."""
        ids = np.flatnonzero(self.lengths > 0)
        first = self.flat[self.starts[ids]]
        order = np.argsort(first, kind="stable")
        edges = np.searchsorted(first[order], np.arange(257))
        return [ids[order[edges[byte] : edges[byte + 1]]] for byte in range(256)]

    @cached_property
    def max_length(self) -> int:
        """Bytes of the longest token."""
        return int(self.lengths.max(initial=1))

    @cached_property
    def llguidance(self) -> llguidance.LLTokenizer:
        """Llguidance's table of the same tokens; control tokens get names that no text can spell."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Source(self)), n_vocab=self.size, eos_token=list(self.eos_ids), slices=SLICES
        )

    def mask_of(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Packs ids into a mask, int32 [words], bit i of word w for token 32 w + i."""
        bits = np.zeros(self.words * 32, dtype=np.uint8)
        bits[np.fromiter(token_ids, dtype=np.int64)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _leading_text(text: bytes) -> str:
    """The longest beginning of `text` that is UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        return text[: error.start].decode("utf-8")


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary._encode
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i in range(vocabulary.size) if not vocabulary.lengths[i]]
        self.tokens = [vocabulary.token_bytes(i) or b"<|%d|>" % i for i in range(vocabulary.size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace")))


_known: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Returns the tokenizer's vocabulary, made on first use.

    Raises:
        ModelError: The tokenizer has no end token.
    """
    with _lock:
        vocabulary = _known.get(tokenizer)
        if vocabulary is None:
            vocabulary = _known[tokenizer] = Vocabulary(tokenizer)
        return vocabulary


def known_vocabulary(tokenizer: Tokenizer) -> Vocabulary | None:
    """The tokenizer's vocabulary if it was made before; never waits for one that is being made."""
    return _known.get(tokenizer)
