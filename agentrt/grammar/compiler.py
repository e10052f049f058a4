"""From a `GrammarSpec` to a `CompiledGrammar`: which engine takes it, in which words, and what its ledger says.

JSON Schemas (alone, in tools and between tags) and lark grammars go to llguidance; regular expressions and choices to
the finite automaton. That depends on the spec alone, never on timing or use. A compiled grammar is immutable and
shared; each sequence has its own cursor. Compiled grammars are kept in a cache with a bound on count and bytes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llguidance

from agentrt.backend import Tokenizer
from agentrt.config import Limits
from agentrt.errors import GrammarError
from agentrt.grammar import regex_fsm, regex_syntax
from agentrt.grammar.composition import structural_lark, tools_lark
from agentrt.grammar.cursor import GrammarCursor, Matcher
from agentrt.grammar.killable import TooManyStatesError
from agentrt.grammar.ledger import Entry, Ledger, Standing, checked
from agentrt.grammar.llguidance_matcher import LlguidanceMatcher, compiled_template
from agentrt.grammar.normalize import Normalized, normalize
from agentrt.grammar.separators import SEPARATORS
from agentrt.grammar.verify import Verdict, verifier_of
from agentrt.grammar.vocabulary import Vocabulary, vocabulary_of
from agentrt.request import GrammarSpec


@dataclass(frozen=True)
class CompiledGrammar:
    """A constraint ready for use, shared by every sequence that asks for it.

    Attributes:
        spec: What it was compiled from.
        ledger: What is done about each keyword.
        engine: "llguidance" or "fsm".
    """

    spec: GrammarSpec
    ledger: Ledger
    engine: str
    _vocabulary: Vocabulary
    _matcher: Callable[[], Matcher]
    _verify: Verdict

    @property
    def checked(self) -> bool:
        """Whether a finished document must be verified before it is shown."""
        return bool(checked(self.ledger))

    def cursor(self) -> GrammarCursor:
        """A new cursor at the beginning."""
        return GrammarCursor(self._matcher(), self._vocabulary)

    def verify(self, text: str) -> list[str]:
        """What a finished text violates, one line each; empty if it satisfies the whole constraint."""
        return self._verify(text)


@dataclass(frozen=True)
class _Parts:
    ledger: Ledger
    engine: str
    matcher: Callable[[], Matcher]
    verify: Verdict


class GrammarCache:
    """Compiled grammars by content, the least recently used ones dropped beyond the bounds. Thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._kept: OrderedDict[tuple[int, GrammarSpec], CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec, tokenizer: Tokenizer) -> CompiledGrammar:
        """As the module's `compile`."""
        vocabulary = vocabulary_of(tokenizer)
        key = vocabulary.serial, spec
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        compiled = _compile(spec, vocabulary, self._limits)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = compiled
                self._bytes += len(spec.source)
            self._shrink()
        return compiled

    def _shrink(self) -> None:
        while self._kept and (
            len(self._kept) > self._limits.grammar_cache_count or self._bytes > self._limits.grammar_cache_bytes
        ):
            (_, spec), _ = self._kept.popitem(last=False)
            self._bytes -= len(spec.source)

    def __len__(self) -> int:
        return len(self._kept)


_cache = GrammarCache()


def compile(spec: GrammarSpec, tokenizer: Tokenizer, strict: bool = False) -> CompiledGrammar:
    """Compiles `spec` for the tokens of `tokenizer`, or finds it in the cache.

    Args:
        spec: The constraint.
        tokenizer: The model's tokenizer.
        strict: Refuse it if any keyword would only be CHECKED; so does `spec.strict`.

    Raises:
        GrammarError: It cannot be enforced, or is too large; names the place.
    """
    if strict and not spec.strict:
        spec = GrammarSpec(spec.kind, spec.source, spec.options, spec.engine, True, spec.jump_forward)
    return _cache.compile(spec, tokenizer)


