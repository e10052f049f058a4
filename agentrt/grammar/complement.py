"""Two questions about schemas, answered soundly: what is the complement of one, and can two hold at once.

Both say "I do not know" (None, False) rather than guess: an answer is used to rewrite `not`, `if` and `oneOf` exactly, so a
wrong one would make constrained output wrong. The schemas here are as their author wrote them; references are
followed through the scope.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.references import Scope

TYPES = ("null", "boolean", "number", "string", "array", "object")
_SILENT = frozenset(
    ("$schema", "$comment", "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated", "$defs", "definitions")
)
#: Options of a rewritten `anyOf`, so that nested splits do not multiply without end.
MAX_OPTIONS = 64

Schema = Any


def type_of(value: Any) -> str:
    """The JSON type of a value; whole numbers are numbers here."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


# ---- complements


def complement(schema: Schema, scope: Scope, depth: int = 0) -> Schema | None:
    """A schema that holds exactly where `schema` does not, or None if this module cannot say it."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > 8:
        return None
    scope.spend(2, keyword="not")
    if "$ref" in schema:
        return _complement_of_reference(schema, scope, depth)
    options: list[Schema] = []
    for keyword, value in schema.items():
        if keyword in _SILENT or (keyword in ("then", "else") and "if" not in schema):
            continue
        rule = _COMPLEMENTS.get(keyword) if scope.dialect.knows(keyword) else None
        part = rule(value, schema, scope, depth) if rule is not None else None
        if part is None:
            return None
        options += part
    return _any_of(options)


def _any_of(options: list[Schema]) -> Schema | None:
    options = [option for option in options if option is not False]
    if any(option is True for option in options):
        return True
    if len(options) > MAX_OPTIONS:
        return None
    return False if not options else options[0] if len(options) == 1 else {"anyOf": options}


def _complement_of_reference(schema: dict[str, Any], scope: Scope, depth: int) -> Schema | None:
    if not scope.dialect.ref_alone and any(k not in _SILENT and k != "$ref" for k in schema):
        return None
    target, inner, _ = scope.look_up(schema["$ref"], "", "$ref")
    if inner.resolver is not scope.resolver and isinstance(target, dict) and "$ref" in str(target):
        return None  # relative references inside would be read in the wrong scope
    return complement(target, inner, depth + 1)


def _not_type(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or ("integer" in named and "number" not in named):
        return None
    others = [t for t in TYPES if t not in named]
    return [{"type": others}] if others else []


def _not_enum(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    if not isinstance(value, list) or len(value) > MAX_OPTIONS:
        return None
    options: list[Schema] = [{"type": [t for t in TYPES if t not in set(map(type_of, value))]}]
    if not options[0]["type"]:
        options.clear()
    strings = [v for v in value if isinstance(v, str)]
    if strings:
        options.append({"type": "string", "pattern": pattern_without(strings)})
    if booleans := {v for v in value if isinstance(v, bool)}:
        options += [{"const": flag} for flag in (True, False) if flag not in booleans]
    numbers = sorted({v for v in value if type_of(v) == "number"})
    options += _outside(numbers)
    if any(type_of(v) in ("array", "object") for v in value):
        return None
    return options


def _outside(numbers: list[float]) -> list[Schema]:
    if not numbers:
        return []
    edges = [-math.inf, *numbers, math.inf]
    gaps = []
    for low, high in itertools.pairwise(edges):
        gap: dict[str, Any] = {"type": "number"}
        if low > -math.inf:
            gap["exclusiveMinimum"] = low
        if high < math.inf:
            gap["exclusiveMaximum"] = high
        gaps.append(gap)
    return gaps


def pattern_without(texts: list[str]) -> str:
    """A pattern of every string but `texts`: the ways to leave their prefix tree."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^(?:{_leaving(root)})$"


def _leaving(node: dict[str, Any]) -> str:
    chars = [c for c in node if c]
    ways = [] if "" in node else [""]
    ways += [regex_syntax.write(regex_syntax.literal(c)) + _group(_leaving(node[c])) for c in chars]
    others = regex_syntax.complement(regex_syntax.union([(ord(c), ord(c)) for c in chars]))
    ways.append(regex_syntax.write(regex_syntax.Seq((regex_syntax.Chars(others), regex_syntax.ANY_TEXT))))
    return "|".join(ways)


def _group(text: str) -> str:
    return f"(?:{text})"


