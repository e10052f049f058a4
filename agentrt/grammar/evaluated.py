"""Which names of an object a schema evaluates, so that `unevaluatedProperties` can become `additionalProperties`.

It collects through everything that speaks about the same object (allOf, $ref, anyOf, if...). Where that depends on the
document it says so, and the names are then those that may be evaluated, in some document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrt.grammar.references import Scope


@dataclass
class Evaluated:
    """The names.

    Attributes:
        names: Names of properties.
        patterns: ECMA patterns of names.
        everything: All names are, whatever the document.
        maybe_everything: All names may be.
        depends: Which names are evaluated depends on the document.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    everything: bool = False
    maybe_everything: bool = False
    depends: bool = False


_SOMETIMES = ("anyOf", "oneOf")


def evaluated(schema: dict[str, Any], scope: Scope) -> Evaluated:
    """Collects what `schema` evaluates, its own `unevaluatedProperties` apart; raises GrammarError as lookups do."""
    found = Evaluated()
    _collect(found, schema, scope, sure=True, own=True, seen=set())
    return found


def _collect(found: Evaluated, schema: Any, scope: Scope, *, sure: bool, own: bool, seen: set[tuple[int, bool]]) -> None:
    if not isinstance(schema, dict) or (id(schema), sure) in seen:
        return
    seen.add((id(schema), sure))
    scope = scope.into(schema)
    _collect_plain(found, schema, sure, own)
    for part, certain in _parts(schema):
        if not certain:
            found.depends = True
        _collect(found, part, scope, sure=sure and certain, own=False, seen=seen)
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema:
            target, inner, _ = scope.look_up(schema[keyword], "", keyword)
            if keyword != "$ref":
                found.depends = found.maybe_everything = True
            _collect(found, target, inner, sure=sure, own=False, seen=seen)


def _collect_plain(found: Evaluated, schema: dict[str, Any], sure: bool, own: bool) -> None:
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    found.names |= dict.fromkeys(names) if isinstance(names, dict) else {}
    found.patterns |= dict.fromkeys(patterns) if isinstance(patterns, dict) else {}
    rest = [schema[k] for k in ("additionalProperties", *(() if own else ("unevaluatedProperties",))) if k in schema]
    if any(value is not False for value in rest):
        found.maybe_everything = True
        found.everything |= sure
        found.depends |= not sure


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Schemas about the same object, and whether they always hold."""
    for part in schema.get("allOf", ()):
        yield part, True
    for keyword in _SOMETIMES:
        for part in schema.get(keyword, ()):
            yield part, False
    for keyword in ("if", "then", "else"):
        if "if" in schema and keyword in schema:
            yield schema[keyword], False
    dependent = schema.get("dependentSchemas")
    for part in dependent.values() if isinstance(dependent, dict) else ():
        yield part, False
