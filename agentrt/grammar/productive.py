"""Finds schemas that no finite document satisfies, such as a tree whose every node must have a child.

A grammar for one would force text without end. Definitions are productive if a document of finite size can satisfy
them; what is not plainly unproductive counts as productive. It reads normalised schemas only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrt.errors import GrammarError

Known = Callable[[str], bool]


def refuse_endless(root: Any, definitions: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises a GrammarError if every document of `root` would be infinite; `origins` are the definitions' pointers."""
    productive: set[str] = set()
    users = _users(definitions)
    waiting = list(definitions)
    while waiting:
        name = waiting.pop()
        if name not in productive and _ends(definitions[name], productive.__contains__):
            productive.add(name)
            waiting += users[name]
    if len(productive) < len(definitions) and not _ends(root, productive.__contains__):
        name = next(name for name in definitions if name not in productive)
        pointer = origins.get(name, "")
        raise GrammarError(
            f"the schema at {pointer or '/'!r} requires itself, so no document of finite size satisfies it; make the part optional",
            pointer=pointer,
            keyword="$ref",
        )


def _users(definitions: Mapping[str, Any]) -> dict[str, list[str]]:
    """For each definition, those that refer to it."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, schema in definitions.items():
        stack = [schema]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                target = node.get("$ref")
                if isinstance(target, str):
                    users.get(target.removeprefix("#/$defs/"), []).append(name)
                stack.extend(node.values())
            elif isinstance(node, list):
                stack.extend(node)
    return users


def _ends(schema: Any, known: Known) -> bool:
    """Whether a finite document may satisfy `schema`, as far as its references are known."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema and not known(schema["$ref"].removeprefix("#/$defs/")):
        return False
    if any(not _ends(part, known) for part in schema.get("allOf", ())):
        return False
    options = schema.get("anyOf")
    if options and not any(_ends(option, known) for option in options):
        return False
    return _object_ends(schema, known) and _array_ends(schema, known)


def _object_ends(schema: Mapping[str, Any], known: Known) -> bool:
    if schema.get("type") != "object":
        return True
    properties = schema.get("properties", {})
    return all(_ends(properties[name], known) for name in schema.get("required", ()) if name in properties)


def _array_ends(schema: Mapping[str, Any], known: Known) -> bool:
    least = schema.get("minItems", 0)
    if schema.get("type") != "array" or not least:
        return True
    first = schema.get("prefixItems", [])[:least]
    rest = schema.get("items", True) if least > len(first) else True
    return all(_ends(part, known) for part in (*first, rest))
