"""Remembers answers as they were fed, so that a history that comes back as text is found in the cache.

A model may have generated tokens that are not how its tokenizer would split their text. A client sends text back, and
its prompt, tokenised anew, would part from the cache there. Here the remembered ids take the place of the retokenised
ones wherever the text is the same. Invariant: tenants with different salts share nothing; the text of a prompt never
changes, and neither do its ids before the first remembered answer; what is remembered has a bound.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from agentrt.backend import Tokenizer

_MASK = (1 << 61) - 1
_BASE = 1_000_003


@dataclass(frozen=True, slots=True)
class _Turn:
    salt: str
    prompt: array[int]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class TurnMemory:
    """Prompts that were answered, and the ids of their answers; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Remembers nothing yet; `max_tokens` bounds the ids of all prompts and answers together."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: OrderedDict[tuple[int, int], _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], salt: str = "") -> None:
        """Remembers an answer; its end token, if it has one, is left to the template.

        Args:
            prompt_ids: What was answered.
            answer_ids: The answer.
            salt: Tenants of another salt must not learn of it.
        """
        ends = set(self._tokenizer.eos_ids)
        answer = tuple(answer_ids[:-1] if answer_ids and answer_ids[-1] in ends else answer_ids)
        turn = _Turn(salt, array("q", prompt_ids), answer)
        if not answer or turn.tokens > self._max_tokens:
            return
        digest = hash(salt) & _MASK
        for token_id in prompt_ids:
            digest = (digest * _BASE + token_id + 1) & _MASK
        with self._lock:
            self._drop((len(prompt_ids), digest))
            self._turns[len(prompt_ids), digest] = turn
            self._tokens += turn.tokens
            while self._tokens > self._max_tokens:
                self._drop(next(iter(self._turns)))

    def _drop(self, key: tuple[int, int]) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._tokens -= turn.tokens

    def recall(self, ids: Sequence[int], salt: str = "") -> list[int]:
        """`ids` with every remembered answer of that salt in the place of its retokenised text."""
        fed = array("q", ids)
        digest, at = hash(salt) & _MASK, 0
        while at < len(fed) and self._turns:
            digest = (digest * _BASE + fed[at] + 1) & _MASK
            at += 1
            turn = self._turns.get((at, digest))
            if turn is not None and turn.salt == salt and turn.prompt == fed[:at]:
                self._splice(fed, at, turn.answer)
        return fed.tolist()

    def _splice(self, fed: array[int], at: int, answer: tuple[int, ...]) -> None:
        """Puts `answer` at `at` if the ids there spell the same text, whole tokens."""
        if tuple(fed[at : at + len(answer)]) == answer:
            return
        wanted = self._bytes(answer)
        found = b""
        for end in range(at, len(fed)):
            piece = self._bytes(fed[end : end + 1])
            if piece is None or wanted is None:
                return
            found += piece
            if len(found) >= len(wanted):
                if found == wanted:
                    fed[at : end + 1] = array("q", answer)
                return

    def _bytes(self, ids: Sequence[int]) -> bytes | None:
        """The bytes that ids spell; None if a control token is among them."""
        parts = [self._tokenizer.token_bytes(token_id) for token_id in ids]
        return None if None in parts else b"".join(part for part in parts if part is not None)
