"""Finds where an answer stops: stop strings and patterns, in text that arrives in pieces.

The rule is that of a search of the whole text: the match that begins first counts; of those that begin together, the
shortest, strings before patterns. Text is given out as soon as no match can begin in it any more, and a match counts
as soon as no further text can put another before it. Invariant: however a text is cut into pieces, the same text
comes out and the same match ends it.

A pattern's match is sought in a window of `LONGEST_MATCH` characters; one that is longer is not found. A match that
reaches the end of what has arrived waits for the next character, since that may lengthen or undo it (``[0-9]+``,
``\\bEND\\b``, ``END$``); with a negative lookahead it waits for `LOOKAHEAD` characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import regex

from agentrt.errors import RequestError, UserError

#: Longest match of a pattern, in characters; more than that is never held back.
LONGEST_MATCH = 4096
#: How far a negative lookahead may look, in characters.
LOOKAHEAD = 64
#: Seconds that one search may take; a pattern that backtracks for ever fails its request.
SEARCH_SECONDS = 0.25

_CONTEXT = 256  # characters before the searched text that a pattern may look back to


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    """A match in the buffer, or one that may still come about; ordered as the rule says.

    Attributes:
        start: Where it begins.
        end: Where it ends; for one that may come about, the least it can be.
        is_pattern: Found by a pattern.
        order: Which of the strings or patterns.
    """

    start: int
    end: int
    is_pattern: bool
    order: int


class StopMatcher:
    """Looks for the end of one answer; not thread-safe."""

    def __init__(
        self, strings: Sequence[str] = (), patterns: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        """Starts with no text.

        Args:
            strings: Stop strings; none is empty.
            patterns: Regular expressions of the `regex` module.
            include_stop: The matched text is part of what is given out.

        Raises:
            UserError: A string is empty, or a pattern does not compile or matches the empty text.
        """
        if not all(strings):
            raise UserError("a stop string is empty; it would end every answer before it begins", param="stop")
        self._strings = tuple(strings)
        self._patterns = tuple(map(_compiled, patterns))
        self._include_stop = include_stop
        self._beginnings = frozenset(text[:n] for text in self._strings for n in range(1, len(text)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._buffer = ""
        self._searched = 0  # a match cannot begin before this place in the buffer, and what lies before it was given out
        self._match: str | None = None

    @property
    def match(self) -> str | None:
        """The stop string or pattern that ended the answer, once that is certain."""
        return self._match

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece.

        Returns:
            The text that is certain to belong to the answer, and the stop string or pattern that ended it, if that is
            certain. After a match nothing more is taken.

        Raises:
            RequestError: A pattern takes too long to search.
        """
        if self._match is not None or not text:
            return "", self._match
        if not self._strings and not self._patterns:
            return text, None
        self._buffer += text
        return self._advance(final=False), self._match

    def flush(self) -> str:
        """Ends the text: what was held back is given out, up to a match if there is one (`match` tells).

        Raises:
            RequestError: A pattern takes too long to search.
        """
        return "" if self._match is not None else self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        certain, possible = self._strings_found(), [] if final else self._strings_begun()
        for order, pattern in enumerate(self._patterns):
            found = self._pattern_final(pattern, order) if final else self._pattern_found(pattern, order, possible)
            certain += found
        best, rival = min(certain, default=None), min(possible, default=None)
        if best is not None and (rival is None or best < rival):
            return self._stopped(best)
        return self._give_out(len(self._buffer) if rival is None else rival.start)

    def _strings_found(self) -> list[_Found]:
        found: list[_Found] = []
        for order, text in enumerate(self._strings):
            start = self._buffer.find(text, self._searched)
            if start >= 0:
                found.append(_Found(start, start + len(text), False, order))
        return found

    def _strings_begun(self) -> list[_Found]:
        """The first place, if any, from which the buffer's end is the beginning of a stop string."""
        end = len(self._buffer)
        for length in range(min(self._longest_beginning, end - self._searched), 0, -1):
            if self._buffer[end - length :] in self._beginnings:
                return [_Found(end - length, end + 1, False, 0)]
        return []

    def _pattern_final(self, pattern: regex.Pattern[str], order: int) -> list[_Found]:
        match = self._search(pattern, self._searched, partial=False)
        return [_Found(match.start(), match.end(), True, order)] if match is not None else []

    def _pattern_found(self, pattern: regex.Pattern[str], order: int, possible: list[_Found]) -> list[_Found]:
        """The pattern's first match, if certain; what may still come about is added to `possible`."""
        end = len(self._buffer)
        match = self._search(pattern, self._searched, partial=True)
        if match is not None and match.partial and match.start() < end - LONGEST_MATCH:
            match = self._search(pattern, end - LONGEST_MATCH, partial=True)  # no whole one lies before: it would be preferred
        if match is None:
            return []
        if match.partial:
            possible.append(_Found(match.start(), end + 1, True, order))
            return []
        found = _Found(match.start(), match.end(), True, order)
        if match.end() + _margin(pattern) > end and match.end() - match.start() < LONGEST_MATCH:
            possible += [found, *self._begun_before(pattern, order, found.start)]
            return []
        possible += self._begun_before(pattern, order, found.start)
        return [found]

    def _begun_before(self, pattern: regex.Pattern[str], order: int, before: int) -> list[_Found]:
        """The first match that has begun before `before` and may be completed; a search prefers whole ones to it."""
        end = len(self._buffer)
        for place in range(max(self._searched, end - LONGEST_MATCH), before):
            match = self._timed(pattern.match, pattern, place, partial=True)
            if match is not None and match.partial:
                return [_Found(place, end + 1, True, order)]
        return []

    def _search(self, pattern: regex.Pattern[str], start: int, *, partial: bool) -> regex.Match[str] | None:
        return self._timed(pattern.search, pattern, start, partial=partial)

    def _timed(
        self, look: Callable[..., regex.Match[str] | None], pattern: regex.Pattern[str], start: int, *, partial: bool
    ) -> regex.Match[str] | None:
        try:
            return look(self._buffer, start, partial=partial, timeout=SEARCH_SECONDS)
        except TimeoutError as error:
            raise RequestError(
                f"the stop pattern {pattern.pattern!r} takes over {SEARCH_SECONDS} s to search; simplify it"
            ) from error

    def _stopped(self, found: _Found) -> str:
        self._match = self._patterns[found.order].pattern if found.is_pattern else self._strings[found.order]
        text = self._buffer[self._searched : found.end if self._include_stop else found.start]
        self._buffer = ""
        return text

    def _give_out(self, until: int) -> str:
        """Gives out the text before `until`, and forgets what no pattern can look back to."""
        text = self._buffer[self._searched : until]
        drop = max(0, until - _CONTEXT) if self._patterns else until
        self._buffer = self._buffer[drop:]
        self._searched = until - drop
        return text


def _margin(pattern: regex.Pattern[str]) -> int:
    """How many characters after a match must have come for it to stand."""
    if "(?!" in pattern.pattern:
        return LOOKAHEAD
    return 2 if "$" in pattern.pattern else 1  # a $ matches before the last newline too


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        compiled = regex.compile(pattern)
        empty = compiled.search("", timeout=SEARCH_SECONDS)
    except (regex.error, RecursionError, TimeoutError, OverflowError) as error:
        raise UserError(f"the stop pattern {pattern!r} does not compile: {error}", param="stop_regex") from error
    if empty is not None:
        raise UserError(f"the stop pattern {pattern!r} matches the empty text; it would end every answer", param="stop_regex")
    return compiled
