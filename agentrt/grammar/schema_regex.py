"""From a normalised schema of the regular kind to one regular expression over its documents' text.

Regular are schemas whose objects are closed, that do not refer to themselves, and that combine nothing but choices.
The expression has the very language that llguidance gives the same schema: the same separators, spellings of numbers
and escapes in strings; so the automaton made from it allows the same bytes. What is not regular, or would grow beyond
the bound, is refused with its reason, and stays on llguidance. Nothing is approximated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrt.grammar import regex_syntax
from agentrt.grammar.complement import TYPES, type_of
from agentrt.grammar.regex_syntax import Alt, Chars, Node, Repeat, Seq, literal
from agentrt.grammar.separators import ITEM, KEY, has_open_object

#: Characters of the whole expression, with its repeats written out.
MAX_SIZE = 100_000


class NotRegularError(ValueError):
    """The schema has no regular expression that is worth it; the message says why."""


def regex_of(schema: Any, definitions: Mapping[str, Any]) -> Node:
    """The tree of a normalised schema's documents.

    Raises:
        NotRegularError: With the reason.
    """
    if has_open_object([schema, definitions]):
        raise NotRegularError("an object is open to properties that it does not name (set additionalProperties to false)")
    node = _Writer(definitions).node(schema, ())
    if regex_syntax.empty_language(node):
        raise NotRegularError("nothing can satisfy it")
    if regex_syntax.size(node) > MAX_SIZE:
        raise NotRegularError(f"its expression has {regex_syntax.size(node):,} characters; the limit is {MAX_SIZE:,}")
    return node


# ---- strings

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = sorted({*range(32), 34, 92, 127})


def _one_of(chars: Iterable[str]) -> Chars:
    return Chars(regex_syntax.union((ord(c), ord(c)) for c in chars))


def _escapes(codes: list[int]) -> list[Node]:
    """Every way in which JSON text spells those characters that cannot stand for themselves."""
    ways: list[Node] = []
    if short := [_SHORT[code] for code in codes if code in _SHORT]:
        ways.append(Seq((literal("\\"), _one_of(short))))
    for high in sorted({code // 16 for code in codes}):
        digits = [f"{code % 16:x}" for code in codes if code // 16 == high and code not in (34, 92)]
        if digits:
            ways.append(Seq((literal(f"\\u00{high:x}"), _one_of([*digits, *map(str.upper, digits)]))))
    return ways


def quoted(node: Node) -> Node:
    """The inside of JSON strings whose values `node` matches."""
    match node:
        case Chars(ranges):
            return _quoted_chars(ranges)
        case Seq(parts):
            return Seq(tuple(map(quoted, parts)))
        case Alt(options):
            return Alt(tuple(map(quoted, options)))
        case Repeat(inner, low, high):
            return Repeat(quoted(inner), low, high)
    raise NotRegularError("a pattern has parts beyond an automaton")


def _quoted_chars(ranges: regex_syntax.Ranges) -> Node:
    itself = regex_syntax.union([(c, c) for c in _ESCAPED])
    plain = regex_syntax.intersection(ranges, regex_syntax.complement(itself))
    escapes = _escapes([c for c in _ESCAPED if any(low <= c <= high for low, high in ranges)])
    options: list[Node] = [Chars(plain), *escapes] if plain else escapes
    return options[0] if len(options) == 1 else Alt(tuple(options))


_CHAR = _quoted_chars(regex_syntax.ANY_CHAR.ranges)
_QUOTE = literal('"')


def _string_of(value: Node) -> Node:
    return Seq((_QUOTE, value, _QUOTE))


# ---- numbers


def _pattern(text: str) -> Node:
    return regex_syntax.parse(text)


_INTEGER = _pattern(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = _pattern(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?")


# ---- schemas

_ANNOTATIONS = frozenset(("$defs", "x-guidance"))
#: Keywords that speak of what others beside them leave over, so that schemas with them cannot be put together.
_ELSEWHERE = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))


class _Writer:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self.definitions = definitions
        self._known: dict[str, Node] = {}

    def node(self, schema: Any, inside: tuple[str, ...]) -> Node:
        if schema is False:
            return Alt()
        if schema is True or not schema:
            raise NotRegularError("a part may be any JSON, which nests without end")
        schema = _flattened(schema)
        if "$ref" in schema:
            return self.reference(schema, inside)
        if "enum" in schema:
            return self.enumeration(schema)
        if "anyOf" in schema:
            _only(schema, "anyOf")
            return Alt(tuple(self.node(option, inside) for option in schema["anyOf"]))
        named = schema.get("type")
        if named is None:
            raise NotRegularError("a part has no type")
        types = [named] if isinstance(named, str) else named
        options = [_TYPES[name](self, schema, inside) for name in types if not (name == "integer" and "number" in types)]
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def reference(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        _only(schema, "$ref")
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in inside:
            raise NotRegularError("it refers to itself")
        if name not in self._known:
            self._known[name] = self.node(self.definitions[name], (*inside, name))
        return self._known[name]

    def enumeration(self, schema: Mapping[str, Any]) -> Node:
        _only(schema, "enum", "type")
        named = schema.get("type", (*TYPES,))
        types = {named} if isinstance(named, str) else set(named)
        return Alt(tuple(_constant(value) for value in schema["enum"] if _json_type(value) & types))

    def string(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" not in schema:
            return _string_of(Repeat(_CHAR, low, high))
        if low or high is not None:
            raise NotRegularError("a string has both a pattern and a length")
        core = schema["pattern"].removeprefix("^(?:").removesuffix(")$")
        return _string_of(quoted(regex_syntax.parse(core)))

    def integer(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        _unbounded(schema)
        return _INTEGER

    def number(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        _unbounded(schema)
        return _NUMBER

    def array(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        first = [self.node(part, inside) for part in schema.get("prefixItems", ())]
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        items = Alt() if high is not None and high <= len(first) else self.node(schema.get("items", True), inside)
        return Seq((literal("["), _listed(first, items, low, high), literal("]")))

    def object(self, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
        if any(k in schema for k in ("patternProperties", "minProperties", "maxProperties")):
            raise NotRegularError("an object has patterns of names, or a bound on their number")
        if schema.get("additionalProperties") is not False:
            raise NotRegularError("an object is open to properties that it does not name (set additionalProperties to false)")
        required, properties = set(schema.get("required", ())), schema.get("properties", {})
        members: list[tuple[Node, bool]] = []
        for name, part in properties.items():
            value = self.node(part, inside)
            if not regex_syntax.empty_language(value) or name in required:
                members.append((Seq((literal(json.dumps(name, ensure_ascii=False) + KEY), value)), name in required))
        if required - set(properties):
            return Alt()
        return Seq((literal("{"), _members(members), literal("}")))


_TYPES: dict[str, Callable[[_Writer, Mapping[str, Any], tuple[str, ...]], Node]] = {
    "null": lambda writer, schema, inside: literal("null"),
    "boolean": lambda writer, schema, inside: Alt((literal("true"), literal("false"))),
    "integer": _Writer.integer,
    "number": _Writer.number,
    "string": _Writer.string,
    "array": _Writer.array,
    "object": _Writer.object,
}


def _members(members: list[tuple[Node, bool]]) -> Node:
    """Members in order, the optional ones there or not, with separators between those that are there.

    Built from the end: what may follow with, and without, something before it.
    """
    after: Node = Seq()
    first: Node = Seq()
    for item, required in reversed(members):
        with_comma = Seq((literal(ITEM), item, after))
        alone = Seq((item, after))
        first = alone if required else Alt((alone, first))
        after = with_comma if required else Seq((Repeat(Seq((literal(ITEM), item)), 0, 1), after))
        if regex_syntax.size(first) > MAX_SIZE:
            raise NotRegularError(f"an object's expression has more than {MAX_SIZE:,} characters")
    return first


def _listed(first: list[Node], items: Node, low: int, high: int | None) -> Node:
    """Items with separators between: those of `first` in their places, then `items`, `low` to `high` in all."""
    if high is not None and high < low:
        return Alt()
    count = max(len(first), low) if high is None else high
    if count > 2_000:
        raise NotRegularError("an array has too many places to write out")
    comma = literal(ITEM)
    more = regex_syntax.empty_language(items)
    tail: Node = Seq() if high is not None or more else Repeat(Seq((comma, items)), 0, None)
    for place in reversed(range(count)):
        item = first[place] if place < len(first) else items
        here = Seq((item if place == 0 else Seq((comma, item)), tail))
        tail = here if place < low else Seq() if regex_syntax.empty_language(here) else Repeat(here, 0, 1)
    if count == 0 and high is None and not more:
        return Repeat(Seq((items, tail)), 0, 1)
    return tail


def _constant(value: Any) -> Node:
    """One value as it may be written."""
    if isinstance(value, str):
        return _string_of(quoted(literal(value)))
    if isinstance(value, list):
        return Seq((literal("["), *_separated([_constant(v) for v in value]), literal("]")))
    if isinstance(value, dict):
        members = [Seq((literal(json.dumps(k, ensure_ascii=False) + KEY), _constant(v))) for k, v in value.items()]
        return Seq((literal("{"), *_separated(members), literal("}")))
    return literal(json.dumps(value))


def _separated(parts: Sequence[Node]) -> list[Node]:
    return [piece for i, part in enumerate(parts) for piece in ((literal(ITEM), part) if i else (part,))]


def _json_type(value: Any) -> set[str]:
    return {type_of(value), *(("integer",) if isinstance(value, int) and not isinstance(value, bool) else ())}


def _flattened(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Takes away an allOf that says nothing twice."""
    merged = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and key != "allOf"}
    for part in schema.get("allOf", ()):
        if part is True:
            continue
        flat = {} if part is False else _flattened(part)
        clash = merged.keys() & flat.keys() - {"type"} or flat.get("type", merged.get("type")) != merged.get("type", flat.get("type"))
        if part is False or clash or (_ELSEWHERE & flat.keys() and _ELSEWHERE & merged.keys()):
            raise NotRegularError("it joins several schemas with allOf")
        merged |= flat
    return merged


def _only(schema: Mapping[str, Any], *keys: str) -> None:
    others = sorted(set(schema) - set(keys))
    if others:
        raise NotRegularError(f"{keys[0]} stands beside {', '.join(others)}")


def _unbounded(schema: Mapping[str, Any]) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if keyword in schema:
            raise NotRegularError(f"a number has {keyword}")
