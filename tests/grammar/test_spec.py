"""Python values become specs at the door, and text becomes values of the type that was asked for."""

import dataclasses
import enum
import json
import pickle
from typing import Annotated, Literal, TypedDict

import pydantic
import pytest

from agentrt.errors import ConstraintError, GrammarError
from agentrt.grammar import json_schema_spec, lark_spec, parse_value, regex_spec, spec_from, structural_spec, tools_spec
from agentrt.grammar.acceptance import accepts
from agentrt.grammar.compiler import compile
from agentrt.request import SamplingParams


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(pydantic.BaseModel):
    city: str
    unit: Unit = Unit.C
    tags: list[Annotated[str, pydantic.Field(max_length=4)]] = []
    parent: "Place | None" = None


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Row(TypedDict):
    kind: Literal["a", "b"]
    n: int


CASES = [
    (Place, {"city": "Rome", "unit": "fahrenheit", "tags": ["a"], "parent": {"city": "x"}}, {"city": 1}),
    (Point, {"x": 1, "y": 2.5}, {"y": 1}),
    (Row, {"kind": "b", "n": 3}, {"kind": "c", "n": 3}),
    (list[Row], [{"kind": "a", "n": 1}], [{"kind": "a"}]),
    (list[int], [1, 2], ["a"]),
    (dict[str, bool], {"k": True}, {"k": "x"}),
    (int | None, None, "x"),
    (tuple[int, str], [1, "a"], [1]),
]


@pytest.mark.parametrize(("kind", "good", "bad"), CASES, ids=range(len(CASES)))
def test_types_constrain_and_parse_back(kind, good, bad, byte_tokens):
    spec = spec_from(SamplingParams(json_schema=kind))
    assert pickle.loads(pickle.dumps(spec)) == spec
    compiled = compile(spec, byte_tokens)
    schema = json.loads(spec.source)
    assert accepts(compiled, good, schema)
    assert not accepts(compiled, bad, schema)
    parse_value(kind, json.dumps(good))
    with pytest.raises(ConstraintError):
        parse_value(kind, json.dumps(bad))
    with pytest.raises(ConstraintError):
        parse_value(kind, '{"cut')


def test_values_come_back_as_instances():
    assert parse_value(Place, '{"city": "Rome", "unit": "celsius"}') == Place(city="Rome", unit=Unit.C)
    assert parse_value(Point, '{"x": 1}') == Point(1)
    assert parse_value({"type": "object"}, '{"x": 1}') == {"x": 1}


def test_the_same_constraint_said_in_two_ways_is_one_spec():
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    assert json_schema_spec(schema) == json_schema_spec(json.dumps(schema))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("json_schema", "", "empty string"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[]", "an object or a boolean"),
        ("json_schema", {"enum": [float("nan")]}, "JSON cannot"),
        ("json_schema", lambda: None, "is a function"),
        ("json_schema", object(), "not a type"),
        ("regex", "", "non-empty"),
        ("choices", [], "at least one"),
        ("choices", "yes", "list"),
        ("choices", [1], "string"),
        ("ebnf", "root ::= 'a'", "GBNF"),
        ("tools", [{"type": "function"}], "no name"),
        ("tools", [{"name": "a"}, {"name": "a"}], "twice"),
        ("tools", [{"name": "a", "parameters": 3}], "JSON Schema"),
    ],
)
def test_what_is_wrong_on_its_face_is_refused_at_the_door(field, value, words):
    with pytest.raises(GrammarError, match=words) as caught:
        spec_from(SamplingParams(**{field: value}))
    assert caught.value.param == field


def test_no_constraint_is_none_and_choices_of_tools_are_checked():
    assert spec_from(SamplingParams()) is None
    assert tools_spec([{"name": "a"}], tool_choice="none") is None
    assert spec_from(SamplingParams(tools=[])) is None
    with pytest.raises(GrammarError, match="one of"):
        tools_spec([{"name": "a"}], tool_choice="b")
    assert spec_from(SamplingParams(regex="a+")) == regex_spec("a+")
    assert spec_from(SamplingParams(ebnf='start: "a"')) == lark_spec('start: "a"')
    gbnf = spec_from(SamplingParams(ebnf='root ::= "a" | city\ncity ::= [A-Z]+'))
    assert gbnf is not None
    assert gbnf.kind == "lark"
    assert "::=" not in gbnf.source
    tag = {"begin": "<a>", "end": "</a>", "json_schema": list[int]}
    assert '"type": "array"' in structural_spec([tag]).source
