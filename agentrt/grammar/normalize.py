"""Rewrites a JSON Schema into the part of the language that llguidance enforces, and keeps the ledger of what became of each keyword.

Four roads, in this order: a keyword goes over as it is; it is rewritten exactly (`not`, `if`, `oneOf`, dependencies, names); it is
relaxed, alone, and CHECKED when the document is complete; or the schema is refused, with pointer and keyword. The invariant:
what comes out holds wherever the schema does (so nothing right is ever rejected), and where every entry is ENFORCED it
holds nowhere else. Nothing of the input goes over unread, so no keyword is dropped in silence.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jsonschema

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.complement import TYPES, complement, disjoint, type_of
from agentrt.grammar.dialect import dialect_of
from agentrt.grammar.evaluated import Evaluated, evaluated
from agentrt.grammar.formats import FORMATS
from agentrt.grammar.ledger import Entry, Ledger, Standing
from agentrt.grammar.productive import refuse_endless
from agentrt.grammar.references import Scope, escaped
from agentrt.grammar.separators import SEPARATORS, has_control_literal, has_open_object, json_options

#: Whole numbers beyond this are not exact in llguidance, which reads bounds as doubles.
_EXACT = 2**53
#: How deep a schema may nest.
MAX_DEPTH = 200
#: Ways that case splits of one object may take together.
MAX_SPLITS = 64

_IGNORED = frozenset(
    ["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "example", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema", "then", "else", "minContains", "maxContains"]
)


@dataclass(frozen=True)
class Normalized:
    """A schema in llguidance's words.

    Attributes:
        schema: The root.
        definitions: What its references refer to, under "#/$defs/".
        ledger: What became of each keyword.
        spelled: Names in open objects may be spelled in two ways, since control characters must be; so they are CHECKED.
    """

    schema: Any
    definitions: dict[str, Any]
    ledger: Ledger
    spelled: bool = False

    def whole(self) -> dict[str, Any]:
        """One schema that stands alone, with llguidance's options beside it."""
        root = self.schema if isinstance(self.schema, dict) else {"allOf": [self.schema]}
        options = SEPARATORS if self.spelled else json_options([root, self.definitions])
        return {"x-guidance": options, **root, "$defs": self.definitions}


@dataclass(frozen=True)
class Attempt:
    """What compiling an earlier rewriting taught.

    Attributes:
        relaxed: Keywords to relax wherever they stand, because the engine could not take them.
        never: Definitions that nothing satisfies, by name; what refers to them is false.
    """

    relaxed: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def normalize(schema: Any, prefix: str = "", *, attempt: Attempt = Attempt(), formats: bool = True) -> Normalized:
    """Rewrites `schema`.

    Args:
        schema: A JSON Schema, parsed.
        prefix: Put before the names of definitions, so that several schemas can share one `$defs`.
        attempt: What earlier attempts taught.
        formats: `format` is asserted; otherwise it is an annotation.

    Raises:
        GrammarError: The schema is malformed, or cannot be enforced; names pointer and keyword.
    """
    work = _Normalizer(prefix, attempt, formats)
    try:
        root = work.node(schema, Scope.of(schema), "", 0)
        work.finish_definitions()
        work.note_wide_bounds()
        refuse_endless(root, work.definitions, work.origins)
    except RecursionError as error:
        raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels", keyword="") from error
    except GrammarError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _malformed(schema, error) from error
    everything = [root, work.definitions]
    spelled = has_control_literal(everything) and has_open_object(everything)
    if spelled:
        why = "the schema spells control characters out, so names could be spelled in two ways"
        work.ledger.append(Entry("", "additionalProperties", Standing.CHECKED, why))
    return Normalized(root, work.definitions, tuple(work.ledger), spelled)


def _malformed(schema: Any, error: Exception) -> GrammarError:
    """What is wrong with a schema that the rules stumbled over, in the words of its draft's own schema."""
    try:
        dialect_of(schema).validator.check_schema(schema)
    except jsonschema.SchemaError as found:
        path = list(found.absolute_path)
        while path and isinstance(path[-1], int):
            path.pop()  # an item: the keyword is what holds it
        above, keyword = "".join(f"/{escaped(str(part))}" for part in path[:-1]), str(path[-1]) if path else "schema"
        return GrammarError(f"{keyword} at {above or '/'!r} is malformed: {found.message[:200]}", pointer=above, keyword=keyword)
    except Exception:  # a schema that not even that can read
        pass
    return GrammarError(f"the schema is malformed: {type(error).__name__}: {str(error)[:200]}", keyword="schema")


@dataclass
class _Place:
    """One schema object on its way: what it says, and what has been written for it so far."""

    schema: dict[str, Any]
    scope: Scope
    pointer: str
    depth: int
    out: dict[str, Any] = field(default_factory=dict)
    also: list[Any] = field(default_factory=list)  #: schemas that must hold too
    open_names: bool = False  #: names could not all be told apart, so further properties must be free
    joined: bool = False  #: it may speak of the same value as other places do

    def types(self) -> set[str] | None:
        """The types it names itself, or None."""
        named = self.schema.get("type")
        return None if named is None else set(named if isinstance(named, list) else [named])


