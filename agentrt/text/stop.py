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

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A match in the buffer, by its place; ordered as the rule says."""

    start: int
    end: int
    is_pattern: bool
    order: int

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        return self.start, self.end, self.is_pattern, self.order


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
        best = self._first_string()
        open_from = len(self._buffer) if final else self._first_beginning()
        for order, pattern in enumerate(self._patterns):
            candidate, pattern_open = self._look_for(pattern, order, final=final)
            if candidate is not None and (best is None or candidate.rank < best.rank):
                best = candidate
            open_from = min(open_from, pattern_open)
        if best is not None and (final or best.start < open_from or self._ends_sooner(best, open_from)):
            return self._stopped(best)
        return self._give_out(open_from if best is None else min(open_from, best.start))

    def _ends_sooner(self, best: _Candidate, open_from: int) -> bool:
        """Whether nothing that is still open and begins where `best` does could win: a string that is whole is shortest."""
        return best.start == open_from and not best.is_pattern and not self._patterns

    def _first_string(self) -> _Candidate | None:
        found: _Candidate | None = None
        for order, text in enumerate(self._strings):
            start = self._buffer.find(text, self._searched)
            if start >= 0:
                candidate = _Candidate(start, start + len(text), False, order)
                if found is None or candidate.rank < found.rank:
                    found = candidate
        return found

    def _first_beginning(self) -> int:
        """First place from which the buffer's end is the beginning of a stop string."""
        end = len(self._buffer)
        for length in range(min(self._longest_beginning, end - self._searched), 0, -1):
            if self._buffer[end - length :] in self._beginnings:
                return end - length
        return end

    def _look_for(self, pattern: regex.Pattern[str], order: int, *, final: bool) -> tuple[_Candidate | None, int]:
        """The pattern's first match, and the first place from which one may still come about."""
        end = len(self._buffer)
        start = self._searched if final else max(self._searched, end - LONGEST_MATCH)
        match = self._search(pattern, start, partial=not final)
        if match is None:
            return None, end
        if match.partial:
            return None, match.start()
        candidate = _Candidate(match.start(), match.end(), True, order)
        if final:
            return candidate, end
        margin = LOOKAHEAD if "(?!" in pattern.pattern else 1
        if match.end() + margin > end:
            return candidate, candidate.start
        return candidate, self._earlier_open(pattern, start, candidate.start)

    def _earlier_open(self, pattern: regex.Pattern[str], start: int, before: int) -> int:
        """First place before `before` where a match has begun that more text may complete (a search prefers whole ones)."""
        for place in range(start, before):
            match = pattern.match(self._buffer, place, partial=True, timeout=SEARCH_SECONDS)
            if match is not None and match.partial:
                return place
        return len(self._buffer)

    def _search(self, pattern: regex.Pattern[str], start: int, *, partial: bool) -> regex.Match[str] | None:
        try:
            return pattern.search(self._buffer, start, partial=partial, timeout=SEARCH_SECONDS)
        except TimeoutError as error:
            raise RequestError(
                f"the stop pattern {pattern.pattern!r} takes over {SEARCH_SECONDS} s to search; simplify it"
            ) from error

    def _stopped(self, found: _Candidate) -> str:
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


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        compiled = regex.compile(pattern)
        empty = compiled.search("", timeout=SEARCH_SECONDS)
    except (regex.error, RecursionError, TimeoutError, OverflowError) as error:
        raise UserError(f"the stop pattern {pattern!r} does not compile: {error}", param="stop_regex") from error
    if empty is not None:
        raise UserError(f"the stop pattern {pattern!r} matches the empty text; it would end every answer", param="stop_regex")
    return compiled
