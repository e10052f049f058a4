"""Jump-forward: turns text that a grammar forces into the tokens that it forces.

Forced *text* is no reason to feed any tokens that spell it: what the model would have been asked then changes. Here a
span with one possible text gets its canonical tokens, and those become the mask's only members, so that appending them
is exact at any temperature. Nothing here knows which engine matches the grammar, and no id that was fed is ever
rewritten: a run only appends.

The rule (llguidance's, by Microsoft Research): tokenise the forced bytes behind the last token; if that token would come out
differently, tokenise them alone; then hold back trailing tokens that a longer legal token could swallow.
"""

from __future__ import annotations

from collections.abc import Callable

from agentrt.grammar.vocabulary import Vocabulary

#: How many trailing tokens may be held back for a longer one.
LOOKBACK = 4


def canonical_run(
    vocabulary: Vocabulary, last_token: int | None, forced: bytes, goes_on: Callable[[bytes], bool], following: bytes = bytes(range(256))
) -> list[int]:
    """Tokens that are certain, given that `forced` is the only text possible next.

    Args:
        vocabulary: The model's tokens.
        last_token: The token before the forced text, or None at the beginning.
        forced: The longest text that the grammar leaves no choice about.
        goes_on: Whether the grammar allows some bytes after the whole of `forced`.
        following: Bytes that may be the first of such; the fewer, the sooner it is known that none goes on.

    Returns:
        Ids of a beginning of `forced`; empty if nothing is certain.
    """
    if not forced or not vocabulary.canonical:
        return []
    before = b"" if last_token is None else vocabulary.token_bytes(last_token)
    ids = vocabulary.tokenize(before + forced)
    kept = 1 if before and ids[:1] == [last_token] else 0
    if before and not kept:
        ids = vocabulary.tokenize(forced)
    return ids[kept : len(ids) - _held_back(vocabulary, ids[kept:], goes_on, following)]


def _held_back(vocabulary: Vocabulary, ids: list[int], goes_on: Callable[[bytes], bool], following: bytes) -> int:
    """How many trailing tokens a longer legal token could swallow."""
    pieces = [vocabulary.token_bytes(i) for i in ids]
    text = b"".join(pieces[-LOOKBACK:])[-vocabulary.max_length :]
    for start in range(len(text)):
        if any(goes_on(tail) for tail in vocabulary.longer_than(text[start:], following)):
            return _tokens_covering(pieces, len(text) - start)
    return 0


def _tokens_covering(pieces: list[bytes], length: int) -> int:
    covered = 0
    for count, piece in enumerate(reversed(pieces), start=1):
        covered += len(piece)
        if covered >= length:
            return count
    return len(pieces)
