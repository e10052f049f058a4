"""Bad constraints: an error that names the place, soon, and the next constraint as if nothing had been."""

import json
import threading

import numpy as np
import pytest

import agentrt.grammar as grammar
from agentrt.config import Limits
from agentrt.errors import GrammarError, UserError
from agentrt.request import GrammarSpec

BAD = {
    "doubled repeat": GrammarSpec("regex", "foo**"),
    "repeat of a repeat": GrammarSpec("regex", "(a{1,1000}){1,1000}"),
    "lookaround": GrammarSpec("regex", "a(?!b)c"),
    "exponential automaton": GrammarSpec("regex", "[ab]*a[ab]{24}"),
    "nothing matches": GrammarSpec("regex", "a$b"),
    "huge enum": GrammarSpec("json_schema", json.dumps({"enum": [f"value {i}" for i in range(700_000)]})),
    "deep nesting": GrammarSpec("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "nowhere": GrammarSpec("json_schema", '{"$ref": "#/$defs/none"}'),
    "network": GrammarSpec("json_schema", '{"$ref": "http://localhost:1/x.json"}'),
    "circle": GrammarSpec("json_schema", '{"allOf": [{"$ref": "#"}]}'),
    "unsatisfiable": GrammarSpec("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}'),
    "not JSON": GrammarSpec("json_schema", "{"),
    "unknown rule": GrammarSpec("lark", "start: nothing"),
    "unclosed": GrammarSpec("lark", 'start: "a'),
    "long choices": GrammarSpec("choices", json.dumps([f"{i:06}" for i in range(60_000)])),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BAD)
def test_bad_constraints_are_refused_with_their_place(name, byte_tokens):
    with pytest.raises(GrammarError) as caught:
        grammar.GrammarCache(Limits(grammar_seconds=0.6)).compile(BAD[name], byte_tokens)
    assert caught.value.param in ("regex", "json_schema", "ebnf", "choices")
    assert len(str(caught.value)) < 600
    assert grammar.compile(grammar.regex_spec("ab?c{2}"), byte_tokens).engine == "fsm"


@pytest.mark.slow
def test_others_compile_while_one_is_stuck(byte_tokens):
    """A pattern that explodes waits in its own process; schemas do not wait for it."""
    cache = grammar.GrammarCache(Limits(grammar_seconds=2.0))

    def explode():
        with pytest.raises(GrammarError):
            cache.compile(GrammarSpec("regex", "[ab]*a[ab]{25}"), byte_tokens)

    stuck = threading.Thread(target=explode)
    stuck.start()
    for i in range(20):
        assert grammar.compile(grammar.json_schema_spec({"const": i, "title": "while one is stuck"}), byte_tokens).cursor().forced()
        assert stuck.is_alive() or i > 0  # had it waited, the other would have ended; how many more fit into its 2 s is the machine's affair
    stuck.join()


def test_the_cache_is_bounded_by_count_and_bytes_and_keyed_by_content(byte_tokens):
    small = grammar.GrammarCache(Limits(grammar_cache_count=3))
    specs = [grammar.json_schema_spec({"const": i}) for i in range(5)]
    first = small.compile(specs[0], byte_tokens)
    assert small.compile(GrammarSpec("json_schema", specs[0].source), byte_tokens) is first
    for spec in specs:
        small.compile(spec, byte_tokens)
    assert len(small) == 3
    assert small.compile(specs[0], byte_tokens) is not first
    tight = grammar.GrammarCache(Limits(grammar_cache_bytes=1))
    tight.compile(specs[0], byte_tokens)
    assert len(tight) == 0
    with pytest.raises(GrammarError, match="the limit is 5"):
        grammar.GrammarCache(Limits(grammar_bytes=5)).compile(specs[0], byte_tokens)


def test_a_cursor_refuses_what_the_grammar_does_and_stays(byte_tokens):
    for spec in (grammar.regex_spec("ab"), grammar.json_schema_spec({"const": "ab"})):
        cursor = grammar.compile(spec, byte_tokens).cursor()
        before = cursor.allowed()
        assert not cursor.advance(ord("z"))
        assert not cursor.advance(256), "the end is not yet"
        assert not cursor.advance(10_000)
        assert (cursor.allowed() == before).all()
        with pytest.raises(UserError, match="from 0 to 0"):
            cursor.rollback(1)


def test_samples_of_one_grammar_do_not_disturb_each_other(byte_tokens):
    compiled = grammar.compile(grammar.json_schema_spec({"type": "array", "items": {"type": "integer"}}), byte_tokens)
    one, two = compiled.cursor(), compiled.cursor()
    start = two.allowed()
    assert all(map(one.advance, b"[1, 2"))
    assert (two.allowed() == start).all()
    assert np.count_nonzero(one.allowed()) > 0
