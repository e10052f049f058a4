"""Token ids to text, one at a time, byte-exact: a character is given when its last byte has come, and not before.

It knows nothing of stop strings. Invariant: what `push` gave, one after the other, and then `flush`, is the text that
decoding all the ids at once gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from agentrt.backend import Tokenizer
from agentrt.text import tokenizer as native

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence; not thread-safe."""

    __slots__ = ("_bytes_of", "_decoder", "_pending", "_skip", "_text_of")

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        """Starts with no text.

        Args:
            tokenizer: Whose ids will come.
            skip: Bytes at the beginning that are not part of the text (they complete a prompt's).
        """
        self._skip = skip
        if isinstance(tokenizer, native.Tokenizer):
            self._text_of: Sequence[str | None] | None = tokenizer.table.text_of
            self._bytes_of: Callable[[int], bytes | None] = tokenizer.table.bytes_of.__getitem__
        else:  # another backend's
            self._text_of, self._bytes_of = None, tokenizer.token_bytes
        self._decoder = _utf8_decoder("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        """Takes the next id.

        Args:
            token_id: Below the vocabulary's size; a control token has no text.

        Returns:
            The characters that it made complete. Bytes that can be part of no character become U+FFFD.
        """
        if self._text_of is not None and not self._pending and not self._skip:
            text = self._text_of[token_id]
            if text is not None:
                return text
        content = self._bytes_of(token_id)
        if content is None:
            return ""
        if self._skip:
            skipped = min(self._skip, len(content))
            self._skip -= skipped
            content = content[skipped:]
        text = self._decoder.decode(content)
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Ends the text: bytes of a character that never became complete are one U+FFFD."""
        self._pending = False
        return self._decoder.decode(b"", final=True)
