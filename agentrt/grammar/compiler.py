"""From a `GrammarSpec` to a `CompiledGrammar`: which engine takes it, in which words, and what its ledger says.

JSON Schemas (alone, in tools and between tags) and lark grammars go to llguidance; regular expressions and choices to
the finite automaton, and so do schemas of the regular kind that ask for it or were compiled ahead of time. That never
depends on timing or use. A compiled grammar is immutable and
shared; each sequence has its own cursor. Compiled grammars are kept in a cache with a bound on count and bytes.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrt.backend import Tokenizer
from agentrt.config import Limits
from agentrt.errors import GrammarError
from agentrt.grammar import regex_fsm, regex_syntax, schema_regex
from agentrt.grammar.automaton_store import AutomatonStore
from agentrt.grammar.composition import Composition, lark_with_schemas, structural_lark, tools_lark
from agentrt.grammar.cursor import GrammarCursor, Matcher
from agentrt.grammar.killable import TooManyStatesError
from agentrt.grammar.ledger import Entry, Ledger, Standing, checked
from agentrt.grammar.llguidance_matcher import LlguidanceMatcher, compiled_template
from agentrt.grammar.normalize import Attempt, normalize
from agentrt.grammar.spec import FIELDS
from agentrt.grammar.verify import Verdict, verifier_of
from agentrt.grammar.vocabulary import Vocabulary, known_vocabulary, vocabulary_of
from agentrt.request import GrammarSpec


@dataclass(frozen=True)
class CompiledGrammar:
    """A constraint ready for use, shared by every sequence that asks for it.

    Attributes:
        spec: What it was compiled from.
        ledger: What is done about each keyword.
        engine: "llguidance" or "fsm".
        nbytes: About how much memory it takes; what the cache counts.
    """

    spec: GrammarSpec
    ledger: Ledger
    engine: str
    _vocabulary: Vocabulary
    _matcher: Callable[[], Matcher]
    _verify: Verdict
    nbytes: int = 0

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
    nbytes: int


_Kind = Callable[[GrammarSpec, Vocabulary, Limits], _Parts]


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
        found = self._found(key)
        if found is not None:
            return found
        compiled = _compile(spec, vocabulary, self._limits)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = compiled
                self._bytes += len(spec.source) + compiled.nbytes
            self._shrink()
        return compiled

    def find(self, spec: GrammarSpec, tokenizer: Tokenizer) -> CompiledGrammar | None:
        """What `compile` would give, if that takes no time: the spec was compiled before."""
        vocabulary = known_vocabulary(tokenizer)
        return None if vocabulary is None else self._found((vocabulary.serial, spec))

    def _found(self, key: tuple[int, GrammarSpec]) -> CompiledGrammar | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _shrink(self) -> None:
        while self._kept and (
            len(self._kept) > self._limits.grammar_cache_count or self._bytes > self._limits.grammar_cache_bytes
        ):
            (_, spec), dropped = self._kept.popitem(last=False)
            self._bytes -= len(spec.source) + dropped.nbytes

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
        raise GrammarError(f"the {spec.kind} has {size:,} bytes; the limit is {limits.grammar_bytes:,}", param=FIELDS[spec.kind])
    try:
        parts = _KINDS[spec.kind](spec, vocabulary, limits)
    except GrammarError as error:
        error.param = error.param or FIELDS[spec.kind]
        raise
    loose = checked(parts.ledger)
    if spec.strict and loose:
        first = loose[0]
        raise GrammarError(
            f"strict is set, but {first.keyword!r} at {first.pointer or '/'!r} can only be checked at the end ({first.why})",
            pointer=first.pointer,
            keyword=first.keyword,
            param=FIELDS[spec.kind],
        )
    return CompiledGrammar(spec, parts.ledger, parts.engine, vocabulary, parts.matcher, parts.verify, parts.nbytes)


# ---- llguidance

#: Keywords to relax, step by step, when llguidance cannot take a schema as it was rewritten.
_STEPS = (
    "pattern format patternProperties propertyNames",
    "minProperties maxProperties multipleOf unevaluatedProperties not if dependentRequired dependentSchemas dependencies",
    "oneOf anyOf allOf minimum maximum exclusiveMinimum exclusiveMaximum",
    "$ref properties items prefixItems additionalItems additionalProperties enum const unevaluatedItems required",
)
_LADDER = tuple(frozenset(" ".join(_STEPS[:count]).split()) for count in range(len(_STEPS) + 1))


@dataclass(frozen=True)
class _Built:
    """What one step of the ladder made: grammars in llguidance's form, the ledger, and the final check."""

    grammars: list[dict[str, Any]]
    ledger: Ledger
    verify: Verdict


def _with_llguidance(spec: GrammarSpec, vocabulary: Vocabulary, build: Callable[[Attempt], _Built]) -> _Parts:
    """Compiles what `build` makes, relaxing more where llguidance cannot follow.

    Raises:
        GrammarError: The constraint is malformed, refers to what is not there, or nothing can satisfy it.
    """
    plain = spec.jump_forward == "exact_masked"
    canonical = vocabulary.canonical  # otherwise text cannot be tokenised, so nothing is forced
    attempt: Attempt | None = Attempt()
    while attempt is not None:
        built = build(attempt)
        grammars = _without_forcing(built.grammars) if plain or not canonical else built.grammars
        try:
            template = compiled_template(json.dumps({"grammars": grammars}, ensure_ascii=False), vocabulary)
            break
        except GrammarError as error:
            attempt = _next_attempt(attempt, spec, built.ledger, error)
    return _Parts(built.ledger, "llguidance", lambda: LlguidanceMatcher(template, plain, forces=canonical), built.verify, 10 * len(spec.source))


