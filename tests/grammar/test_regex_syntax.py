"""Patterns mean what Python's `re` says they mean, and what no automaton holds is refused with its offset."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax as syntax
from agentrt.grammar.regex_fsm import byte_automaton

ALPHABET = 'ab1 _-"é\n'

atoms = st.sampled_from(["a", "b", "1", " ", "-", "é", ".", r"\d", r"\w", r"\W", r"\s", r"\S", "[ab]", "[^a]", "[a-c1]", r"[\w-]", r"[^\d\n]", "(?:)", r"\x61", r"\n"])
quantifiers = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}", "*?", "{2,}"])


def _combined(inner):
    pieces = st.builds(lambda body, q: f"({body}){q}", inner, quantifiers)
    alternatives = st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(?:" + "|".join(parts) + ")")
    return st.lists(st.one_of(pieces, alternatives, inner), min_size=1, max_size=3).map("".join)


patterns = st.recursive(st.builds(lambda a, q: a + q, atoms, quantifiers), _combined, max_leaves=6)
texts = st.text(ALPHABET, max_size=7)


def _accepts(node, text):
    if syntax.empty_language(node):
        return False
    automaton = byte_automaton(syntax.write(node), syntax.size(node), 20)
    state = automaton.walk(automaton.start, text.encode())
    return state >= 0 and bool(automaton.accepting[state])


@settings(max_examples=40, deadline=None)
@given(patterns, st.lists(texts, min_size=3, max_size=8))
def test_whole_matches_agree_with_re(pattern, samples):
    node = syntax.whole(syntax.parse(pattern))
    automaton = byte_automaton(syntax.write(node), syntax.size(node), 20)
    compiled = re.compile(pattern, re.ASCII)
    for text in [*samples, "", "a", "ab", "aab", "a1", "bb"]:
        state = automaton.walk(automaton.start, text.encode())
        assert (state >= 0 and bool(automaton.accepting[state])) == (compiled.fullmatch(text) is not None), (pattern, text)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["", "^", "^^"]), patterns, st.sampled_from(["", "$", "|^b", "|b$", "$|^a"]), texts)
def test_matches_anywhere_agree_with_re(left, pattern, right, text):
    whole = f"{left}{pattern}{right}"
    expected = re.search(whole.replace("$", r"\Z"), text, re.ASCII) is not None
    # The dialects differ in what "." and \s leave out; the alphabet holds only "\n" of it.
    node = syntax.anywhere(syntax.widened(syntax.parse_any(whole)))
    assert _accepts(node, text) == expected


@settings(max_examples=40, deadline=None)
@given(patterns, texts)
def test_what_is_written_is_read_again(pattern, text):
    node = syntax.parse(pattern)
    again = syntax.parse(syntax.write(node))
    assert (re.fullmatch(syntax.write(node), text) is None) == (re.fullmatch(syntax.write(again), text) is None)


@pytest.mark.parametrize(
    ("pattern", "offset", "keyword"),
    [
        ("foo**", "4", "*"),
        ("a{1,3}{2}", "6", "{"),
        ("(a{1,1000}){1,1000}", "0", "{"),
        ("x(?=y)", "1", "(?="),
        ("x(?<!y)", "1", "(?<!"),
        (r"(a)\1", "3", r"\1"),
        (r"\bword", "0", r"\b"),
        ("a(b", "1", "("),
        ("ab)", "2", ")"),
        ("[ab", "0", "["),
        ("[b-a]", "1", "-"),
        ("+a", "0", "+"),
        ("a\\", "1", "\\"),
        (r"\p{Nonsense}", "0", r"\p"),
        ("a++", "2", "+"),
        ("(?x)a", "0", "(?"),
    ],
)
def test_refusals_name_offset_and_construct(pattern, offset, keyword):
    with pytest.raises(GrammarError) as caught:
        syntax.parse(pattern)
    assert (caught.value.pointer, caught.value.keyword) == (offset, keyword)
    assert f"offset {offset}" in str(caught.value)


def test_ecma_patterns_with_opaque_parts_keep_their_meaning_in_python():
    """What the final check runs is the same pattern in Python's notation."""
    cases = {
        r"^(?=.*\d)(?=.*[a-z]).{4,}$": ("abc1", "abcd"),
        r"^(\w)\1$": ("aa", "ab"),
        r"^(?<q>['" + '"' + r"]).*\k<q>$": ("'x'", "'x\""),
        r"\bcat\b": ("a cat", "concat"),
        r"^\p{Lu}\p{Script=Greek}+$": ("Aαβ", "aαβ"),
        r"^[^]$": ("\n", "ab"),
        r"^\d$": ("4", "٤"),
        "^\\u{1F600}$": ("😀", "x"),
    }
    for pattern, (good, bad) in cases.items():
        written = re.compile(syntax.write(syntax.parse_any(pattern)))
        assert written.search(good), pattern
        assert not written.search(bad), pattern


def test_widened_patterns_match_at_least_as_much():
    for pattern, text in [(r"^(?=.*\d)\w+$", "abc"), (r"^(a|b)\1$", "ab"), (r"\bcat", "concat")]:
        assert _accepts(syntax.anywhere(syntax.widened(syntax.parse_any(pattern))), text)
