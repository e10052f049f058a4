"""Typed answers: whole values or an error, asked for again where that helps."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, field_validator

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.lang.expressions import assistant, gen, gen_int, user
from agentrt.lang.program import function
from agentrt.lang.values import CutValueError, InvalidValueError, value_type


class City(BaseModel):
    name: str
    people: int

    @field_validator("people")
    @classmethod
    def some_people(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("a city has people")
        return value


@function
def typed(s, **kinds):
    s += "Q"
    for name, kind in kinds.items():
        s += gen(name, type=kind)
    return {name: s[name] for name in kinds}


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [
        (int, "42", 42),
        (float, "-2.50", -2.5),
        (bool, "true", True),
        (bool, "false", False),
        (str, '"é \\"x\\" 🙂"', 'é "x" 🙂'),
        (City, '{"name": "Rome", "people": 3}', City(name="Rome", people=3)),
        (list[int], "[1, 2]", [1, 2]),
        (Literal["a", "b"], '"b"', "b"),
    ],
)
def test_typed_results_are_python_values(kind, said, value):
    got = typed.run(x=kind, backend=ScriptedBackend(said)).ret_value["x"]
    assert got == value
    assert type(got) is type(value)


def test_gen_int_is_an_int_and_dtype_int_too():
    @function
    def program(s):
        s += "Q" + gen_int("a") + gen("b", dtype=int) + gen("c", dtype="int")
        return s["a"], s["b"], s["c"]

    assert program.run(backend=ScriptedBackend("-7")).ret_value == (-7, -7, -7)


def test_partial_objects_stream_and_the_final_value_is_validated():
    @function
    def program(s):
        s += "Q" + gen("city", type=City)

    state = program.run(backend=ScriptedBackend('{"name": "Rome", "people": 3}'), stream=True)
    partial = list(state.partial_iter("city"))
    assert partial[0] == {}
    assert {"name": "Ro"} in partial
    assert partial[-1] == {"name": "Rome", "people": 3}
    assert state["city"] == City(name="Rome", people=3)


def test_typed_gens_may_use_the_remaining_context_not_128_tokens():
    backend = ScriptedBackend("42")

    @function
    def program(s):
        s += "Q" + gen("a", dtype=int) + gen("b") + gen("c", type=int, max_tokens=5)

    program.run(backend=backend)
    assert [r.sampling.max_tokens for r in backend.requests] == [None, 128, 5]


def test_a_typed_value_that_was_cut_raises_with_the_partial_attached():
    @function
    def program(s, kind, limit):
        s += "Q" + gen("a", type=kind, max_tokens=limit)

    with pytest.raises(CutValueError, match="max_tokens") as caught:
        program.run(City, 12, backend=ScriptedBackend('{"name": "Rome", "people": 3}'))
    assert caught.value.text.startswith('{"name": "R')
    assert caught.value.partial["name"].startswith("R")
    with pytest.raises(CutValueError):
        program.run(int, 2, backend=ScriptedBackend("12345"))


def test_re_ask_feeds_the_validators_message_back_on_the_same_prefix():
    answers = iter(['{"name": "Rome", "people": 0}', '{"name": "Rome", "people": 3}'])
    backend = ScriptedBackend(lambda t, r: next(answers), inline=True)

    @function
    def program(s):
        s += user("Which city?")
        s += assistant(gen("city", type=City, retries=2))

    state = program.run(backend=backend)
    assert state["city"].people == 3
    first, second = backend.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "a city has people" in backend.tokenizer.decode(second.prompt_ids)
    assert [m["role"] for m in state.messages()] == ["user", "assistant", "user", "assistant"]
    assert "".join(state.text_iter("city")) == '{"name": "Rome", "people": 3}'


def test_a_value_that_was_cut_is_asked_for_again_while_the_context_has_room():
    whole, long = '{"name": "Rome", "people": 3}', '{"name": "Rome, the city of'
    answers = iter([long, whole, long])

    @function
    def program(s):
        s += "Q" + gen("city", type=City, retries=1, max_tokens=40)

    backend = ScriptedBackend(lambda t, r: Answer(said := next(answers), ends=said == whole), inline=True)
    assert program.run(backend=backend)["city"].people == 3
    assert "cut after" in backend.tokenizer.decode(backend.requests[1].prompt_ids)
    small = ScriptedBackend(lambda t, r: Answer(next(answers), ends=False), inline=True, max_context=64)
    with pytest.raises(CutValueError, match="max_length"):
        program.run(backend=small)
    assert len(small.requests) == 1


def test_re_ask_gives_up_after_its_retries():
    @function
    def program(s):
        s += "Q" + gen("city", type=City, retries=2)

    backend = ScriptedBackend('{"name": "Rome", "people": 0}')
    with pytest.raises(InvalidValueError, match="a city has people"):
        program.run(backend=backend)
    assert len(backend.requests) == 3


def test_a_types_own_fields_are_written_and_no_others_unless_it_allows_them():
    class Inner(BaseModel):
        properties: int
        type: str

    class Outer(BaseModel):
        inner: list[Inner]
        table: dict[str, Inner]
        either: Inner | None = None

    class Open(BaseModel, extra="allow"):
        inner: Inner

    closed, opened = (value_type(kind).constraint["json_schema"] for kind in (Outer, Open))
    assert closed["additionalProperties"] is closed["$defs"]["Inner"]["additionalProperties"] is False
    assert closed["properties"]["table"]["additionalProperties"] == {"$ref": "#/$defs/Inner"}
    assert "additionalProperties" not in closed["$defs"]["Inner"]["properties"]
    assert opened["additionalProperties"] is True
    assert opened["$defs"]["Inner"]["additionalProperties"] is False