def _next_attempt(attempt: Attempt, spec: GrammarSpec, ledger: Ledger, error: GrammarError) -> Attempt:
    """What to try after llguidance refused; raises GrammarError if nothing is left to try."""
    if "nsatisfiable" in str(error):
        name = re.search(r"while processing \S*#/\$defs/([^\s;]+)", str(error))
        if name is None or name[1] in attempt.never:
            raise GrammarError(f"nothing can satisfy the constraint: {error}", keyword=ledger[-1].keyword if ledger else "false") from error
        return Attempt(attempt.relaxed, attempt.never | {name[1]})
    step = _LADDER.index(attempt.relaxed) + 1
    if step == len(_LADDER) or spec.kind == "lark":
        raise error
    return Attempt(_LADDER[step])


def _without_forcing(grammars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same grammars, with masks that do not narrow forced text to its canonical tokens."""
    option = '%llguidance {"no_forcing": true}\n'
    if "lark_grammar" in grammars[0]:
        return [{**grammars[0], "lark_grammar": option + grammars[0]["lark_grammar"]}, *grammars[1:]]
    return [{"lark_grammar": option + "start: @document"}, {"name": "document", **grammars[0]}]


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the constraint is not JSON: {error}") from error


def _json_schema(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    schema, formats = _parsed(spec.source), bool(spec.option("formats", True))
    verify = verifier_of(schema, formats=formats).verdict

    def build(attempt: Attempt) -> _Built:
        normal = normalize(schema, attempt=attempt, formats=formats)
        return _Built([{"json_schema": normal.whole()}], normal.ledger, verify)

    if spec.engine != "llguidance":
        built = _json_automaton(spec, schema, formats, limits)
        if built is not None:
            return _fsm(spec, built[0], vocabulary, built[1], verify)
    return _with_llguidance(spec, vocabulary, build)


def _json_automaton(spec: GrammarSpec, schema: Any, formats: bool, limits: Limits) -> tuple[regex_fsm.ByteAutomaton, Ledger] | None:
    """The automaton of a schema that was compiled ahead of time, or asks for it and is regular; None where it stays on llguidance."""
    kept = AutomatonStore().load(spec)
    if kept is None and spec.engine != "fsm":
        return None
    normal = normalize(schema, formats=formats)
    try:
        return kept or automaton_of(schema_regex.regex_of(normal.schema, normal.definitions), limits), normal.ledger
    except (schema_regex.NotRegularError, TooManyStatesError):
        return None


def automaton_of(node: regex_syntax.Node, limits: Limits) -> regex_fsm.ByteAutomaton:
    """The automaton of a pattern.

    Raises:
        TooManyStatesError: It would be too large.
        GrammarError: It takes too long to compile.
    """
    return regex_fsm.byte_automaton(regex_syntax.write(node), regex_syntax.size(node), 0.8 * limits.grammar_seconds)


def _lark(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    def build(attempt: Attempt) -> _Built:
        lark, ledger = lark_with_schemas(spec.source, attempt)
        return _Built([{"lark_grammar": lark}], ledger, _nothing_to_check)

    return _with_llguidance(spec, vocabulary, build)


def _composed(compose: Callable[[Any, GrammarSpec, Attempt], Composition]) -> _Kind:
    def compile_kind(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
        source = _parsed(spec.source)

        def build(attempt: Attempt) -> _Built:
            made = compose(source, spec, attempt)
            return _Built([{"lark_grammar": made.lark}], made.ledger, made.verify)

        return _with_llguidance(spec, vocabulary, build)

    return compile_kind


def _nothing_to_check(text: str) -> list[str]:
    return []


# ---- the finite automaton


def _regex(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    node = regex_syntax.whole(regex_syntax.parse(spec.source))
    if regex_syntax.empty_language(node):
        raise GrammarError(f"nothing can match the pattern {spec.source[:80]!r}", pointer="0")
    ledger = (Entry("", "regex", Standing.ENFORCED),)
    if spec.engine != "llguidance":
        try:
            return _fsm(spec, automaton_of(node, limits), vocabulary, ledger, _nothing_to_check)
        except TooManyStatesError:
            if spec.engine == "fsm":
                raise
    lark = f"start: TEXT\nTEXT: /{regex_syntax.write(node)}/"
    return _with_llguidance(spec, vocabulary, lambda _: _Built([{"lark_grammar": lark}], ledger, _nothing_to_check))


def _choices(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> _Parts:
    choices = json.loads(spec.source)
    automaton = regex_fsm.automaton_of_choices([choice.encode() for choice in choices])
    return _fsm(spec, automaton, vocabulary, (Entry("", "choices", Standing.ENFORCED),), _nothing_to_check)


def _fsm(spec: GrammarSpec, automaton: regex_fsm.ByteAutomaton, vocabulary: Vocabulary, ledger: Ledger, verify: Verdict) -> _Parts:
    fsm, plain = regex_fsm.TokenFsm(automaton, vocabulary), spec.jump_forward == "exact_masked"
    return _Parts(ledger, "fsm", lambda: regex_fsm.FsmMatcher(fsm, plain), verify, fsm.nbytes)


_KINDS: dict[str, _Kind] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choices": _choices,
    "lark": _lark,
    "tools": _composed(tools_lark),
    "structural": _composed(structural_lark),
}