def _not_const(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    return _not_enum([value], schema, scope, depth)


def _not_required(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("required is not a list of names")
    return [{"type": "object", "properties": {name: False}} for name in value]


def _not_properties(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    if not isinstance(value, dict):
        return None
    options = []
    for name, part in value.items():
        opposite = complement(part, scope, depth + 1)
        if opposite is None:
            return None
        if opposite is not False:
            options.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return options


def _not_all_of(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    parts = [complement(part, scope, depth + 1) for part in value]
    return None if any(part is None for part in parts) else parts


def _not_any_of(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    parts = _not_all_of(value, schema, scope, depth)
    return None if parts is None else [{"allOf": parts}]


def _not_not(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
    return [value]


def _bound(kind: str, opposite: str, step: int) -> Callable[..., list[Schema] | None]:
    """Complement of a bound: the opposite bound, `step` further for counts."""

    def rule(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or ("exclusive" in opposite and value is True):
            return None
        if step and value + step < 0:
            return []
        return [{"type": kind, opposite: value + step}]

    return rule


def _number_bound(opposite: str) -> Callable[..., list[Schema] | None]:
    inner = _bound("number", opposite, 0)

    def rule(value: Any, schema: Schema, scope: Scope, depth: int) -> list[Schema] | None:
        if any(isinstance(schema.get(k), bool) for k in ("exclusiveMinimum", "exclusiveMaximum")):
            return None  # draft 4's form
        return inner(value, schema, scope, depth)

    return rule


_COMPLEMENTS: dict[str, Callable[..., list[Schema] | None]] = {
    "type": _not_type,
    "enum": _not_enum,
    "const": _not_const,
    "required": _not_required,
    "properties": _not_properties,
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "not": _not_not,
    "minimum": _number_bound("exclusiveMaximum"),
    "maximum": _number_bound("exclusiveMinimum"),
    "exclusiveMinimum": _number_bound("maximum"),
    "exclusiveMaximum": _number_bound("minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
}


# ---- disjointness


@dataclass
class _Outline:
    """What is plainly true of every document that satisfies a schema."""

    types: set[str]
    values: list[Any] | None = None
    properties: dict[str, list[tuple[Any, Scope]]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    closed: list[set[str]] = field(default_factory=list)  #: each: no names but these


def disjoint(left: Schema, right: Schema, scope: Scope, depth: int = 0) -> bool:
    """Whether no document can satisfy both; False if that cannot be seen."""
    if left is False or right is False:
        return True
    if depth > 4:
        return False
    scope.spend(1, keyword="oneOf")
    mine, other = _outline(left, scope), _outline(right, scope)
    if mine is None or other is None:
        return False
    return _outlines_disjoint(mine, other, depth)


def _outlines_disjoint(mine: _Outline, other: _Outline, depth: int) -> bool:
    if not mine.types & other.types:
        return True
    if mine.values is not None and other.values is not None:
        return not any(_same(a, b) for a in mine.values for b in other.values)
    if mine.types & other.types != {"object"}:
        return False
    for names, required in ((closed, other.required) for closed in mine.closed):
        if required - names:
            return True
    for names, required in ((closed, mine.required) for closed in other.closed):
        if required - names:
            return True
    return any(_property_disjoint(mine, other, name, depth) for name in mine.required | other.required)


def _property_disjoint(mine: _Outline, other: _Outline, name: str, depth: int) -> bool:
    ours, theirs = mine.properties.get(name, ()), other.properties.get(name, ())
    if any(schema is False for schema, _ in (*ours, *theirs)):
        return True
    return any(
        _outlines_disjoint(a, b, depth + 1)
        for a in (_outline(schema, scope) for schema, scope in ours)
        for b in (_outline(schema, scope) for schema, scope in theirs)
        if a is not None and b is not None and depth < 4
    )


def _same(a: Any, b: Any) -> bool:
    return type_of(a) == type_of(b) and bool(a == b)


def _outline(schema: Schema, scope: Scope) -> _Outline | None:
    """The outline, or None if the schema is malformed; made once a schema (which is kept beside it, so that ids stay its own)."""
    known = scope.names.outlines.get(id(schema))
    if known is not None:
        return cast(_Outline | None, known[1])
    outline: _Outline | None = _Outline(set(TYPES))
    try:
        _add_to(cast(_Outline, outline), schema, scope, 0)
    except (GrammarError, TypeError, AttributeError):
        outline = None
    scope.names.outlines[id(schema)] = schema, outline
    return outline


def _add_to(outline: _Outline, schema: Schema, scope: Scope, depth: int) -> None:
    if not isinstance(schema, Mapping) or depth > 8:
        return
    scope.spend(2, keyword="oneOf")
    scope = scope.into(dict(schema)) if "$id" in schema or "id" in schema else scope
    if "$ref" in schema:
        target, inner, _ = scope.look_up(schema["$ref"], "", "$ref")
        if target is False:
            outline.types.clear()
        _add_to(outline, target, inner, depth + 1)
        if scope.dialect.ref_alone:
            return
    for part in schema.get("allOf", ()):
        _add_to(outline, part, scope, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            _add_union(outline, schema[keyword], scope)
    _add_plain(outline, schema, scope)


def _add_union(outline: _Outline, options: list[Any], scope: Scope) -> None:
    outlines = [_outline(option, scope) for option in options]
    known = [o for o in outlines if o is not None]
    if len(known) < len(outlines):
        return
    outline.types &= set().union(*(o.types for o in known))
    if all(o.values is not None for o in known):
        _narrow(outline, [v for o in known for v in o.values or ()])
    outline.required |= set.intersection(*(o.required for o in known))


def _narrow(outline: _Outline, values: list[Any]) -> None:
    outline.values = values if outline.values is None else [v for v in values if any(_same(v, w) for w in outline.values)]
    outline.types &= set(map(type_of, outline.values))


def _add_plain(outline: _Outline, schema: Mapping[str, Any], scope: Scope) -> None:
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        outline.types &= {"number" if name == "integer" else name for name in named}
    if "const" in schema and scope.dialect.knows("const"):
        _narrow(outline, [schema["const"]])
    if "enum" in schema:
        _narrow(outline, schema["enum"])
    outline.required |= set(schema.get("required", ()))
    for name, part in schema.get("properties", {}).items():
        outline.properties.setdefault(name, []).append((part, scope))
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        outline.closed.append(set(schema.get("properties", ())))
