"""Token healing: the answer begins by completing text that was asked for but not fed, in whichever tokens the model likes.

A prompt that ends in the middle of what would be one token forces the model onto a path it has rarely seen. So the last
bytes of the text are left out, and the first tokens of the answer must spell them: each lies within what is left of
them or goes beyond. Under a grammar, tokens that go beyond are left to the grammar's own beginning, and not mixed with
it. (The idea is guidance's.)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentrt.grammar.cursor import GrammarCursor
from agentrt.grammar.vocabulary import Vocabulary


class HealingCursor:
    """A sequence's position in the bytes to be completed, and after them in its grammar, if it has one."""

    def __init__(self, tail: bytes, vocabulary: Vocabulary, inner: GrammarCursor | None = None) -> None:
        """Begins before the tail.

        Args:
            tail: The bytes that the answer must begin with.
            vocabulary: The model's tokens.
            inner: What holds after the tail; None: anything.
        """
        self._vocabulary = vocabulary
        self._inner = inner
        self._left = [tail]  # what was left after each token that was taken within the tail
        self._after = 0  # tokens taken after the tail

    @property
    def _tail(self) -> bytes:
        return self._left[-1]

    def allowed(self) -> NDArray[np.int32]:
        """The mask: int32 [ceil(vocabulary / 32)], bit i of word w for token 32 w + i."""
        if self._tail:
            return _completing(self._vocabulary, self._tail, self._inner is None)
        if self._inner is not None:
            return self._inner.allowed()
        return np.full(self._vocabulary.words, -1, dtype=np.int32)

    def advance(self, token_id: int) -> bool:
        """Takes a token; False, and no change, if it is not allowed."""
        if self._tail:
            if not int(self.allowed().view(np.uint32)[token_id // 32]) >> token_id % 32 & 1:
                return False
            self._left.append(self._tail[int(self._vocabulary.lengths[token_id]) :])
            return True
        if self._inner is not None and not self._inner.advance(token_id):
            return False
        self._after += 1
        return True

    def forced(self) -> list[int]:
        """What the grammar forces after the tail; nothing within it, where the model chooses the spelling."""
        return [] if self._tail or self._inner is None else self._inner.forced()

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        after = min(count, self._after)
        if after and self._inner is not None:
            self._inner.rollback(after)
        self._after -= after
        if count > after:
            del self._left[after - count :]

    @property
    def accepting(self) -> bool:
        """Whether an end token may follow."""
        return not self._tail and (self._inner is None or self._inner.accepting)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return not self._tail and self._inner is not None and self._inner.finished


@lru_cache(maxsize=256)
def _completing(vocabulary: Vocabulary, tail: bytes, beyond: bool) -> NDArray[np.int32]:
    """Tokens that lie within `tail`, and, if `beyond`, those that begin with it: int32 [words]."""
    lengths = vocabulary.lengths
    fits = (lengths > 0) if beyond else (lengths > 0) & (lengths <= len(tail))
    for place, byte in enumerate(tail):
        reaches = np.flatnonzero(fits & (lengths > place))
        fits[reaches] = vocabulary.flat[vocabulary.starts[reaches] + place] == byte
    mask = vocabulary.mask_of(np.flatnonzero(fits).tolist())
    mask.flags.writeable = False
    return mask
