"""The cursor: one sequence's position in a compiled grammar, whatever engine compiled it.

It says which tokens may come next, takes the one that came, says which tokens are forced, and goes back. End tokens
are its own business: they are allowed exactly where the text may end, and after one nothing follows. A cursor is used
by one thread at a time; masks may be computed in another thread than the one that advances, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import UserError
from agentrt.grammar.llguidance_matcher import LlguidanceMatcher, fill_in_parallel
from agentrt.grammar.vocabulary import Vocabulary


class Matcher(Protocol):
    """What an engine gives the cursor; it sees no end tokens."""

    def fill(self, out: NDArray[np.int32]) -> None:
        """Writes the mask into `out`, int32 [words]."""
        ...

    def advance(self, token_id: int) -> bool:
        """Takes a token, or says False and stays."""
        ...

    def forced(self) -> list[int]:
        """Canonical tokens that must come next."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back tokens."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        ...


class GrammarCursor:
    """One sequence's position in a grammar."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_mask = vocabulary.mask_of(vocabulary.eos_ids)
        self._taken = 0
        self._ended = False

    def __len__(self) -> int:
        """Tokens taken so far, an end token included."""
        return self._taken + self._ended

    @property
    def words(self) -> int:
        """Words of a mask: ceil(vocabulary / 32)."""
        return self._vocabulary.words

    def allowed(self) -> NDArray[np.int32]:
        """The mask: int32 [ceil(vocabulary / 32)], bit i of word w for token 32 w + i.

        Raises:
            ConstraintError: The grammar's engine reached its bounds on this sequence.
        """
        out = np.zeros(self._vocabulary.words, dtype=np.int32)
        self.fill(out)
        return out

    def fill(self, out: NDArray[np.int32]) -> None:
        """As `allowed`, into `out`, contiguous int32 [words]."""
        if self._ended or self._matcher.finished:
            out[:] = self._eos_mask
            return
        self._matcher.fill(out)
        if self._matcher.accepting:
            out |= self._eos_mask

    def advance(self, token_id: int) -> bool:
        """Takes the token that came; False, and no change, if the grammar does not allow it."""
        if self._ended:
            return False
        if token_id in self._vocabulary.eos_ids:
            self._ended = self._matcher.accepting
            return self._ended
        if not 0 <= token_id < self._vocabulary.size or self._matcher.finished or not self._matcher.advance(token_id):
            return False
        self._taken += 1
        return True

    def forced(self) -> list[int]:
        """The canonical tokens that must come next, each the only member of the mask at its place; often none.

        An end token is never among them: `finished` says that nothing else can follow.
        """
        return [] if self._ended or self._matcher.finished else self._matcher.forced()

    def rollback(self, n: int) -> None:
        """Takes back the last `n` tokens.

        Raises:
            UserError: There are fewer.
        """
        if not 0 <= n <= len(self):
            raise UserError(f"n is {n}; it must be from 0 to {len(self)}, the tokens taken so far", param="n")
        if n and self._ended:
            self._ended = False
            n -= 1
        if n:
            self._matcher.rollback(n)
            self._taken -= n

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        return self._ended or self._matcher.accepting

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._ended or self._matcher.finished


def fill_masks(cursors: Sequence[GrammarCursor], out: NDArray[np.int32]) -> None:
    """Writes the masks of many cursors, in parallel where the engine can.

    Args:
        cursors: One per row.
        out: int32 [len(cursors), words], contiguous.

    Raises:
        ConstraintError: As `GrammarCursor.allowed`.
    """
    together: list[tuple[LlguidanceMatcher, int]] = []
    for row, cursor in enumerate(cursors):
        matcher = cursor._matcher
        if isinstance(matcher, LlguidanceMatcher) and not cursor.finished:
            together.append((matcher, row))
        else:
            cursor.fill(out[row])
    if together:
        fill_in_parallel(together, out)
    for matcher, row in together:
        if matcher.accepting:
            out[row] |= cursors[row]._eos_mask
