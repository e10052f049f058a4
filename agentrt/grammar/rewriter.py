"""The walk over a JSON Schema: visits every keyword once, applies its rule, and keeps the ledger and the definitions.

What each keyword becomes is said by the rules (`agentrt.grammar.rules`); this module knows none of them. Invariant: nothing of the input
goes over unread, so no keyword is dropped in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrt.errors import GrammarError
from agentrt.grammar.ledger import Entry, Standing
from agentrt.grammar.references import Scope, escaped

#: How deep a schema may nest.
MAX_DEPTH = 200
#: Ways that case splits of one object may take together.
MAX_SPLITS = 64

#: Keywords that assert nothing by themselves.
_IGNORED = frozenset(
    ["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "example", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema", "then", "else", "minContains", "maxContains"]
)
#: Keywords that apply schemas to the value itself.
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies")
#: Keywords whose meaning depends on each other, so that parts are never mixed across them.
_TOGETHER = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "allOf"))


@dataclass
class Place:
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


Rule = Callable[["Rewriter", Place, str, Any], None]


class Rewriter:
    """One schema under way, and what has been learnt of it so far."""

    def __init__(self, rules: Mapping[str, Rule], prefix: str, relaxed: frozenset[str], never: frozenset[str], formats: bool) -> None:
        self._rules = rules
        self.prefix = prefix
        self.relaxed = relaxed
        self.never = never
        self.formats = formats
        self.definitions: dict[str, Any] = {}
        self.ledger: list[Entry] = []
        self._names: dict[tuple[int, str], str] = {}
        self._pending: list[tuple[str, Any, Scope, str]] = []
        self._in_place: dict[str, set[str]] = {}  #: definition -> definitions that it refers to without a step inward
        self._current = ""
        self._quiet = 0
        self.bounds: list[tuple[Place, str, int | float]] = []  #: every bound on numbers that was written
        self.origins: dict[str, str] = {}  #: definition -> pointer of what it was made from

    # ---- the ledger

    def note(self, place: Place, keyword: str, standing: Standing, why: str = "") -> None:
        """Tells the ledger."""
        if not self._quiet:
            self.ledger.append(Entry(place.pointer, keyword, standing, why))

    def enforced(self, place: Place, keyword: str, why: str = "") -> None:
        """Tells the ledger that no token can break the keyword."""
        self.note(place, keyword, Standing.ENFORCED, why)

    def relax(self, place: Place, keyword: str, why: str) -> None:
        """Tells the ledger that the keyword waits for the final check."""
        self.note(place, keyword, Standing.CHECKED, why)

    def reject(self, place: Place, keyword: str, why: str) -> GrammarError:
        """The error that refuses the schema for this keyword."""
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
        place = Place(schema, scope.into(schema), pointer, depth, joined=not inward or any(key in schema for key in IN_PLACE))
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

    def keyword(self, place: Place, keyword: str, value: Any) -> None:
        """Applies the keyword's rule."""
        rule = self._rules.get(keyword)
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

    def inside(self, place: Place, schema: Any, *path: str | int) -> Any:
        """Rewrites a schema about a part of the document."""
        return self.node(schema, place.scope, _below(place, path), place.depth + 1)

    def beside(self, place: Place, schema: Any, *path: str | int) -> Any:
        """Rewrites a schema about the same value."""
        return self.node(schema, place.scope, _below(place, path), place.depth + 1, inward=False)

    def made(self, place: Place, schema: Any) -> Any:
        """Rewrites a schema of our own making: its keywords are not the author's, so the ledger does not list them."""
        self._quiet += 1
        try:
            return self.node(schema, place.scope, place.pointer, place.depth + 1, inward=False)
        finally:
            self._quiet -= 1

    def exactly_made(self, place: Place, schema: Any) -> Any | None:
        """As `made`, or None if something in it would only be CHECKED."""
        kept, quiet, self.ledger, self._quiet = self.ledger, self._quiet, [], 0
        try:
            made = self.node(schema, place.scope, place.pointer, place.depth + 1, inward=False)
            return None if any(e.standing is Standing.CHECKED for e in self.ledger) else made
        finally:
            self.ledger, self._quiet = kept, quiet

    def schemas(self, place: Place, keyword: str, value: Any) -> list[Any]:
        """The list of schemas that a keyword gives; refused if it is none."""
        if not isinstance(value, list):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list of schemas")
        return value

    def named_schemas(self, place: Place, keyword: str, value: Any) -> dict[str, Any]:
        """The object of schemas that a keyword gives; refused if it is none."""
        if not isinstance(value, dict):
            raise self.reject(place, keyword, f"is {str(value)[:60]!r}; it must be an object of schemas")
        return value

    # ---- definitions

    def definition(self, target: Any, scope: Scope, where: str) -> str:
        """The name of the definition that `target` becomes."""
        key = id(target), str(scope.resolver._base_uri)
        name = self._names.get(key)
        if name is None:
            digest = hashlib.sha256(f"{key[1]} {where}".encode("utf-8", "surrogatepass")).hexdigest()[:12]
            name = self._names[key] = f"{self.prefix}d{digest}"
            self._pending.append((name, target, scope, where))
        return name

    def follow(self, place: Place, keyword: str, name: str) -> None:
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
        """Rewrites what was referred to."""
        while self._pending:
            name, target, scope, where = self._pending.pop()
            self._current = name
            self.origins[name] = where
            made = self.node(target, scope, where, 0, inward=False)
            if name not in self.never:
                self.definitions[name] = made
            self._current = ""


def _below(place: Place, path: Iterable[str | int]) -> str:
    return place.pointer + "".join(f"/{escaped(str(part))}" for part in path)


def _assembled(place: Place) -> Any:
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
