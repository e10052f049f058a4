"""Forced tokens are the mask's only member at their place, canonical, the same on both engines, and never rewritten."""

import random

import numpy as np
import pytest

import agentrt.grammar as grammar
from agentrt.grammar import choices_spec, compile, compiler, json_schema_spec
from agentrt.grammar.check import ByteTokenizer
from agentrt.grammar.jump_forward import canonical_run
from agentrt.grammar.vocabulary import vocabulary_of
from agentrt.request import GrammarSpec

CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS = [
    CLOSED | {"properties": {"name": {"enum": ["get_weather", "get_news"]}, "n": {"type": "integer"}}, "required": ["name", "n"]},
    CLOSED | {"properties": {"city": {"type": "string"}, "unit": {"const": "celsius"}, "ü": {"type": ["null", "boolean"]}}},
    {"anyOf": [CLOSED | {"properties": {"description": {"type": "number"}}, "required": ["description"]}, {"enum": ["é", "è", 'a"\n', [1, {"x": 2.5}]]}]},
    {"type": "array", "items": {"type": "string", "pattern": "^[ab]+(cd)?$"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}], "items": False, "minItems": 2},
    {"type": "string", "format": "date"},
]


def bits(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def sampled(cursor, tokenizer, rng):
    """A token of the mask; mostly one that ends something, so that documents end."""
    allowed = [int(t) for t in bits(cursor.allowed()) if t not in tokenizer.eos_ids]
    ends = [t for t in allowed if set(tokenizer.token_bytes(t)) & set(b'"}],')]
    return rng.choice(ends if ends and rng.random() < 0.7 else allowed) if allowed else None


def walked(cursor, tokenizer, rng, check, limit=60):
    """Samples and forces by turns; returns ids and how many of them were forced."""
    ids, forced = [], 0
    while not cursor.finished and len(ids) < limit:
        run = cursor.forced()
        for token in run:
            check(cursor, token)
            assert cursor.advance(token)
        ids, forced = ids + run, forced + len(run)
        if cursor.accepting and rng.random() < 0.5:
            break
        token = None if cursor.finished else sampled(cursor, tokenizer, rng)
        if token is None:
            break
        assert cursor.advance(token)
        ids.append(token)
    return ids, forced


def only_member(cursor, token):
    assert bits(cursor.allowed()).tolist() == [token]


@pytest.mark.parametrize("engine", ["llguidance", "fsm"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_forced_tokens_are_the_only_members_of_their_masks(schema, engine, trained_tokens):
    compiled = grammar.compile(grammar.json_schema_spec(schema, engine=engine), trained_tokens)
    assert compiled.engine == engine
    rng, total = random.Random(1), 0
    for _ in range(10):
        total += walked(compiled.cursor(), trained_tokens, rng, only_member)[1]
    assert total > 0 or schema is SCHEMAS[5]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_both_engines_give_the_same_masks(schema, trained_tokens):
    fast, slow = (grammar.compile(grammar.json_schema_spec(schema, engine=engine), trained_tokens) for engine in ("fsm", "llguidance"))
    rng = random.Random(2)
    for _ in range(10):
        left, right = fast.cursor(), slow.cursor()
        for _ in range(60):
            assert (left.allowed() == right.allowed()).all()
            assert (left.accepting, left.finished) == (right.accepting, right.finished)
            runs = left.forced(), right.forced()
            assert runs[0][: len(runs[1])] == runs[1][: len(runs[0])]
            token = None if left.finished else sampled(left, trained_tokens, rng)
            if token is None:
                break
            assert left.advance(token)
            assert right.advance(token)


def test_a_document_that_follows_the_canonical_tokens_stays_canonical(trained_tokens):
    """Sampling what the tokenizer would write next, and forcing between, gives the tokenizer's own ids for the whole text."""
    compiled = grammar.compile(grammar.json_schema_spec(SCHEMAS[0]), trained_tokens)
    for name in ("get_weather", "get_news"):
        for n in (0, 7, 12, 12345):
            text = f'{{"name": "{name}", "n": {n}}}'
            wanted, cursor, ids = trained_tokens.encode(text), compiled.cursor(), []
            while len(ids) < len(wanted):
                token = (cursor.forced() or [wanted[len(ids)]])[0]
                assert cursor.advance(token)
                ids.append(token)
            assert ids == wanted
            assert cursor.finished


def test_trailing_tokens_that_a_longer_one_could_swallow_are_held_back(trained_tokens):
    vocabulary = vocabulary_of(trained_tokens)
    quoted = canonical_run(vocabulary, None, b'{"name": "', lambda tail: True)
    whole = canonical_run(vocabulary, None, b'{"name": "', lambda tail: False)
    assert whole == trained_tokens.encode('{"name": "')
    assert quoted == whole[: len(quoted)]
    assert len(quoted) < len(whole), "a quote with text after it is one token"
    assert canonical_run(vocabulary, None, b"", lambda tail: True) == []


def test_exact_masked_keeps_the_grammars_own_masks_and_drafts_the_run(trained_tokens):
    for engine in ("fsm", "llguidance"):
        spec = grammar.json_schema_spec(SCHEMAS[0], engine=engine)
        exact = GrammarSpec(spec.kind, spec.source, spec.options, engine, jump_forward="exact_masked")
        drafting, forcing = (grammar.compile(s, trained_tokens).cursor() for s in (exact, spec))
        assert drafting.forced() == forcing.forced() != []
        assert set(bits(forcing.allowed())) < set(bits(drafting.allowed()))
        assert drafting.advance(trained_tokens.encode("{")[0]), "a token that is not canonical here"
        assert drafting.forced() != []


def test_the_end_is_never_among_forced_tokens(trained_tokens):
    cursor = grammar.compile(grammar.choices_spec(["get_weather"]), trained_tokens).cursor()
    for token in cursor.forced():
        assert cursor.advance(token)
    assert cursor.finished
    assert cursor.forced() == []
    assert bits(cursor.allowed()).tolist() == [0, 1]
    assert cursor.advance(1)
    assert not cursor.advance(0)
    cursor.rollback(1)
    assert cursor.finished
    assert len(cursor) == len(trained_tokens.encode("get_weather"))


def test_a_batch_of_masks_is_the_same_as_one_by_one(trained_tokens):
    specs = [grammar.json_schema_spec(s) for s in SCHEMAS] + [grammar.regex_spec("a|bc"), grammar.choices_spec(["x"])]
    cursors = [grammar.compile(spec, trained_tokens).cursor() for spec in specs]
    out = np.zeros((len(cursors), vocabulary_of(trained_tokens).words), dtype=np.int32)
    grammar.fill_masks(cursors, out)
    assert (out == np.stack([cursor.allowed() for cursor in cursors])).all()


def test_which_engine_follows_from_the_spec_alone(trained_tokens):
    cache = compiler.GrammarCache()
    kinds = {
        grammar.json_schema_spec(SCHEMAS[0]): "llguidance",
        grammar.json_schema_spec(SCHEMAS[0], engine="fsm"): "fsm",
        grammar.json_schema_spec({"type": "object"}, engine="fsm"): "llguidance",
        grammar.regex_spec("[ab]+"): "fsm",
        grammar.choices_spec(["a"]): "fsm",
        grammar.lark_spec('start: "a"'): "llguidance",
    }
    for _ in range(2):
        assert {spec: cache.compile(spec, trained_tokens).engine for spec in kinds} == kinds


class _RewritingTokenizer(ByteTokenizer):
    """As one with a normaliser and a prefix space: its tokens spell another text than it was given."""

    def encode(self, text, *, bos=False, special=False):
        return super().encode(" " + text.lower())


def test_a_tokenizer_that_rewrites_text_forces_nothing_and_can_still_write_it():
    tokenizer = _RewritingTokenizer()
    for spec in (json_schema_spec({"const": {"Aa": 1}}), json_schema_spec({"const": {"Aa": 1}}, engine="fsm"), choices_spec(['{"Aa": 1}'])):
        cursor = compile(spec, tokenizer).cursor()
        for byte in b'{"Aa": 1}':
            assert cursor.forced() == []
            assert cursor.allowed()[byte // 32] >> byte % 32 & 1
            assert cursor.advance(byte)
        assert cursor.accepting
