from __future__ import annotations

import itertools

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import RequestError, UserError
from agentrt.text import StopMatcher
from agentrt.text.stop import LONGEST_MATCH

STRINGS = ["ab", "abc", "bca", "aab", "c", "\n\n", "cab\n", "éa"]
PATTERNS = [
    r"[0-9]+",
    r"\bEND\b",
    r"a+b",
    r"ca(?=b)",
    r"ca(?!b)",
    r"ab|abc",
    r"a.*?c",
    r"a[^c]*c",
    r"c$",
    r"(?<=a)b",
    r"(?m)^b",
    r"^ab",
    r"(a|b){3,5}c",
]
TEXT = st.lists(st.sampled_from([*"aabbcc1 \né", "END"]), max_size=24).map("".join)


def whole_search(text: str, strings: list[str], patterns: list[str]) -> tuple[str, int | None]:
    """The text before the first match of all, and where it begins."""
    starts = [text.find(stop) for stop in strings if stop in text]
    starts += [match.start() for pattern in patterns if (match := regex.search(pattern, text))]
    first = min(starts, default=None)
    return (text if first is None else text[:first]), first


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        text, match = matcher.push(piece)
        out += text
        if match is not None:
            return out
    return out + matcher.flush()


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@settings(max_examples=400, deadline=None)
@given(
    text=TEXT,
    cuts=st.lists(st.integers(0, 24), max_size=24),
    strings=st.lists(st.sampled_from(STRINGS), max_size=3, unique=True),
    patterns=st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True),
)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, cuts: list[int], strings: list[str], patterns: list[str]
) -> None:
    expected, start = whole_search(text, strings, patterns)
    matcher = StopMatcher(strings, patterns)
    assert feed(matcher, cut(text, cuts)) == expected
    assert (matcher.match is None) == (start is None)
    if start is not None and matcher.match in strings:
        assert text.startswith(matcher.match, start)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(0, 24), max_size=24), strings=st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3))
def test_included_stop_is_the_shortest_of_those_that_begin_first(text: str, cuts: list[int], strings: list[str]) -> None:
    before, start = whole_search(text, strings, [])
    shortest = "" if start is None else min((s for s in strings if text.startswith(s, start)), key=len)
    matcher = StopMatcher(strings, include_stop=True)
    assert feed(matcher, cut(text, cuts)) == before + shortest
    assert matcher.match == (shortest or None)


def test_text_is_given_out_as_soon_as_no_stop_can_begin_in_it() -> None:
    matcher = StopMatcher(["User:", "\n\n"])
    assert matcher.push("Hello Us") == ("Hello ", None)
    assert matcher.push("a\n") == ("Usa", None)
    assert matcher.push("b\n\nc") == ("\nb", "\n\n")
    assert matcher.push("more") == ("", "\n\n")
    assert matcher.flush() == ""


def test_a_pattern_at_the_end_waits_for_what_may_undo_it() -> None:
    matcher = StopMatcher((), [r"\bEND\b"])
    assert matcher.push("the END") == ("the ", None)
    assert matcher.push("ING, END") == ("ENDING, ", None)
    assert matcher.push(".") == ("", r"\bEND\b")


def test_a_pattern_that_never_completes_holds_back_a_bounded_text() -> None:
    matcher = StopMatcher((), [r"a[^c]*c"])
    given_out = "".join(matcher.push("a" + "b" * 99)[0] for _ in range(200))
    assert 20_000 - LONGEST_MATCH - 200 <= len(given_out) < 20_000
    assert given_out + matcher.flush() == ("a" + "b" * 99) * 200


def test_a_match_early_in_one_long_piece_is_found() -> None:
    assert StopMatcher((), [r"[0-9]{2}"]).push("x12" + "y" * 3 * LONGEST_MATCH) == ("x", r"[0-9]{2}")


def test_what_cannot_be_a_stop_is_refused() -> None:
    for strings, patterns in ([[""], []], [[], ["foo**"]], [[], ["a*"]], [[], ["(" * 500]]):
        with pytest.raises(UserError):
            StopMatcher(strings, patterns)


def test_a_pattern_that_backtracks_for_ever_fails_its_request() -> None:
    matcher = StopMatcher((), [r"(?:a|aa|a?a)+$(?<=b)"])
    with pytest.raises(RequestError, match="simplify"):
        matcher.push("a" * 60 + "c")