def _compile(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> CompiledGrammar:
    size = len(spec.source.encode("utf-8", "surrogatepass"))
    if size > limits.grammar_bytes:
        raise GrammarError(f"the {spec.kind} has {size:,} bytes; the limit is {limits.grammar_bytes:,}", param=_FIELD[spec.kind])
    try:
        parts = _KINDS[spec.kind](spec, vocabulary, limits)
    except GrammarError as error:
        error.param = error.param or _FIELD[spec.kind]
        raise
    loose = checked(parts.ledger)
    if spec.strict and loose:
        first = loose[0]
        raise GrammarError(
            f"strict is set, but {first.keyword!r} at {first.pointer or '/'!r} can only be checked at the end ({first.why})",
            pointer=first.pointer,
            keyword=first.keyword,
            param=_FIELD[spec.kind],
        )
    return CompiledGrammar(spec, parts.ledger, parts.engine, vocabulary, parts.matcher, parts.verify)


_FIELD = {"json_schema": "json_schema", "regex": "regex", "choices": "choices", "lark": "ebnf", "tools": "tools", "structural": "grammar"}


# ---- llguidance


def _llguidance(grammar: str, vocabulary: Vocabulary) -> Callable[[], Matcher]:
    template = compiled_template(grammar, vocabulary)
    return lambda: LlguidanceMatcher(template)


#: Keywords to relax, step by step, when llguidance cannot take a schema as it was rewritten.
_LADDER: tuple[frozenset[str], ...] = tuple(
    frozenset(words.split())
    for words in (
        "",
        "pattern format patternProperties propertyNames",
        "pattern format patternProperties propertyNames minProperties maxProperties multipleOf unevaluatedProperties not if "
        "dependentRequired dependentSchemas dependencies",
        "pattern format patternProperties propertyNames minProperties maxProperties multipleOf unevaluatedProperties not if "
        "dependentRequired dependentSchemas dependencies oneOf anyOf allOf minimum maximum exclusiveMinimum exclusiveMaximum",
        "$ref properties items prefixItems additionalItems patternProperties additionalProperties allOf anyOf oneOf not if enum const "
        "pattern format propertyNames unevaluatedProperties unevaluatedItems dependentRequired dependentSchemas dependencies required "
        "minProperties maxProperties",
    )
)


def normalized_and_compiled(
    schema: Any, vocabulary: Vocabulary, compose: Callable[[Normalized], str], *, prefix: str = "", formats: bool = True
) -> tuple[Normalized, llguidance.LLMatcher]:
    """Normalises a schema and compiles what `compose` makes of it, relaxing more where llguidance cannot follow.

    Raises:
        GrammarError: The schema is malformed, refers to what is not there, or nothing can satisfy it.
    """
    for step, relaxed in enumerate(_LADDER):
        normal = normalize(schema, prefix, relaxed=relaxed, formats=formats)
        try:
            return normal, compiled_template(compose(normal), vocabulary)
        except GrammarError as error:
            if "nsatisfiable" in str(error):
                raise GrammarError(f"nothing can satisfy the schema: {error}", keyword=_last_keyword(normal.ledger)) from error
            if step == len(_LADDER) - 1:
                raise
    raise AssertionError("the last step returns or raises")


def _last_keyword(ledger: Ledger) -> str:
    return ledger[-1].keyword if ledger else "false"


def _json_schema(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    schema = _parsed(spec.source)
    formats = bool(spec.option("formats", True))

    def compose(normal: Normalized) -> str:
        return json.dumps({"grammars": [{"json_schema": normal.whole(SEPARATORS)}]}, ensure_ascii=False)

    normal, template = normalized_and_compiled(schema, vocabulary, compose, formats=formats)
    verdict = verifier_of(schema, formats=formats).verdict
    return _Parts(normal.ledger, "llguidance", lambda: LlguidanceMatcher(template), verdict)


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error


def _lark(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    matcher = _llguidance(json.dumps({"grammars": [{"lark_grammar": spec.source}]}), vocabulary)
    return _Parts((Entry("", "lark", Standing.ENFORCED),), "llguidance", matcher, _nothing_to_check)


def _tools(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    composed = tools_lark(json.loads(spec.source), spec)
    grammar = json.dumps({"grammars": [{"lark_grammar": composed.lark}]}, ensure_ascii=False)
    return _Parts(composed.ledger, "llguidance", _llguidance(grammar, vocabulary), composed.verify)


def _structural(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    composed = structural_lark(json.loads(spec.source), spec)
    grammar = json.dumps({"grammars": [{"lark_grammar": composed.lark}]}, ensure_ascii=False)
    return _Parts(composed.ledger, "llguidance", _llguidance(grammar, vocabulary), composed.verify)


def _nothing_to_check(text: str) -> list[str]:
    return []


# ---- the finite automaton


def _regex(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    node = regex_syntax.whole(regex_syntax.parse(spec.source))
    if regex_syntax.empty_language(node):
        raise GrammarError(f"nothing can match the pattern {spec.source[:80]!r}", pointer="0")
    pattern, size = regex_syntax.write(node), regex_syntax.size(node)
    entry = Entry("", "regex", Standing.ENFORCED)
    if spec.engine != "llguidance":
        try:
            automaton = regex_fsm.byte_automaton(pattern, size, limits.grammar_seconds)
            return _fsm(automaton, vocabulary, entry)
        except TooManyStatesError:
            if spec.engine == "fsm":
                raise
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: /{pattern}/"}]})
    return _Parts((entry,), "llguidance", _llguidance(grammar, vocabulary), _nothing_to_check)


def _choices(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    choices = json.loads(spec.source)
    automaton = regex_fsm.automaton_of_choices([choice.encode() for choice in choices])
    return _fsm(automaton, vocabulary, Entry("", "choices", Standing.ENFORCED))


def _fsm(automaton: regex_fsm.ByteAutomaton, vocabulary: Vocabulary, entry: Entry) -> _Parts:
    fsm = regex_fsm.TokenFsm(automaton, vocabulary)
    return _Parts((entry,), "fsm", lambda: regex_fsm.FsmMatcher(fsm), _nothing_to_check)


_KINDS: dict[str, Callable[[GrammarSpec, Vocabulary, Limits], _Parts]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choices": _choices,
    "lark": _lark,
    "tools": _tools,
    "structural": _structural,
}