class _Normalizer:
    def __init__(self, prefix: str, attempt: Attempt, formats: bool) -> None:
        self.prefix = prefix
        self.relaxed = attempt.relaxed
        self.never = attempt.never
        self.formats = formats
        self.definitions: dict[str, Any] = {}
        self.ledger: list[Entry] = []
        self._names: dict[tuple[int, str], str] = {}
        self._pending: list[tuple[str, Any, Scope, str]] = []
        self._in_place: dict[str, set[str]] = {}  #: definition -> definitions that it refers to without a step inward
        self._current = ""
        self._quiet = 0
        self.bounds: list[tuple[_Place, str, int | float]] = []  #: every bound on numbers that was written
        self.origins: dict[str, str] = {}  #: definition -> pointer of what it was made from

    # ---- the ledger

    def note(self, place: _Place, keyword: str, standing: Standing, why: str = "") -> None:
        if not self._quiet:
            self.ledger.append(Entry(place.pointer, keyword, standing, why))

    def enforced(self, place: _Place, keyword: str, why: str = "") -> None:
        self.note(place, keyword, Standing.ENFORCED, why)

    def relax(self, place: _Place, keyword: str, why: str) -> None:
        self.note(place, keyword, Standing.CHECKED, why)

    def reject(self, place: _Place, keyword: str, why: str) -> GrammarError:
        where = f"{keyword} at {place.pointer or '/'!r}" if keyword else f"the schema at {place.pointer or '/'!r}"
        return GrammarError(f"{where} {why}", pointer=place.pointer, keyword=keyword)

    # ---- nodes

    def node(self, schema: Any, scope: Scope, pointer: str, depth: int, inward: bool = True) -> Any:
        """Rewrites one schema. `inward`: it is about a part of the document, not about all of it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"the schema at {pointer or '/'!r} is {str(schema)[:60]!r}; it must be an object or a boolean", pointer=pointer)
        scope.spend(10, pointer)
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels", pointer=pointer)
        current, self._current = self._current, "" if inward else self._current
        place = _Place(schema, scope.into(schema), pointer, depth, joined=not inward or any(key in schema for key in _IN_PLACE))
        alone = scope.dialect.ref_alone and "$ref" in schema
        for keyword, value in schema.items():
            if keyword in _IGNORED:
                continue
            if alone and keyword != "$ref":
                self.enforced(place, keyword, f"beside $ref, asserts nothing in {scope.dialect.name}")
            else:
                self.keyword(place, keyword, value)
        self._current = current
        return _assembled(place)

    def keyword(self, place: _Place, keyword: str, value: Any) -> None:
        rule = _RULES.get(keyword)
        if rule is None:
            self.enforced(place, keyword, "not a keyword; asserts nothing")
        elif not place.scope.dialect.knows(keyword):
            self.enforced(place, keyword, f"not a keyword of {place.scope.dialect.name}; asserts nothing")
        elif keyword in self.relaxed:
            self.relax(place, keyword, "the engine cannot take it here")
            if keyword in ("patternProperties", "properties"):
                place.open_names = True
        else:
            rule(self, place, keyword, value)

    def inside(self, place: _Place, schema: Any, *path: str | int) -> Any:
        """Rewrites a schema about a part of the document."""
        return self.node(schema, place.scope, _below(place, path), place.depth + 1)

    def beside(self, place: _Place, schema: Any, *path: str | int) -> Any:
        """Rewrites a schema about the same value."""
        return self.node(schema, place.scope, _below(place, path), place.depth + 1, inward=False)

    def made(self, place: _Place, schema: Any) -> Any:
        """Rewrites a schema of our own making: its keywords are not the author's, so the ledger does not list them."""
        self._quiet += 1
        try:
            return self.node(schema, place.scope, place.pointer, place.depth + 1, inward=False)
        finally:
            self._quiet -= 1

    def exactly_made(self, place: _Place, schema: Any) -> Any | None:
        """As `made`, or None if something in it would only be CHECKED."""
        kept, quiet, self.ledger, self._quiet = self.ledger, self._quiet, [], 0
        try:
            made = self.node(schema, place.scope, place.pointer, place.depth + 1, inward=False)
            return None if any(e.standing is Standing.CHECKED for e in self.ledger) else made
        finally:
            self.ledger, self._quiet = kept, quiet

    # ---- any type

    def type(self, place: _Place, keyword: str, value: Any) -> None:
        named = [value] if isinstance(value, str) else value
        allowed = (*TYPES, "integer")
        if not isinstance(named, list) or not named or not all(isinstance(n, str) and n in allowed for n in named):
            raise self.reject(place, keyword, f"is {value!r}; it must be one of {', '.join(allowed)}, or a list of them")
        place.out["type"] = value
        self.enforced(place, keyword)

    def enum(self, place: _Place, keyword: str, value: Any) -> None:
        if not isinstance(value, list):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list")
        place.scope.spend(150 * sum(isinstance(v, list | dict) for v in value), place.pointer, keyword)
        values = [_whole_numbers(v) for v in value]
        exact = [v for v in values if _expressible(v)]
        if len(exact) < len(values):
            self.relax(place, keyword, "a number in it is beyond the engine's exact range")
            return
        place.also.append({"enum": exact} if exact else False)
        self.enforced(place, keyword)

    def const(self, place: _Place, keyword: str, value: Any) -> None:
        if not _expressible(_whole_numbers(value)):
            self.relax(place, keyword, "a number in it is beyond the engine's exact range")
            return
        place.also.append({"enum": [_whole_numbers(value)]})
        self.enforced(place, keyword)

    # ---- numbers

    def bound(self, place: _Place, keyword: str, value: Any) -> None:
        if keyword.startswith("exclusive") and place.scope.dialect.name == "draft-04":
            if not isinstance(value, bool):
                raise self.reject(place, keyword, f"is {value!r}; in draft-04 it must be true or false")
            self.enforced(place, keyword, f"taken together with {keyword.removeprefix('exclusive').lower()}")
            return
        number = self.number(place, keyword, value)
        if abs(number) >= _EXACT:
            self.relax(place, keyword, f"{str(value)[:30]} is beyond the engine's exact range")
            return
        flag = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
        written = flag if flag and place.schema.get(flag) is True else keyword
        place.out[written] = number
        self.bounds.append((place, written, number))
        self.enforced(place, keyword)

    def multiple_of(self, place: _Place, keyword: str, value: Any) -> None:
        number = self.number(place, keyword, value)
        if number <= 0:
            raise self.reject(place, keyword, f"is {value!r}; it must be above 0")
        steps = _steps(number)
        if not steps:
            self.relax(place, keyword, f"{str(value)[:30]} is beyond what the engine multiplies exactly")
        elif len(steps) == 1:
            place.out[keyword] = steps[0]
            self.enforced(place, keyword)
        else:
            options = [{keyword: step, **_on_grid(place.schema, step)} for step in steps]
            place.also.append({"anyOf": [options[0], *({"type": "number", **option} for option in options[1:])]})
            self.enforced(place, keyword, "rewritten as a choice of how many decimals there are")

    def number(self, place: _Place, keyword: str, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.reject(place, keyword, f"is {value!r}; it must be a number")
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def note_wide_bounds(self) -> None:
        """Says CHECKED of bounds n < x with x < m and m < n + 1: there the engine takes the whole number n, too (and likewise below 0)."""
        for place, keyword, number in self.bounds:
            sign = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(keyword, 0)
            if not sign or not isinstance(number, int) or sign * number < 0 or place.types() == {"integer"}:
                continue
            ends = ("maximum", "exclusiveMaximum") if sign > 0 else ("minimum", "exclusiveMinimum")
            if any(k in ends and 0 < sign * (end - number) < 1 and (other is place or (other.joined and place.joined)) for other, k, end in self.bounds):
                self.ledger.append(Entry(place.pointer, keyword, Standing.CHECKED, f"the engine takes {number} itself, where what follows ends before {number + sign}"))

    # ---- counts

    def count(self, place: _Place, keyword: str, value: Any) -> int:
        number = self.number(place, keyword, value)
        if not isinstance(number, int) or number < 0:
            raise self.reject(place, keyword, f"is {value!r}; it must be a whole number of at least 0")
        return number

    def length(self, place: _Place, keyword: str, value: Any) -> None:
        number = self.count(place, keyword, value)
        limit = 100_000 if keyword.endswith("Length") else 5_000
        if number > limit:
            self.relax(place, keyword, f"{number:,} is more than the engine counts ({limit:,})")
            return
        place.out[keyword] = max(number, place.out.get(keyword, 0)) if keyword == "minItems" else number
        self.enforced(place, keyword)

    def properties_count(self, place: _Place, keyword: str, value: Any) -> None:
        number = self.count(place, keyword, value)
        required, named = set(_names(place.schema.get("required"))), set(_names(place.schema.get("properties")))
        closed = place.schema.get("additionalProperties") is False and not place.schema.get("patternProperties")
        if (keyword == "minProperties" and number <= len(required)) or (keyword == "maxProperties" and closed and number >= len(named | required)):
            self.enforced(place, keyword, "follows from the other keywords")
        elif closed and _count_split(place, keyword, number):
            self.enforced(place, keyword, "rewritten as a choice of names")
        elif keyword == "maxProperties" and number == 0:
            place.also.append({"properties": {}, "additionalProperties": False})
            self.enforced(place, keyword)
        elif keyword == "maxProperties" and named <= required and not any(k in place.schema for k in _IN_PLACE):
            place.out[keyword] = number
            self.enforced(place, keyword)
        else:
            self.relax(place, keyword, "the engine does not count names, of which one may come twice")
            if keyword == "minProperties" and named <= required and not any(k in place.schema for k in _IN_PLACE):
                place.out[keyword] = number

    # ---- strings

    def pattern(self, place: _Place, keyword: str, value: Any) -> None:
        core, exact = self.core(place, keyword, value)
        if core is None:
            place.also.append({"type": [t for t in TYPES if t != "string"]})
        elif core:
            place.also.append({"pattern": core})
        if exact:
            self.enforced(place, keyword)
        else:
            self.relax(place, keyword, "lookaround, word boundaries and backreferences are beyond an automaton")

    def core(self, place: _Place, keyword: str, pattern: Any) -> tuple[str | None, bool]:
        """An ECMA pattern as the engine takes it ("" for no constraint, None if nothing matches), and whether that is all of it."""
        if not isinstance(pattern, str):
            raise self.reject(place, keyword, f"is {pattern!r}; it must be a string")
        try:
            tree = regex_syntax.parse_any(pattern)
        except GrammarError as error:
            raise self.reject(place, keyword, f"is not a pattern: {error}") from error
        exact = not regex_syntax.opaque_parts(tree)
        try:
            full = regex_syntax.anywhere(regex_syntax.widened(tree))
        except GrammarError:
            return "", False
        if regex_syntax.empty_language(full):
            return (None, True) if exact else ("", False)
        return f"^(?:{regex_syntax.write(full)})$", exact

    def format(self, place: _Place, keyword: str, value: Any) -> None:
        form = FORMATS.get(value) if isinstance(value, str) else None
        if form is None or not self.formats:
            self.enforced(place, keyword, "an annotation; asserts nothing")
            return
        parts = form.constraint()
        if parts:
            name = f"{self.prefix}format.{value}"
            self.definitions[name] = {"type": "string", "allOf": parts}
            only_strings = place.types() == {"string"}
            place.also.append({"$ref": f"#/$defs/{name}"} if only_strings else {"allOf": parts})
        if form.exact:
            self.enforced(place, keyword)
        else:
            self.relax(place, keyword, f"{value} has rules beyond an automaton")

    # ---- arrays

    def items(self, place: _Place, keyword: str, value: Any) -> None:
        if isinstance(value, list):
            if not place.scope.dialect.items_list:
                raise self.reject(place, keyword, "is a list; in 2020-12 that is prefixItems")
            place.out["prefixItems"] = [self.inside(place, part, "items", i) for i, part in enumerate(value)]
            self.enforced(place, keyword)
            return
        place.out["items"] = self.inside(place, value, keyword)
        self.enforced(place, keyword)

    def additional_items(self, place: _Place, keyword: str, value: Any) -> None:
        if isinstance(place.schema.get("items"), list) and place.scope.dialect.items_list:
            place.out["items"] = self.inside(place, value, keyword)
            self.enforced(place, keyword)
        else:
            self.enforced(place, keyword, "without a list of items, asserts nothing")

    def prefix_items(self, place: _Place, keyword: str, value: Any) -> None:
        place.out[keyword] = [self.inside(place, part, keyword, i) for i, part in enumerate(self.schemas(place, keyword, value))]
        self.enforced(place, keyword)

    def schemas(self, place: _Place, keyword: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list of schemas")
        return value

    def contains(self, place: _Place, keyword: str, value: Any) -> None:
        counted = not place.scope.dialect.ref_alone  # since 2019-09
        least = self.count(place, "minContains", place.schema.get("minContains", 1)) if counted else 1
        if least == 0 and "maxContains" not in place.schema:
            self.enforced(place, keyword, "at least 0 asserts nothing")
            return
        if 0 < least <= 5_000:
            place.also.append({"minItems": least})
        self.relax(place, keyword, "items are not counted by what they satisfy")

    def unique_items(self, place: _Place, keyword: str, value: Any) -> None:
        most = place.schema.get("maxItems")
        if value is not True or (isinstance(most, int) and most <= 1):
            self.enforced(place, keyword, "asserts nothing here")
            return
        values = _few_values(place)
        if values is not None:
            place.also.append(_arrangements(values, place.schema))
            self.enforced(place, keyword, "rewritten as the arrangements of the values")
            return
        self.relax(place, keyword, "items are not compared with each other")

    def unevaluated_items(self, place: _Place, keyword: str, value: Any) -> None:
        schema = place.schema
        items = schema.get("items")
        listed = isinstance(items, list)
        if value is True or (items is not None and not listed) or (listed and "additionalItems" in schema):
            self.enforced(place, keyword, "all items are evaluated")
        elif any(k in schema for k in (*_IN_PLACE, "contains")):
            self.relax(place, keyword, "which items are evaluated depends on the document")
        else:
            place.out["items"] = self.inside(place, value, keyword)
            self.enforced(place, keyword)

    # ---- objects

    def required(self, place: _Place, keyword: str, value: Any) -> None:
        if isinstance(value, bool):
            self.enforced(place, keyword, "draft 3's form; asserts nothing")
            return
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list of names")
        place.out[keyword] = list(dict.fromkeys(value))
        self.enforced(place, keyword)

    def properties(self, place: _Place, keyword: str, value: Any) -> None:
        place.out[keyword] = {
            name: self.inside(place, part, keyword, name) for name, part in self.named_schemas(place, keyword, value).items()
        }
        self.enforced(place, keyword)

    def named_schemas(self, place: _Place, keyword: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be an object of schemas")
        return value

    def pattern_properties(self, place: _Place, keyword: str, value: Any) -> None:
        named = self.named_schemas(place, keyword, value)
        cores = {pattern: self.core(place, keyword, pattern) for pattern in named}
        if all(exact for _, exact in cores.values()):
            kept = {core: self.inside(place, named[pattern], keyword, pattern) for pattern, (core, _) in cores.items() if core}
            if kept:
                place.out[keyword] = kept
            self.enforced(place, keyword)
        else:
            place.open_names = True
            self.relax(place, keyword, "a name pattern is beyond an automaton")

    def additional_properties(self, place: _Place, keyword: str, value: Any) -> None:
        loose = isinstance(place.schema.get("patternProperties"), dict) and (
            "patternProperties" in self.relaxed
            or any(not self.core(place, "patternProperties", p)[1] for p in place.schema["patternProperties"])
        )
        if loose:
            self.relax(place, keyword, "which names are additional depends on patterns beyond an automaton")
            return
        place.out[keyword] = self.inside(place, value, keyword)
        self.enforced(place, keyword)

    def property_names(self, place: _Place, keyword: str, value: Any) -> None:
        rule = _names_rule(value, self, place)
        if rule is None:
            self.relax(place, keyword, "names are constrained only by pattern, length, enum and const")
            return
        if rule:
            place.also.append(rule)
        self.enforced(place, keyword, "rewritten as patternProperties")

    def unevaluated_properties(self, place: _Place, keyword: str, value: Any) -> None:
        seen = evaluated(place.schema, place.scope)
        if value is True or seen.everything:
            self.enforced(place, keyword, "all names are evaluated")
            return
        closing = self.closing(place, seen, value)
        if closing is None:
            self.relax(place, keyword, "which names are evaluated depends on the document")
            return
        place.also.append(closing)
        if seen.depends:
            self.relax(place, keyword, "which names are evaluated depends on the document")
        else:
            self.enforced(place, keyword, "rewritten as additionalProperties")

    def closing(self, place: _Place, seen: Evaluated, value: Any) -> dict[str, Any] | None:
        """An object of the names that may be evaluated, and of `value` for all others."""
        if seen.maybe_everything:
            return None
        cores = [self.core(place, "patternProperties", pattern) for pattern in seen.patterns]
        if any(not exact for _, exact in cores):
            return None
        patterns: dict[str, Any] = {core: {} for core, _ in cores if core}
        names: dict[str, Any] = {name: {} for name in seen.names}
        rest = self.inside(place, value, "unevaluatedProperties")
        return {"properties": names, **({"patternProperties": patterns} if patterns else {}), "additionalProperties": rest}

    def dependent_required(self, place: _Place, keyword: str, value: Any) -> None:
        for name, needed in self.named_schemas(place, keyword, value).items():
            if not isinstance(needed, list):
                raise self.reject(place, keyword, f"gives {name!r} {needed!r}; it must be a list of names")
            self.depend(place, keyword, name, {"required": [name, *needed]})

    def dependent_schemas(self, place: _Place, keyword: str, value: Any) -> None:
        for name, part in self.named_schemas(place, keyword, value).items():
            made = self.beside(place, part, keyword, name)
            self.depend(place, keyword, name, {"allOf": [{"required": [name]}, made]})

    def dependencies(self, place: _Place, keyword: str, value: Any) -> None:
        for name, part in self.named_schemas(place, keyword, value).items():
            if isinstance(part, list | str):
                needed = [part] if isinstance(part, str) else part
                self.depend(place, keyword, name, {"required": [name, *needed]})
            else:
                self.dependent_schemas(place, keyword, {name: part})

    def depend(self, place: _Place, keyword: str, name: str, consequence: dict[str, Any]) -> None:
        """Either the name is absent, or the consequence holds."""
        self.split(place, keyword, [{"properties": {name: False}}, consequence], "rewritten as a choice")

    def split(self, place: _Place, keyword: str, options: list[Any], why: str) -> None:
        """Adds a choice, unless the choices of this object multiply too far."""
        ways = math.prod(len(part["anyOf"]) for part in place.also if isinstance(part, dict) and "anyOf" in part)
        if ways * len(options) > MAX_SPLITS:
            self.relax(place, keyword, f"it would split the object in more than {MAX_SPLITS} ways")
            return
        place.also.append({"anyOf": options})
        self.enforced(place, keyword, why)

    # ---- combinations

    def all_of(self, place: _Place, keyword: str, value: Any) -> None:
        parts = [self.beside(place, part, keyword, i) for i, part in enumerate(self.schemas(place, keyword, value))]
        place.out.setdefault("allOf", []).extend(parts)
        self.enforced(place, keyword)

    def any_of(self, place: _Place, keyword: str, value: Any) -> None:
        parts = [self.beside(place, part, keyword, i) for i, part in enumerate(self.schemas(place, keyword, value))]
        place.also.append({"anyOf": parts} if parts else False)
        self.enforced(place, keyword)

    def one_of(self, place: _Place, keyword: str, value: Any) -> None:
        options = self.schemas(place, keyword, value)
        clashes = [(i, j) for i in range(len(options)) for j in range(i) if not disjoint(options[i], options[j], place.scope)]
        parts: list[Any] = [self.beside(place, option, keyword, i) for i, option in enumerate(options)]
        if not clashes:
            place.also.append({"anyOf": parts} if parts else False)
            self.enforced(place, keyword, "the options exclude each other, so anyOf says the same")
            return
        apart = self.set_apart(place, options, parts, clashes)
        place.also.append({"anyOf": apart or parts})
        if apart is None:
            self.relax(place, keyword, "options may hold together; that exactly one does is not followed")
        else:
            self.enforced(place, keyword, "rewritten: each option without those it may clash with")

    def set_apart(self, place: _Place, options: list[Any], parts: list[Any], clashes: list[tuple[int, int]]) -> list[Any] | None:
        """Each option and the complements of those that it may clash with."""
        opposites: dict[int, Any] = {}
        for index in sorted({i for clash in clashes for i in clash}):
            opposite = complement(options[index], place.scope)
            made = None if opposite is None else self.exactly_made(place, opposite)
            if made is None or len(options) > 8:
                return None
            opposites[index] = made
        apart = []
        for index, part in enumerate(parts):
            others = [opposites[j] for pair in clashes if index in pair for j in pair if j != index]
            apart.append({"allOf": [part, *others]} if others else part)
        return apart

    def not_(self, place: _Place, keyword: str, value: Any) -> None:
        opposite = complement(value, place.scope)
        made = None if opposite is None else self.exactly_made(place, opposite)
        if made is None:
            self.relax(place, keyword, "the opposite of this schema cannot be written")
            return
        if made is not True:
            place.also.append(made)
        self.enforced(place, keyword, "rewritten as the opposite")

    def if_(self, place: _Place, keyword: str, value: Any) -> None:
        then, other = place.schema.get("then", True), place.schema.get("else", True)
        if then is True and other is True:
            self.enforced(place, keyword, "without then and else, asserts nothing")
            return
        opposite = complement(value, place.scope)
        yes, no = self.exactly_made(place, value), None if opposite is None else self.exactly_made(place, opposite)
        if yes is None or no is None:
            place.also.append({"anyOf": [self.made(place, then), self.made(place, other)]})
            self.relax(place, keyword, "the condition's opposite cannot be written")
            return
        made_then = self.beside(place, then, "then") if "then" in place.schema else True
        made_else = self.beside(place, other, "else") if "else" in place.schema else True
        options = [{"allOf": [yes, made_then]}, {"allOf": [no, made_else]}]
        self.split(place, keyword, options, "rewritten as two cases")

    # ---- references

    def ref(self, place: _Place, keyword: str, value: Any) -> None:
        if keyword == "$dynamicRef" and self.moves(place, value):
            self.relax(place, keyword, "where it leads depends on the way taken to it")
            return
        target, scope, where = place.scope.look_up(value, place.pointer, keyword)
        if isinstance(target, bool):
            place.also.append(target)
        else:
            name = self.definition(target, scope, where)
            self.follow(place, keyword, name)
            if name in self.never:
                place.also.append(False)
            else:
                place.out["$ref"] = f"#/$defs/{name}"
        self.enforced(place, keyword)

    def moves(self, place: _Place, value: Any) -> bool:
        anchor = value.rpartition("#")[2] if isinstance(value, str) else ""
        return place.scope.names.dynamic_anchors.get(anchor, 0) > 1 or anchor == "meta"

    def recursive_ref(self, place: _Place, keyword: str, value: Any) -> None:
        if '"$recursiveAnchor": true' in str(place.scope.root).replace("'", '"').replace("True", "true"):
            self.relax(place, keyword, "where it leads depends on the way taken to it")
        else:
            self.ref(place, keyword, value)

    def definition(self, target: Any, scope: Scope, where: str) -> str:
        key = id(target), str(scope.resolver._base_uri)
        name = self._names.get(key)
        if name is None:
            digest = hashlib.sha256(f"{key[1]} {where}".encode("utf-8", "surrogatepass")).hexdigest()[:12]
            name = self._names[key] = f"{self.prefix}d{digest}"
            self._pending.append((name, target, scope, where))
        return name

    def follow(self, place: _Place, keyword: str, name: str) -> None:
        """Refuses definitions that refer to each other without ever reaching into the document."""
        self._in_place.setdefault(self._current, set()).add(name)
        if self._current and self._reaches(name, self._current):
            raise self.reject(place, keyword, "refers, in a circle, to itself, so it says nothing about any part of a document")

    def _reaches(self, start: str, goal: str) -> bool:
        stack, seen = [start], set()
        while stack:
            name = stack.pop()
            if name == goal:
                return True
            if name not in seen:
                seen.add(name)
                stack.extend(self._in_place.get(name, ()))
        return False

    def finish_definitions(self) -> None:
        while self._pending:
            name, target, scope, where = self._pending.pop()
            self._current = name
            self.origins[name] = where
            made = self.node(target, scope, where, 0, inward=False)
            if name not in self.never:
                self.definitions[name] = made
            self._current = ""


_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies")

_Rule = Callable[[_Normalizer, _Place, str, Any], None]
_RULES: dict[str, _Rule] = {
    "type": _Normalizer.type,
    "enum": _Normalizer.enum,
    "const": _Normalizer.const,
    "minimum": _Normalizer.bound,
    "maximum": _Normalizer.bound,
    "exclusiveMinimum": _Normalizer.bound,
    "exclusiveMaximum": _Normalizer.bound,
    "multipleOf": _Normalizer.multiple_of,
    "minLength": _Normalizer.length,
    "maxLength": _Normalizer.length,
    "minItems": _Normalizer.length,
    "maxItems": _Normalizer.length,
    "minProperties": _Normalizer.properties_count,
    "maxProperties": _Normalizer.properties_count,
    "pattern": _Normalizer.pattern,
    "format": _Normalizer.format,
    "items": _Normalizer.items,
    "additionalItems": _Normalizer.additional_items,
    "prefixItems": _Normalizer.prefix_items,
    "contains": _Normalizer.contains,
    "uniqueItems": _Normalizer.unique_items,
    "unevaluatedItems": _Normalizer.unevaluated_items,
    "required": _Normalizer.required,
    "properties": _Normalizer.properties,
    "patternProperties": _Normalizer.pattern_properties,
    "additionalProperties": _Normalizer.additional_properties,
    "propertyNames": _Normalizer.property_names,
    "unevaluatedProperties": _Normalizer.unevaluated_properties,
    "dependentRequired": _Normalizer.dependent_required,
    "dependentSchemas": _Normalizer.dependent_schemas,
    "dependencies": _Normalizer.dependencies,
    "allOf": _Normalizer.all_of,
    "anyOf": _Normalizer.any_of,
    "oneOf": _Normalizer.one_of,
    "not": _Normalizer.not_,
    "if": _Normalizer.if_,
    "$ref": _Normalizer.ref,
    "$dynamicRef": _Normalizer.ref,
    "$recursiveRef": _Normalizer.recursive_ref,
}


def _below(place: _Place, path: Iterable[str | int]) -> str:
    return place.pointer + "".join(f"/{escaped(str(part))}" for part in path)


def _assembled(place: _Place) -> Any:
    """One schema out of what was written: the plain keywords, and all that must hold beside them."""
    out, also = place.out, place.also
    if place.open_names:
        out.pop("additionalProperties", None)
        out.pop("patternProperties", None)
    if not out and len(also) == 1:
        return also[0]
    if out == {"type": "string"} and len(also) == 1 and isinstance(also[0], dict) and "$ref" in also[0]:
        return also[0]
    for part in also:
        free = isinstance(part, dict) and not (part.keys() & out.keys()) and not (_TOGETHER & part.keys() and _TOGETHER & out.keys())
        if free and len(part) == 1:
            out.update(part)
        else:
            out.setdefault("allOf", []).append(part)
    return out


#: Keywords whose meaning depends on each other, so that parts are never mixed across them.
_TOGETHER = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "allOf"))


def _whole_numbers(value: Any) -> Any:
    """Writes 2.0 as 2, everywhere inside."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: _whole_numbers(v) for k, v in value.items()}
    return value


def _expressible(value: Any) -> bool:
    """Whether every number inside is one that the engine writes as Python does."""
    if isinstance(value, list):
        return all(map(_expressible, value))
    if isinstance(value, dict):
        return all(map(_expressible, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _EXACT
    return not isinstance(value, float) or (math.isfinite(value) and "e" not in repr(value))


def _names(value: Any) -> dict[str, None]:
    """The names in a list or an object, in order; none in what is malformed, which its own rule refuses."""
    return dict.fromkeys(name for name in value if isinstance(name, str)) if isinstance(value, list | dict) else {}


def _steps(step: float) -> list[int | float]:
    """What numbers with all, one fewer, ... and no decimals must be multiples of, to be multiples of `step`.

    The engine writes multiples of 0.01 with two decimals or none, and numbers within bounds without zeros at their end; so of
    both together it would never write 0.5. Empty if a step is beyond what it multiplies exactly.
    """
    exact = Fraction(repr(step))
    places = next((n for n in range(7) if (exact * 10**n).denominator == 1), None)
    if places is None:
        return []
    found: dict[int | float, None] = {}
    for n in range(places, -1, -1):
        least = Fraction(math.lcm(int(exact * 10**places), 10 ** (places - n)), 10**places)
        if not Fraction(1, 10**6) <= least <= 10**9:
            return []
        found[int(least) if least.denominator == 1 else float(least)] = None
    return list(found)


def _on_grid(schema: dict[str, Any], step: float) -> dict[str, int | float]:
    """The bounds beside a `multipleOf`, drawn in to the multiples of `step`: the engine writes no 99.9 below 99.99, but 99.90."""
    grid = Fraction(repr(step))
    found: dict[str, int | float] = {}
    for bound, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = "exclusiveM" + bound[1:]
        ends = []
        for keyword in (bound, exclusive):
            end = schema.get(keyword)
            if isinstance(end, bool) or not isinstance(end, int | float) or not abs(end) < _EXACT:
                continue
            multiples = math.ceil(sign * Fraction(repr(end)) / grid)
            if (keyword == exclusive or schema.get(exclusive) is True) and multiples * grid == sign * Fraction(repr(end)):
                multiples += 1
            ends.append(sign * multiples * grid)
        if ends:
            end = max(ends) if sign > 0 else min(ends)
            found[bound] = int(end) if end.denominator == 1 else float(end)
    return found


def _few_values(place: _Place) -> list[Any] | None:
    """The values that items may have, if they are few and nothing else is said about them."""
    items = place.schema.get("items")
    if place.types() != {"array"} or not isinstance(items, dict) or not set(items) <= {"enum", "type", "title", "description"}:
        return None
    if "enum" not in items or set(place.schema) & {"prefixItems", "contains", *_IN_PLACE}:
        return None
    values = items["enum"]
    named = items.get("type", TYPES)
    named = {named} if isinstance(named, str) else set(named)
    if "integer" in named or not isinstance(values, list) or not all(isinstance(v, str | int | None) for v in values):
        return None
    values = [v for v in values if type_of(v) in named]
    distinct = [v for i, v in enumerate(values) if not any(type_of(v) == type_of(w) and v == w for w in values[:i])]
    return distinct if 0 < len(distinct) <= 4 else None


def _arrangements(values: list[Any], schema: dict[str, Any]) -> dict[str, Any]:
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
    lengths = range(int(low), min(int(high), len(values)) + 1)
    return {"enum": [list(order) for n in lengths for order in itertools.permutations(values, n)]}


def _count_split(place: _Place, keyword: str, number: int) -> bool:
    """Rewrites a count over few names, of a closed object, as a choice of which of them are there or not."""
    names = [*_names(place.schema.get("properties")), *_names(place.schema.get("required"))]
    names = list(dict.fromkeys(names))
    if keyword == "minProperties" and number > len(names):
        place.also.append({"type": [t for t in TYPES if t != "object"]})
        return True
    if math.comb(len(names), number) > MAX_SPLITS // 4 or any("anyOf" in part for part in place.also if isinstance(part, dict)):
        return False
    if keyword == "minProperties":
        options: list[dict[str, Any]] = [{"required": list(chosen)} for chosen in itertools.combinations(names, number)]
    else:
        absent = itertools.combinations(names, len(names) - number)
        options = [{"properties": dict.fromkeys(chosen, False)} for chosen in absent]
    place.also.append({"anyOf": options})
    return True


def _names_rule(value: Any, work: _Normalizer, place: _Place) -> dict[str, Any] | None:
    """The object whose names satisfy `value`; {} for any, None if that cannot be said."""
    if value is True or value == {}:
        return {}
    if value is False:
        return {"properties": {}, "additionalProperties": False}
    if not isinstance(value, dict) or not set(value) <= {"type", "pattern", "minLength", "maxLength", "enum", "const", "title", "description"}:
        return None
    if value.get("type", "string") != "string":
        return None
    if "enum" in value or "const" in value:
        names = value.get("enum", [value.get("const")])
        if set(value) & {"pattern", "minLength", "maxLength"}:
            return None
        return {"properties": {n: {} for n in names if isinstance(n, str)}, "additionalProperties": False}
    low, high = value.get("minLength", 0), value.get("maxLength")
    if "pattern" in value:
        core, exact = work.core(place, "propertyNames", value["pattern"])
        if not exact or core is None or low or high is not None:
            return None
        return {"patternProperties": {core or "^": {}}, "additionalProperties": False}
    if not low and high is None:
        return {}
    low, high = work.count(place, "minLength", low), None if high is None else work.count(place, "maxLength", high)
    text = regex_syntax.write(regex_syntax.Repeat(regex_syntax.ANY_CHAR, low, high))
    return {"patternProperties": {f"^(?:{text})$": {}}, "additionalProperties": False}
