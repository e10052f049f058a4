"""Constraints: a spec becomes a compiled grammar with a ledger, a cursor and a final check. No torch, no engine.

Names load on first use, so that what needs only one of them stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "CompiledGrammar": "compiler",
    "GrammarCache": "compiler",
    "compile": "compiler",
    "GrammarCursor": "cursor",
    "fill_masks": "cursor",
    "SchemaReport": "check",
    "check_schema": "check",
    "compile_ahead": "check",
    "Entry": "ledger",
    "Standing": "ledger",
    "choices_spec": "spec",
    "json_schema_spec": "spec",
    "lark_spec": "spec",
    "parse_value": "spec",
    "regex_spec": "spec",
    "spec_from": "spec",
    "structural_spec": "spec",
    "tools_spec": "spec",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentrt.grammar' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"agentrt.grammar.{_HOME[name]}"), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from agentrt.grammar.check import SchemaReport as SchemaReport
    from agentrt.grammar.check import check_schema as check_schema
    from agentrt.grammar.check import compile_ahead as compile_ahead
    from agentrt.grammar.compiler import CompiledGrammar as CompiledGrammar
    from agentrt.grammar.compiler import GrammarCache as GrammarCache
    from agentrt.grammar.compiler import compile as compile
    from agentrt.grammar.cursor import GrammarCursor as GrammarCursor
    from agentrt.grammar.cursor import fill_masks as fill_masks
    from agentrt.grammar.ledger import Entry as Entry
    from agentrt.grammar.ledger import Standing as Standing
    from agentrt.grammar.spec import choices_spec as choices_spec
    from agentrt.grammar.spec import json_schema_spec as json_schema_spec
    from agentrt.grammar.spec import lark_spec as lark_spec
    from agentrt.grammar.spec import parse_value as parse_value
    from agentrt.grammar.spec import regex_spec as regex_spec
    from agentrt.grammar.spec import spec_from as spec_from
    from agentrt.grammar.spec import structural_spec as structural_spec
    from agentrt.grammar.spec import tools_spec as tools_spec
