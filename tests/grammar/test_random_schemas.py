"""Random schemas against jsonschema: a grammar accepts a document exactly where jsonschema does, and what it writes is valid."""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import agentrt.grammar as grammar
from agentrt.errors import GrammarError
from agentrt.grammar.acceptance import accepts, walks

NAMES = ["a", "b", "c", "ab"]
names = st.sampled_from(NAMES)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 6), st.sampled_from([0.5, 1.5, -2.5, 2.0]), st.sampled_from(["", "a", "b", "ab", "abc", "\n", 'é"']))
documents = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names | st.just("d"), inner, max_size=3)), max_leaves=5
)
small = st.integers(0, 3)
numbers = st.sampled_from([-2, 0, 1, 1.5, 3, 2.0])
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
patterns = st.sampled_from(["^a", "b$", "^(a|b)*$", "^.?$", "^[^a]", "a(?=b)", "", "^$"])


def _plain():
    return st.fixed_dictionaries(
        {},
        optional={
            "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
            "minimum": numbers,
            "exclusiveMaximum": numbers,
            "maximum": numbers,
            "multipleOf": st.sampled_from([1, 2, 0.5]),
            "minLength": small,
            "maxLength": small,
            "pattern": patterns,
            "enum": st.lists(documents, min_size=1, max_size=3),
            "const": scalars,
        },
    ).map(lambda s: dict(list(s.items())[:3]))


def _combined(inner):
    parts = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(names, inner, max_size=3)
    objects = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": named,
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "^x"]), inner, min_size=1, max_size=1),
            "propertyNames": st.fixed_dictionaries({}, optional={"pattern": patterns, "maxLength": small}) | st.just({"enum": ["a", "b"]}),
            "minProperties": small,
            "maxProperties": small,
            "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
            "dependentSchemas": st.dictionaries(names, inner, max_size=1),
            "unevaluatedProperties": st.booleans() | inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("array"),
            "items": inner,
            "prefixItems": parts,
            "minItems": small,
            "maxItems": small,
            "uniqueItems": st.booleans(),
            "contains": inner,
            "minContains": small,
            "unevaluatedItems": st.booleans(),
        },
    )
    combinations = st.fixed_dictionaries(
        {}, optional={"allOf": parts, "anyOf": parts, "oneOf": parts, "not": inner, "if": inner, "then": inner, "else": inner}
    )
    references = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}])
    shapes = st.one_of(objects, objects, arrays, combinations.map(lambda s: dict(list(s.items())[:3])), references)
    return st.builds(lambda a, b: {**a, **b}, shapes, st.one_of(st.just({}), st.just({}), _plain(), objects))


schemas = st.recursive(_plain() | st.booleans(), _combined, max_leaves=6)
roots = st.builds(lambda root, one, two: {**root, "$defs": {"one": one, "two": two}}, schemas.filter(lambda s: isinstance(s, dict)), _plain(), schemas)

_SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]}


def _compiled(schema, tokenizer):
    """The grammar, or None for a schema that is rightly refused as unsatisfiable or endless.

    One whose `$ref` leads to itself has no meaning (JSON Schema leaves it undefined), whatever documents never reach it.
    """
    try:
        return grammar.compile(grammar.json_schema_spec(schema), tokenizer)
    except GrammarError as error:
        assume("in a circle" not in str(error))
        if not any(words in str(error) for words in ("nothing can satisfy", "requires itself")):
            raise
        return None


def _holds(schema, document):
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(document)
    except RecursionError:
        return False


def _check_documents(schema, samples, tokenizer):
    compiled = _compiled(schema, tokenizer)
    for document in samples:
        valid = _holds(schema, document)
        if compiled is None:
            assert not valid, "a schema was refused that this document satisfies"
            continue
        assert accepts(compiled, document, schema) == valid, (document, compiled.ledger)
        if not valid and not compiled.checked:
            assert not walks(compiled, document, schema), ("the ledger says ENFORCED", document, compiled.ledger)


@settings(max_examples=30, **_SETTINGS)
@given(roots, st.lists(documents, min_size=4, max_size=8))
def test_accepted_exactly_where_jsonschema_accepts(byte_tokens, schema, samples):
    _check_documents(schema, samples, byte_tokens)


@pytest.mark.slow
@settings(max_examples=700, **_SETTINGS)
@given(roots, st.lists(documents, min_size=4, max_size=10))
def test_accepted_exactly_where_jsonschema_accepts_at_length(byte_tokens, schema, samples):
    _check_documents(schema, samples, byte_tokens)


def _written(compiled, rng, limit=160):
    """What a model of random weights writes, with a leaning towards ends; None if it was cut."""
    cursor, text = compiled.cursor(), bytearray()
    while not cursor.finished and len(text) < limit:
        if cursor.accepting and rng.random() < 0.5:
            break
        allowed = np.flatnonzero(np.unpackbits(cursor.allowed().view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < 256]
        assert len(allowed), "a text that may not end here can go on"
        ends = [b for b in allowed if chr(b) in '"}],:ab']
        byte = int(rng.choice(ends if ends and rng.random() < 0.8 else allowed.tolist()))
        assert cursor.advance(byte)
        text.append(byte)
    return text.decode() if cursor.accepting else None


@settings(max_examples=30, **_SETTINGS)
@given(roots, st.integers(0, 2**32))
def test_what_is_written_is_valid(byte_tokens, schema, seed):
    compiled = _compiled(schema, byte_tokens)
    if compiled is None:
        return
    rng = random.Random(seed)
    for _ in range(3):
        text = _written(compiled, rng)
        if text is None:
            continue
        valid = _holds(schema, json.loads(text))
        assert (compiled.verify(text) == []) == valid, text
        if not compiled.checked:
            assert valid, (text, compiled.ledger)
