"""Schemas made to be got wrong: keywords of other drafts, numbers at the engine's edges, malformed parts, and small texts that ask for endless work."""

import json
import subprocess
import sys
import time

import pytest

import agentrt.grammar as grammar
from agentrt.errors import GrammarError
from agentrt.grammar import automaton_store, regex_fsm, verify
from agentrt.grammar.acceptance import accepts, walks
from agentrt.grammar.verify import verifier_of

DRAFT4, DRAFT7 = ({"$schema": f"http://json-schema.org/draft-0{n}/schema#"} for n in (4, 7))
DRAFT2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}

#: Schema, documents that satisfy it, and documents that do not.
CASES = {
    "const is not of draft 4": (DRAFT4 | {"const": 1}, [1, 2, "x"], []),
    "if is not of draft 4": (DRAFT4 | {"if": {"type": "string"}, "then": False}, ["a"], []),
    "the opposite of what is not of draft 4": (DRAFT4 | {"not": {"const": 1}}, [], [2]),
    "prefixItems is not of draft 7": (DRAFT7 | {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [["a", "b"]], [[1]]),
    "unevaluatedProperties is not of draft 7": (DRAFT7 | {"properties": {"a": {}}, "unevaluatedProperties": False}, [{"b": 1}], []),
    "dependentRequired is not of draft 7": (DRAFT7 | {"dependentRequired": {"a": ["b"]}}, [{"a": 1}], []),
    "minContains is not of draft 7": (DRAFT7 | {"contains": {"type": "string"}, "minContains": 0}, [["a"]], [[1]]),
    "beside $ref in draft 7": (DRAFT7 | {"$ref": "#/definitions/a", "minimum": 2, "definitions": {"a": {"type": "integer"}}}, [1], ["a"]),
    "dependencies in 2020-12": ({"dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    "flags of draft 4": (DRAFT4 | {"type": "number", "maximum": 3, "exclusiveMaximum": True}, [2.5], [3]),
    "additionalItems without items": (DRAFT2019 | {"additionalItems": {}, "unevaluatedItems": False}, [[]], [[1]]),
    "items and prefixItems apart": ({"type": "array", "items": {"type": "integer"}, "allOf": [{"prefixItems": [{"enum": [1, "x"]}]}]}, [[1, 2]], [["x"], ["x", 1]]),
    "above 0 and below 1": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.1, 0.5, 0.0001], [0, 0.6]),
    "above 0 and below 1, apart": ({"type": "number", "exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, [0.1, 0.5], [0, 0.6]),
    "below -1 and above -2": ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, [-1.2], [-1, -1.6]),
    "cents": ({"type": "number", "minimum": 0, "multipleOf": 0.01}, [0.5, 0.55, 1, 12.3], [0.555, -0.5]),
    "quarters": ({"type": "number", "minimum": -1, "multipleOf": 0.25}, [-0.5, -0.75, 1], [-1.25, 0.3]),
    "tenths below 99.99": ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 99.99, "multipleOf": 0.1}, [0.6, 99.9, 99], [0.5, 100, 0.55]),
    "multiples of two": ({"type": "number", "allOf": [{"multipleOf": 0.3}, {"multipleOf": 0.2}]}, [0.6, 1.2], [0.3, 0.2]),
    "a zero at the end": ({"type": "number", "minimum": 0, "maximum": 0.99}, [0.9, 0.99, 0], [1, 0.999]),
    "beyond doubles": ({"const": 2**53 + 1}, [2**53 + 1], [2**53]),
    "arrangements beyond doubles": ({"type": "array", "items": {"enum": [2**53 + 1]}, "uniqueItems": True}, [[], [2**53 + 1]], [[2**53], [2**53 + 1] * 2]),
    "bounds beyond doubles": ({"type": "integer", "exclusiveMaximum": -(2**53)}, [-(2**53) - 2], [-(2**53)]),
    "bounds of any size": ({"type": "integer", "maximum": 10**400, "minimum": -(10**400)}, [0], ["a"]),
}


@pytest.mark.parametrize("name", CASES)
def test_hard_schemas_are_judged_rightly(name, byte_tokens):
    schema, good, bad = CASES[name]
    compiled = grammar.compile(grammar.json_schema_spec(schema), byte_tokens)
    for document in good:
        assert accepts(compiled, document, schema), document
    for document in bad:
        assert not accepts(compiled, document, schema), document
        assert compiled.checked or not walks(compiled, document, schema), ("the ledger says ENFORCED", document)


def test_the_last_whole_number_that_doubles_tell_apart_is_enforced(byte_tokens):
    compiled = grammar.compile(grammar.json_schema_spec({"const": 2**53}), byte_tokens)
    assert not compiled.checked
    assert [walks(compiled, value, {}) for value in (2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2)] == [False, True, False, False]


def test_an_automaton_is_not_made_of_schemas_that_cannot_be_put_together(byte_tokens):
    apart = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "allOf": [{"prefixItems": [{"enum": [1, "x"]}]}]}
    nested = {"type": ["string", "integer"], "allOf": [{"allOf": [{"type": ["integer"]}]}]}
    for schema in (apart, nested):
        assert grammar.compile(grammar.json_schema_spec(schema, engine="fsm"), byte_tokens).engine == "llguidance"


