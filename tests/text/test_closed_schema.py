"""Schemas of tools' parameters and of typed answers: closed where nothing is lost by it."""

from __future__ import annotations

import jsonschema

from agentrt.text.closed_schema import closed


def test_a_closed_schema_takes_less_and_never_more():
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"at": point, "more": {"type": "array", "items": point}, "free": {"type": "object"}, "any": {**point, "additionalProperties": True}},
        "$defs": {"joined": {"allOf": [point, {"properties": {"y": {}}}], "properties": {"z": {}}}},
    }
    shut = closed(schema)
    assert schema["properties"]["at"] == point  # the caller's own is left alone
    for document, allowed in (
        ({"at": {"x": 1}}, True),
        ({"at": {"x": 1, "y": 2}}, False),
        ({"more": [{"x": 1, "z": 1}]}, False),
        ({"free": {"q": 1}, "any": {"q": 1}}, True),
        ({"else": 1}, False),
    ):
        assert jsonschema.Draft202012Validator(shut).is_valid(document) == allowed, document
    assert "additionalProperties" not in shut["$defs"]["joined"]
