"""What becomes of each keyword: enforced exactly, or relaxed alone and said so, or refused by pointer and keyword."""

import itertools

import jsonschema
import pytest

from agentrt.errors import GrammarError
from agentrt.grammar import Standing, compile, json_schema_spec
from agentrt.grammar.acceptance import accepts, walks

VALUES = [None, True, False, 0, 1, 2, 2.5, 7, "", "a", "ab", "b", [], [1], [1, 1], ["a", "b"], [1, "a", None]]
OBJECTS = [dict(zip("abc", values, strict=False)) for n in range(4) for values in itertools.product([1, "x"], repeat=n)]
OBJECTS += [{"b": 1}, {"c": "x"}, {"b": 1, "c": 2}, {"ab": 1}, {"a": 1, "c": 2}]

#: Schemas whose every keyword is enforced, by rewriting where llguidance itself would refuse or drop it.
ENFORCED = [
    {"not": {"type": "string"}},
    {"not": {"const": "a"}},
    {"not": {"enum": [1, 2, "ab", None]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"not": {"anyOf": [{"type": "object"}, {"minimum": 1}]}},
    {"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]} and {"oneOf": [{"type": "number"}, {"minLength": 1, "type": "string"}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"a": {"const": "x"}}, "required": ["a"]}]},
    {"type": "object", "dependentRequired": {"a": ["b"], "c": ["a"]}},
    {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"properties": {"a": {"type": "integer"}}, "allOf": [{"properties": {"b": {}}}], "unevaluatedProperties": False},
    {"type": "array", "items": {"enum": [1, "a", None]}, "uniqueItems": True},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "maxProperties": 1},
    {"minLength": 1.0, "maxLength": 2.0, "type": "string"},
    {"type": "string", "format": "no-such-format"},
    {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True, "type": "number"},
]
#: Schemas of which one keyword waits for the final check.
CHECKED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "not": {"not": {"pattern": "^a"}},
    "oneOf": {"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "pattern": {"type": "string", "pattern": "^(?=a).*b$"},
    "minProperties": {"type": "object", "minProperties": 2},
    "if": {"if": {"pattern": "^a"}, "then": {"minLength": 2}},
}


def verdicts(schema, tokenizer):
    compiled = compile(json_schema_spec(schema), tokenizer)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value in VALUES + OBJECTS:
        assert accepts(compiled, value, schema) == judge.is_valid(value), (schema, value)
        if not compiled.checked:
            assert walks(compiled, value, schema) == judge.is_valid(value), (schema, value)
    return compiled


@pytest.mark.parametrize("schema", ENFORCED, ids=range(len(ENFORCED)))
def test_rewritten_schemas_are_enforced_exactly(schema, byte_tokens):
    assert not verdicts(schema, byte_tokens).checked


@pytest.mark.parametrize("keyword", CHECKED)
def test_relaxed_keywords_are_checked_and_named(keyword, byte_tokens):
    compiled = verdicts(CHECKED[keyword], byte_tokens)
    assert {e.keyword for e in compiled.ledger if e.standing is Standing.CHECKED} == {keyword}
    with pytest.raises(GrammarError, match="strict is set") as caught:
        compile(json_schema_spec(CHECKED[keyword]), byte_tokens, strict=True)
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"$ref": "#/$defs/none"}, "", "$ref"),
        ({"properties": {"x/y": {"$ref": "https://example.com/s.json"}}}, "/properties/x~1y", "$ref"),
        ({"$ref": "#"}, "", "$ref"),
        ({"allOf": [{"$ref": "#"}]}, "/allOf/0", "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "/$defs/b/anyOf/0", "$ref"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "", "$ref"),
        ({"items": {"type": "strng"}}, "/items", "type"),
        ({"properties": {"a": {"minLength": -1}}}, "/properties/a", "minLength"),
        ({"properties": {"a": {"pattern": "foo**"}}}, "/properties/a", "pattern"),
        ({"pattern": "(a{1,1000}){1,1000}"}, "", "pattern"),
        ({"required": ["a", 1]}, "", "required"),
        ({"properties": []}, "", "properties"),
        ({"anyOf": {"type": "string"}}, "", "anyOf"),
        ({"$schema": "https://example.com/dialect"}, "/$schema", "$schema"),
        ({"minimum": "3"}, "", "minimum"),
        ({"items": [{}], "$schema": "https://json-schema.org/draft/2020-12/schema"}, "", "items"),
    ],
)
def test_refusals_name_pointer_and_keyword(schema, pointer, keyword, byte_tokens):
    with pytest.raises(GrammarError) as caught:
        compile(json_schema_spec(schema), byte_tokens)
    assert (caught.value.pointer, caught.value.keyword) == (pointer, keyword), caught.value
    assert caught.value.param == "json_schema"


def test_every_keyword_of_the_schema_is_in_the_ledger(byte_tokens):
    schema = {
        "type": "object",
        "description": "not a rule",
        "properties": {"a": {"type": "string", "format": "hostname", "x-mine": 1}, "b": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"b": {"type": "array", "uniqueItems": True}},
    }
    rows = {(e.pointer, e.keyword): e.standing for e in compile(json_schema_spec(schema), byte_tokens).ledger}
    assert set(rows) == {
        ("", "type"), ("", "properties"), ("", "required"), ("", "additionalProperties"), ("/properties/a", "type"), ("/properties/a", "format"),
        ("/properties/a", "x-mine"), ("/properties/b", "$ref"), ("/$defs/b", "type"), ("/$defs/b", "uniqueItems"),
    }
    assert {key for key, standing in rows.items() if standing is Standing.CHECKED} == {("/properties/a", "format"), ("/$defs/b", "uniqueItems")}


def test_a_name_has_one_spelling_in_an_open_object(byte_tokens):
    """llguidance alone takes an escaped "a" for another name, and lets it past the schema of "a"."""
    cursor = compile(json_schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}}), byte_tokens).cursor()
    assert not all(map(cursor.advance, b'{"\\u0061": "x"}'))


def test_schemas_that_split_in_too_many_ways_are_relaxed_not_stuck(byte_tokens):
    product = {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(20)]}
    compiled = compile(json_schema_spec(product), byte_tokens)
    assert compiled.checked
    assert compile(json_schema_spec({"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(30)}}), byte_tokens).checked
