"""Finds what `$ref` refers to, without a network: inside the schema, or in the drafts' own metaschemas.

`referencing` does the finding; this module adds the pointer that messages show, and words for what cannot be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonschema_specifications  # type: ignore[import-untyped]
from referencing import Registry, Resource
from referencing._core import Resolver
from referencing.exceptions import Unresolvable

from agentrt.errors import GrammarError
from agentrt.grammar.dialect import Dialect, dialect_of

#: What reading one schema may cost, in units of about 5 microseconds; a few hundred bytes of references can ask for any amount.
MAX_COST = 1_000_000


@dataclass(frozen=True)
class Scope:
    """Where in which schema we are: what a relative reference is relative to.

    Attributes:
        dialect: The draft.
        root: The whole schema.
        resolver: referencing's own scope.
        names: The tables of the whole schema, made on first use.
        entered: Identity of an object whose own id the resolver has taken in already, since it was looked up.
    """

    dialect: Dialect
    root: Any
    resolver: Resolver[Any]
    names: Names
    entered: int = 0

    @classmethod
    def of(cls, schema: Any) -> Scope:
        """The scope of a whole schema.

        Raises:
            GrammarError: Its dialect is not known.
        """
        dialect = dialect_of(schema)
        resource: Resource[Any] = dialect.specification.create_resource(schema)
        resolver = jsonschema_specifications.REGISTRY.with_resource("", resource).resolver_with_root(resource)
        return cls(dialect, schema, resolver, Names(schema))

    def into(self, node: dict[str, Any]) -> Scope:
        """The scope inside `node`, which may have an id of its own."""
        if node is self.root or id(node) == self.entered or not ("$id" in node or "id" in node):
            return self
        resource: Resource[Any] = self.dialect.specification.create_resource(node)
        if resource.id() is None:
            return self
        return Scope(self.dialect, self.root, self.resolver.in_subresource(resource), self.names)

    def spend(self, cost: int, pointer: str = "", keyword: str = "schema") -> None:
        """Counts work on the whole schema.

        Raises:
            GrammarError: It is more than any schema may cost.
        """
        self.names.spent += cost
        if self.names.spent > MAX_COST:
            raise GrammarError(
                f"the schema takes too long to read (its references, choices or values multiply); that was seen at {pointer or '/'!r}", pointer=pointer, keyword=keyword
            )

    def look_up(self, ref: Any, pointer: str, keyword: str) -> tuple[Any, Scope, str]:
        """What `ref` refers to, its scope and its pointer.

        Raises:
            GrammarError: There is no such thing here; nothing is ever fetched.
        """
        if not isinstance(ref, str):
            raise GrammarError(f"{keyword} at {pointer or '/'!r} is {ref!r}; it must be a string", pointer=pointer, keyword=keyword)
        try:
            found = self.resolver.lookup(ref)
        except (Unresolvable, ValueError, LookupError) as error:
            remote = ref.partition("#")[0]
            why = f"{remote!r} is not part of the schema, and nothing is fetched" if remote else "the schema has no such place"
            raise GrammarError(
                f"{keyword} at {pointer or '/'!r} refers to {ref!r}: {why}; put the definition under $defs", pointer=pointer, keyword=keyword
            ) from error
        where = self.names.pointers.get(id(found.contents), ref)
        return found.contents, Scope(self.dialect, self.root, found.resolver, self.names, id(found.contents)), where


class Names:
    """Tables over a whole schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self.spent = 0
        #: What is plainly true of schemas, by identity (see `complement`).
        self.outlines: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def pointers(self) -> dict[int, str]:
        """The JSON pointer of every object in the schema, by identity."""
        found: dict[int, str] = {}
        stack: list[tuple[Any, str]] = [(self._schema, "")]
        while stack:
            node, pointer = stack.pop()
            if isinstance(node, dict):
                found[id(node)] = pointer
                stack.extend((value, f"{pointer}/{escaped(key)}") for key, value in node.items())
            elif isinstance(node, list):
                stack.extend((value, f"{pointer}/{i}") for i, value in enumerate(node))
        return found

    @cached_property
    def dynamic_anchors(self) -> dict[str, int]:
        """How often each `$dynamicAnchor` is set."""
        counts: dict[str, int] = {}
        stack = [self._schema]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                name = node.get("$dynamicAnchor")
                if isinstance(name, str):
                    counts[name] = counts.get(name, 0) + 1
                stack.extend(node.values())
            elif isinstance(node, list):
                stack.extend(node)
        return counts


def escaped(key: str) -> str:
    """`key` as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def offline_registry() -> Registry[Any]:
    """The metaschemas of all drafts and nothing else."""
    registry: Registry[Any] = jsonschema_specifications.REGISTRY
    return registry
