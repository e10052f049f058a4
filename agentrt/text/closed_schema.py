"""Closes schemas of tools' parameters and of typed answers: what a schema does not name is no argument, and no field.

A schema that says nothing of further properties allows any, and a small model then invents some; a function that is
called with them fails, and a type's validator drops them. A closed schema accepts only documents that the open one accepts too. Invariant: where an object
is put together from parts (allOf, $ref, if...), it is left as it is, since closing one part would forbid the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_JOINS = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
#: Keywords whose value is a schema, a list of schemas, or a mapping of names to schemas.
_HOLDS_SCHEMA = frozenset({"items", "additionalProperties", "contains", "unevaluatedItems"})
_HOLDS_LIST = frozenset({"prefixItems", "anyOf", "oneOf"})
_HOLDS_MAPPING = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def closed(schema: Any) -> Any:
    """A copy in which every plain object takes the properties that it names, and no others."""
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: _closed_below(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and not _JOINS & set(schema):
        copy["additionalProperties"] = False
    return copy


def _closed_below(key: str, value: Any) -> Any:
    if key in _HOLDS_SCHEMA:
        return closed(value)
    if key in _HOLDS_LIST and isinstance(value, list):
        return [closed(each) for each in value]
    if key in _HOLDS_MAPPING and isinstance(value, Mapping):
        return {name: closed(each) for name, each in value.items()}
    return value
