"""The final check: whether a finished text satisfies its whole schema, whatever the mask could enforce.

jsonschema judges, with what it lacks put in: one set of format checkers for all drafts, patterns read as ECMA-262 wants
them, exact `multipleOf`, and a registry that never fetches anything. It never raises on a document: what it cannot
validate is a violation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, cast

import jsonschema
import jsonschema.validators

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.dialect import dialect_of
from agentrt.grammar.formats import FORMATS
from agentrt.grammar.references import offline_registry

Verdict = Callable[[str], list[str]]
#: Violations told, at most.
MAX_TOLD = 10


class Verifier:
    """One schema's judge. Thread-safe."""

    def __init__(self, schema: Any, *, formats: bool = True) -> None:
        self._schema = schema
        self._formats = formats

    @cached_property
    def _validator(self) -> Any:
        """Made on first use: compiling a grammar needs no judge."""
        kind = _extended(cast(Hashable, dialect_of(self._schema).validator))
        checker = _CHECKER if self._formats else None
        return kind(_translated(self._schema), registry=offline_registry(), format_checker=checker)

    def violations(self, value: Any) -> list[str]:
        """What a value violates, one line each, beginning with the pointer of the place."""
        try:
            found = []
            for error in self._validator.iter_errors(value):
                found.append(f"{_pointer(error)}: {error.message[:200]} ({error.validator})")
                if len(found) >= MAX_TOLD:
                    break
        except RecursionError:
            return ["/: the document nests too deeply to be checked"]
        except Exception as error:  # a judge that fails must not let the document pass
            return [f"/: the document cannot be checked: {type(error).__name__}: {str(error)[:200]}"]
        return found

    def verdict(self, text: str) -> list[str]:
        """What a text violates; text that is not JSON violates that."""
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return [f"/: not JSON: {error}"]
        return self.violations(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def verifier_of(schema: Any, *, formats: bool = True) -> Verifier:
    """The judge of a schema."""
    return Verifier(schema, formats=formats)


def _pointer(error: jsonschema.ValidationError) -> str:
    return "/" + "/".join(map(str, error.absolute_path))


# ---- what jsonschema lacks

_CHECKER = jsonschema.FormatChecker(formats=())
for _name, _format in FORMATS.items():

    def _accepts(value: object, accepts: Callable[[str], bool] = _format.accepts) -> bool:
        return not isinstance(value, str) or accepts(value)

    _CHECKER.checkers = {**_CHECKER.checkers, _name: (_accepts, ())}


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and not _divides(step, value):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {step!r}")


def _divides(step: float, value: float) -> bool:
    """Whether `value` is a whole number of steps, both taken as the decimals that they are written as."""
    if isinstance(step, int) and isinstance(value, int):
        return value % step == 0
    return (Fraction(repr(value)) / Fraction(repr(step))).denominator == 1


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "string") and not re.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {schema.get(_AS_WRITTEN, pattern)!r}")


@lru_cache(maxsize=8)
def _extended(kind: Any) -> Any:
    return jsonschema.validators.extend(kind, {"multipleOf": _multiple_of, "pattern": _pattern})


# ---- patterns


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LITERAL = ("enum", "const", "default", "examples")
#: Beside a translated pattern, the one that the schema's author wrote, for messages.
_AS_WRITTEN = "x-agentrt-pattern"


def _translated(schema: Any) -> Any:
    """The schema with every pattern in Python's notation."""
    if isinstance(schema, list):
        return [_translated(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    translated = {key: _translated_keyword(key, value) for key, value in schema.items()}
    return {**translated, _AS_WRITTEN: schema["pattern"]} if isinstance(schema.get("pattern"), str) else translated


def _translated_keyword(key: str, value: Any) -> Any:
    if key in _LITERAL:
        return value
    if key == "pattern" and isinstance(value, str):
        return _for_python(value)
    if key in _MAPS and isinstance(value, dict):
        names = map(_for_python, value) if key == "patternProperties" else iter(value)
        return {name: _translated(part) for name, part in zip(names, value.values(), strict=True)}
    return _translated(value)


@lru_cache(maxsize=4096)
def _for_python(pattern: str) -> str:
    try:
        return regex_syntax.write(regex_syntax.parse_any(pattern))
    except GrammarError:
        return pattern  # refused when the schema is normalised