MALFORMED = [
    ({"required": True, "minProperties": 1, "properties": 5}, "properties"),
    ({"minProperties": 1, "required": 3}, "required"),
    ({"not": {"required": [1]}}, "required"),
    ({"not": {"allOf": None}}, "allOf"),
    ({"unevaluatedProperties": False, "allOf": [{"oneOf": 1.5}]}, "oneOf"),
    ({"$id": 1}, "$id"),
    ({"$ref": "#/$defs/q", "$defs": None}, "$defs"),
    (DRAFT4 | {"minimum": 1, "exclusiveMinimum": 2}, "exclusiveMinimum"),
]


@pytest.mark.parametrize(("schema", "keyword"), MALFORMED)
def test_what_is_malformed_is_refused_by_its_keyword(schema, keyword, byte_tokens):
    with pytest.raises(GrammarError) as caught:
        grammar.compile(grammar.json_schema_spec(schema), byte_tokens)
    assert caught.value.keyword == keyword, caught.value


def doubling(levels, keyword, **beside):
    """A few hundred bytes of references that stand for 2 ** levels of them."""
    parts = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {**beside, "$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


ENDLESS = {
    "unevaluated": doubling(40, "allOf", unevaluatedProperties=False),
    "exclusive": doubling(40, "oneOf"),
    "opposite": {"not": {"allOf": [{"$ref": "#/$defs/d0"}]}, "$defs": doubling(40, "allOf")["$defs"]},
    "counted": {"type": "object", "properties": {f"p{n}": {} for n in range(60)}, "additionalProperties": False, "minProperties": 30},
    "values": {"enum": [{"a": n, "b": [n]} for n in range(20_000)]},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_small_schema_cannot_ask_for_endless_work(name, byte_tokens):
    spec = grammar.json_schema_spec(ENDLESS[name])
    if name == "values":
        with pytest.raises(GrammarError, match="takes too long to read"):
            grammar.compile(spec, byte_tokens)
    else:
        assert grammar.compile(spec, byte_tokens).cursor().allowed().any()


@pytest.mark.slow
def test_a_long_chain_of_references_does_not_end_the_process():
    """llguidance recurses; on a plain stack a chain of 1,500 is a segmentation fault."""
    program = """
from agentrt.grammar import compile, json_schema_spec
from agentrt.grammar.check import byte_tokenizer
link = lambda n: {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{n}"}}, "required": ["n"], "additionalProperties": False}
chain = {"$ref": "#/$defs/d0", "$defs": {**{f"d{n}": link(n + 1) for n in range(1500)}, "d1500": {"type": "integer"}}}
print(len(compile(json_schema_spec(chain), byte_tokenizer()).cursor().forced()))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout.strip() == str(1500 * len('{"n": ')), told.stderr[-500:]


SLOW_CHECKS = {
    "pattern": ({"type": "string", "pattern": "^(?=(a|a)*$)(?=(a|a|b)*$)(?=((a|a)(a|a))*b)"}, "a" * 60),
    "names": ({"patternProperties": {"^(a|aa)*(a|aaa)*$": {}}, "additionalProperties": {"type": "integer"}, "minProperties": 1}, {"a" * 200 + "!": 1}),
    "unevaluated names": ({"patternProperties": {"^((a|aa)*|b)*c$": {}}, "unevaluatedProperties": {"type": "integer"}}, {"a" * 200 + "!": 1}),
    "references": (doubling(40, "allOf"), {"a": 1}),
}


@pytest.mark.parametrize("name", SLOW_CHECKS)
def test_a_final_check_has_an_end(name, monkeypatch):
    monkeypatch.setattr(verify, "MAX_SECONDS", 0.1)
    schema, document = SLOW_CHECKS[name]
    begun = time.process_time()
    verifier_of(schema).verdict(json.dumps(document))
    assert time.process_time() - begun < 5


def test_unique_items_are_told_apart_as_json_does_and_soon():
    judge = verifier_of({"uniqueItems": True})
    assert judge.violations([1, True, "1", [1], [True], {"a": 1}, {"a": True}, 0, False, None, ""]) == []
    assert judge.violations([{"a": i} for i in range(20_000)]) == []
    for pair in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], [[False], [False]]):
        assert judge.violations(pair) != []


def test_numbers_are_judged_as_they_are_written():
    """As doubles, the first is 1 and the second no multiple."""
    assert verifier_of({"exclusiveMaximum": 1}).verdict("0.99999999999999999999") == []
    assert verifier_of({"multipleOf": 1.5}).verdict("5684956397906818736078825755.5") == []
    assert verifier_of({"multipleOf": 1.5}).verdict("1e999999999") != []
    assert verifier_of({"maximum": 1}).verdict("1e999999999") != []


def test_a_damaged_automaton_on_disk_counts_as_absent(tmp_path):
    store, spec = automaton_store.AutomatonStore(tmp_path), grammar.json_schema_spec({"const": "a"})
    path = store.save(spec, regex_fsm.automaton_of_choices([b'"a"']))
    whole = path.read_bytes()
    assert store.load(spec) is not None
    for damaged in (whole[: len(whole) // 2], b"PK" + whole[2:40], whole[:60] + bytes(40) + whole[100:], b""):
        path.write_bytes(damaged)
        assert store.load(spec) is None
