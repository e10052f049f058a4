"""The backends that programs are tested on: the scripted one, the engine with a tiny model, and with the default model where it is at hand."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import ModelError


@pytest.fixture
def scripted():
    """Answers "ok"."""
    backend = ScriptedBackend("ok")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def engine():
    """The engine with the default model, float32."""
    from agentrt import Engine

    try:
        made = Engine(dtype="float32")
    except ModelError as error:
        pytest.skip(f"the default model is not at hand: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiny(tiny_model):
    with sgl.Engine(str(tiny_model), process=False, dtype="float32") as engine:
        yield engine


def scripted_answer(text, request):
    """An answer that fits what the request asks for."""
    sampling = request.sampling
    spec = sampling.grammar
    if spec is not None and spec.kind == "tools":
        return '<tool_call>\n{"name": "double", "arguments": {"number": 7}}\n</tool_call>'
    pattern = spec.source if spec is not None and spec.kind == "regex" else sampling.regex
    if pattern is not None:
        return next(text for text in ("7", "1.5", "true", '"x"') if re.fullmatch(pattern, text))
    if sampling.json_schema is not None:
        return _fitting(sampling.json_schema)
    return f"over {sampling.seed} lazy dogs "


def _fitting(schema):
    for text in ('{"name": "x", "size": 7}', "7", "1.5", "true", '"x"', '"red"', "[1, 2]"):
        if _fits(text, schema):
            return text
    raise AssertionError(schema)


def _fits(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema)
    except jsonschema.ValidationError:
        return False
    return True


@pytest.fixture(params=["scripted", "engine"])
def backend(request):
    return request.getfixturevalue("tiny") if request.param == "engine" else ScriptedBackend(scripted_answer)
