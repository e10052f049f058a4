"""The final check: whether a finished text satisfies its whole schema, whatever the mask could enforce.

jsonschema judges, with what it lacks put in: one set of format checkers for all drafts, patterns read as ECMA-262 wants
them, numbers taken as they are written, a bound on its time, and a registry that never fetches anything. It never raises on a
document: what it cannot validate is a violation.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import jsonschema
import jsonschema.validators
import regex

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.dialect import dialect_of
from agentrt.grammar.formats import FORMATS
from agentrt.grammar.references import offline_registry

Verdict = Callable[[str], list[str]]
#: One keyword's judge, in jsonschema's form: (validator, what the schema says, value, schema).
Rule = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError]]
#: Violations told, at most.
MAX_TOLD = 10
#: Seconds that one check may take: patterns and references that multiply could ask for any time.
MAX_SECONDS = 2.0
#: Characters of a name on which a pattern that doubles its work with each is still soon done.
_LONG_NAME = 24


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

    @cached_property
    def _name_patterns(self) -> tuple[str, ...]:
        return tuple(_names_of_patterns(self._validator.schema))

    def violations(self, value: Any) -> list[str]:
        """What a value violates, one line each, beginning with the pointer of the place."""
        try:
            validator, found = self._validator, []
            _clock.ends, _clock.name_patterns = time.monotonic() + MAX_SECONDS, self._name_patterns
            for error in validator.iter_errors(value):
                found.append(f"{_pointer(error)}: {error.message[:200]} ({error.validator})")
                if len(found) >= MAX_TOLD:
                    break
        except RecursionError:
            return ["/: the document nests too deeply to be checked"]
        except TimeoutError:
            return [f"/: the document cannot be checked within {MAX_SECONDS:g} s"]
        except Exception as error:  # a judge that fails must not let the document pass
            return [f"/: the document cannot be checked: {type(error).__name__}: {str(error)[:200]}"]
        return found

    def verdict(self, text: str) -> list[str]:
        """What a text violates; text that is not JSON violates that."""
        try:
            value = json.loads(text, parse_float=Written, parse_constant=_no_constant)
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


class Written(float):
    """A number that remembers how the text wrote it; as a double it may be another."""

    text: str

    def __new__(cls, text: str) -> Written:
        """A number from JSON text."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def _exact(number: float) -> Decimal:
    return Decimal(number.text if isinstance(number, Written) else repr(number))


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and not _divides(step, value):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {step!r}")


def _divides(step: float, value: float) -> bool:
    """Whether `value` is a whole number of steps, both taken as the decimals that they are written as."""
    if isinstance(step, int) and isinstance(value, int):
        return value % step == 0
    exact = _exact(value)
    if abs(exact.adjusted()) > 1_000:
        return False  # beyond what a double holds, and any work on it could be without end
    return (Fraction(exact) / Fraction(_exact(step))).denominator == 1


def _bound(holds: Callable[[Any, Any], bool], words: str) -> Rule:
    """A bound, between numbers as they are written."""

    def rule(validator: Any, bound: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        if validator.is_type(value, "number") and not holds(_exact(value), _exact(bound)):
            yield jsonschema.ValidationError(f"{value!r} is {words} {bound!r}")

    return rule


_BOUNDS: dict[str, Rule] = {
    "minimum": _bound(operator.ge, "less than"),
    "maximum": _bound(operator.le, "more than"),
    "exclusiveMinimum": _bound(operator.gt, "not more than"),
    "exclusiveMaximum": _bound(operator.lt, "not less than"),
}


def _unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """By what the items are, where jsonschema compares each with each other."""
    if wanted and validator.is_type(value, "array") and len(set(map(_key, value))) < len(value):
        yield jsonschema.ValidationError("its items are not unique")


def _key(value: Any) -> Hashable:
    """Equal for what JSON Schema takes as equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return isinstance(value, bool), value


# ---- patterns: with a bound on their time, since some of them take more than anyone has


def _found(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text; raises TimeoutError when the check's time is up."""
    left = _clock.ends - time.monotonic()
    return regex.search(pattern, text, timeout=max(left, 0.001)) is not None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "string") and not _found(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {schema.get(_AS_WRITTEN, pattern)!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "object"):
        for pattern, part in patterns.items():
            for name in filter(partial(_found, pattern), value):
                yield from validator.descend(value[name], part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if not validator.is_type(value, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in value:
        if name in named or any(_found(pattern, name) for pattern in patterns):
            continue
        if rest is False:
            yield jsonschema.ValidationError(f"{name!r} is a property that the schema does not have")
        else:
            yield from validator.descend(value[name], rest, path=name)


def _unevaluated_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """The library's rule; it looks for patterns without a bound on time, so long names do not go near repeats of groups."""
    longest = max(map(len, value), default=0) if validator.is_type(value, "object") else 0
    if longest > _LONG_NAME and any(sign in pattern for pattern in _clock.name_patterns for sign in (")*", ")+", "){")):
        raise TimeoutError
    yield from jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"](validator, rest, value, schema) or ()


_OWN: dict[str, Rule] = {
    "multipleOf": _multiple_of,
    "uniqueItems": _unique_items,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
}


class _Clock(threading.local):
    """When the check that runs in this thread must be over, and every pattern of names in its schema."""

    ends: float = 0.0
    name_patterns: tuple[str, ...] = ()


_clock = _Clock()


def _timed(rule: Rule) -> Rule:
    def timed(validator: Any, said: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        if time.monotonic() > _clock.ends:
            raise TimeoutError
        yield from rule(validator, said, value, schema) or ()

    return timed


@lru_cache(maxsize=8)
def _extended(kind: Any) -> Any:
    """The library's class for a draft, with rules of our own, each with an eye on the clock."""
    rules = dict(kind.VALIDATORS)
    bounds = {} if "const" not in rules else _BOUNDS  # draft 4's exclusive bounds are flags
    rules |= {name: rule for name, rule in {**_OWN, **bounds}.items() if name in rules}
    rules["dependencies"] = jsonschema.Draft7Validator.VALIDATORS["dependencies"]
    return jsonschema.validators.extend(kind, {name: _timed(rule) for name, rule in rules.items()})


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


def _names_of_patterns(schema: Any) -> Iterator[str]:
    """Every pattern of names in a translated schema."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            named = node.get("patternProperties")
            yield from named if isinstance(named, dict) else ()
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
