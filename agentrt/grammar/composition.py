"""Free text and constrained spans in one grammar: calls of tools, and structural tags.

Both become a lark grammar for llguidance: text up to a trigger, then the rest of the beginning, a JSON document that
follows its schema, and the end. Free text never contains a trigger, so that what looks like a call is one. The final
check finds the spans again and validates each document against its own schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.ledger import Entry, Ledger, Standing
from agentrt.grammar.normalize import Attempt, Normalized, normalize
from agentrt.grammar.verify import Verdict, Verifier, verifier_of
from agentrt.request import GrammarSpec
from agentrt.text.bare_call import bare_head


@dataclass(frozen=True)
class Composition:
    """A lark grammar, the ledger of every schema in it, and the final check of a whole text."""

    lark: str
    ledger: Ledger
    verify: Verdict


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls: `open` (`begin` call `end`) (`separator` ...)* `close`. Hermes' form by default.

    Attributes:
        trigger: The beginning of `open + begin` from which on a text is a call.
        name_key, arguments_key: Keys of the call's object.
        bare: An answer that begins as a call's object does is a call, though its frame is missing; small models forget it.
    """

    open: str = ""
    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    separator: str = "\n"
    close: str = ""
    trigger: str = "<tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"
    bare: bool = False

    @classmethod
    def from_spec(cls, spec: GrammarSpec) -> CallForm:
        """Reads the form out of the spec's options.

        Raises:
            GrammarError: The trigger is not how a call begins.
        """
        names = cls.__dataclass_fields__
        form = cls(**{name: value for name, value in spec.options if name in names})  # type: ignore[arg-type]
        start = form.open + form.begin
        if spec.option("trigger") is None and not start.startswith(form.trigger):
            form = replace(form, trigger=start)
        if not start.startswith(form.trigger):
            raise GrammarError(f"the trigger {form.trigger!r} is not how a call begins ({start!r})", keyword="trigger", param="tools")
        return form


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _text_without(triggers: Sequence[str]) -> str:
    """A terminal of text in which no trigger occurs."""
    found = regex_syntax.write(regex_syntax.Alt(tuple(map(regex_syntax.literal, triggers))))
    return f"/(?s:.*)/ & ~/(?s:.*)({found})(?s:.*)/"


# ---- tools


def tools_lark(functions: Sequence[Mapping[str, Any]], spec: GrammarSpec, attempt: Attempt) -> Composition:
    """The grammar of a `tools` spec; `functions` are its source, `attempt` what earlier ones taught."""
    form = CallForm.from_spec(spec)
    choice = str(spec.option("tool_choice", "auto"))
    offered = [f for f in functions if choice in ("auto", "required", f["name"])]
    document, ledger = _any_call(offered, functions, form, attempt)
    answer = spec.option("answer_schema")
    rules = [f"call: {_quoted(form.begin)} document {_quoted(form.end)}", f"document: {_json(document)}"]
    many = bool(spec.option("parallel", True)) and choice in ("auto", "required")
    rest = f"({_quoted(form.separator)} call)*" if many else ""
    calls = f"{_quoted(form.open)} call {rest} {_quoted(form.close)}"
    verifiers = {f["name"]: verifier_of(f["parameters"]) for f in offered}
    answer_verifier = None
    if choice != "auto":
        rules.append(f"start: {calls}")
    elif answer is not None:
        normal = normalize(json.loads(answer), attempt=attempt)
        answer_verifier = verifier_of(json.loads(answer))
        ledger = (*ledger, *normal.ledger)
        rules += [f"start: answer | {calls}", f"answer: {_json(normal.whole())}"]
    else:
        rules += _auto_rules(form, rest, calls)
        if form.bare:
            rules = _with_bare_calls(rules, form, offered, functions, attempt)
    return Composition("\n".join(rules), ledger, _CallCheck(form, verifiers, answer_verifier))


def _auto_rules(form: CallForm, rest: str, calls: str) -> list[str]:
    start = form.open + form.begin
    if not start:  # a call is told from text by its first character
        return [f"start: {calls} | TEXT |", "TEXT: /[^\\{](?s:.*)/"]
    first = f"{_quoted(start[len(form.trigger) :])} document {_quoted(form.end)}"
    return [
        f"start: TEXT | head {first} {rest} {_quoted(form.close)}",
        f"head[lazy]: /(?s:.*)/ {_quoted(form.trigger)}",
        f"TEXT: {_text_without([form.trigger])}",
    ]


def _with_bare_calls(
    rules: list[str], form: CallForm, offered: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], attempt: Attempt
) -> list[str]:
    """The rules of free text and framed calls, with bare calls beside them.

    Lexemes decide which it is: what begins as a bare call is no free text, nor text before a framed call. There is one bare
    call at most, since a model that forgets the frame also forgets to stop.
    """
    bare, heads = [], []
    for function in offered:
        number = functions.index(function)
        normal = normalize(function["parameters"], prefix=f"t{number}.", attempt=attempt)
        for kind, end in (("bare", r"/[ \n]{0,12}\}/"), ("fenced", r"/[ \n]{0,12}\}[ \n]{0,12}```/")):
            head = _bare_head(form, function["name"], fenced=kind == "fenced")
            heads.append(head)
            bare.append(f"{kind}_{number}")
            rules += [f"{kind}_{number}: {kind.upper()}_{number} bare_arguments_{number} {end}", f"{kind.upper()}_{number}: /{head}/"]
        rules.append(f"bare_arguments_{number}: {_json(normal.whole())}")
    not_bare = f"/(?s:.*)/ & ~/({'|'.join(heads)})(?s:.*)/"
    changed = {
        "start: TEXT |": "start: bare_call | TEXT |",
        "head[lazy]: /(?s:.*)/": "head[lazy]: BEFORE",
        "TEXT: /(?s:.*)/": f"TEXT: {not_bare}",
    }
    for old, new in changed.items():
        rules = [new + rule[len(old) :] if rule.startswith(old) else rule for rule in rules]
    return [*rules, f"bare_call: {' | '.join(bare)}", f"BEFORE: {not_bare}"]


def _bare_head(form: CallForm, name: str, *, fenced: bool) -> str:
    def escape(text: str) -> str:
        return regex_syntax.write(regex_syntax.literal(text)).replace("/", r"\/")

    return bare_head(name, form.name_key, form.arguments_key, escape=escape, fenced=fenced)


def _any_call(
    offered: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], form: CallForm, attempt: Attempt
) -> tuple[dict[str, Any], Ledger]:
    options: list[Any] = []
    definitions: dict[str, Any] = {}
    ledger: list[Entry] = []
    spelled = False
    for function in offered:
        number = functions.index(function)
        try:
            normal = normalize(function["parameters"], prefix=f"t{number}.", attempt=attempt)
        except GrammarError as error:
            error.pointer = f"/{number}/parameters{error.pointer}"
            raise
        definitions |= normal.definitions
        spelled |= normal.spelled
        ledger += [replace(e, pointer=f"/{number}/parameters{e.pointer}") for e in normal.ledger]
        options.append(_call_schema(function["name"], normal.schema, form))
    schema = options[0] if len(options) == 1 else {"anyOf": options}
    whole = Normalized(schema, definitions, tuple(ledger), spelled)
    return whole.whole(), whole.ledger


def _call_schema(name: str, parameters: Any, form: CallForm) -> dict[str, Any]:
    keys = [form.name_key, form.arguments_key]
    properties = {form.name_key: {"const": name}, form.arguments_key: parameters}
    return {"type": "object", "properties": properties, "required": keys, "additionalProperties": False}


@dataclass(frozen=True)
class _CallCheck:
    form: CallForm
    verifiers: Mapping[str, Verifier]
    answer: Verifier | None

    def __call__(self, text: str) -> list[str]:
        if self.answer is not None and not text.startswith(self.form.open + self.form.begin or "{"):
            return self.answer.verdict(text)
        return [line for number, call in enumerate(self._calls(text)) for line in self._violations(number, call)]

    def _calls(self, text: str) -> Iterator[Any]:
        form = self.form
        if form.bare and self._bare(text):
            yield _decoded(text, text.index("{"))[0]
            return
        at = text.find(form.open) if form.open else 0
        while at >= 0:
            at = text.find(form.begin, at)
            if at < 0 or (not form.begin and not text.startswith("{", at)):
                return
            call, at = _decoded(text, at + len(form.begin))
            yield call
            at += len(form.end)
            if form.begin == "":
                at = at + len(form.separator) if text.startswith(form.separator, at) else -1

    def _bare(self, text: str) -> bool:
        form = self.form
        heads = (bare_head(n, form.name_key, form.arguments_key, escape=re.escape, fenced=text.startswith("`")) for n in self.verifiers)
        return any(re.match(head, text) for head in heads)

    def _violations(self, number: int, call: Any) -> list[str]:
        if not isinstance(call, dict):
            return [f"call {number}: not a JSON object"]
        name = call.get(self.form.name_key)
        if not isinstance(name, str) or name not in self.verifiers:
            return [f"call {number}: {name!r} is not one of the tools"]
        found = self.verifiers[name].violations(call.get(self.form.arguments_key))
        return [f"call {number} ({name}): {line}" for line in found]


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON document at `at` and where it ends; None and the text's end if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, len(text)


# ---- lark


def lark_with_schemas(source: str, attempt: Attempt) -> tuple[str, Ledger]:
    """A user's lark grammar, with each ``%json {...}`` in it normalised as a schema alone would be.

    Raises:
        GrammarError: A schema needs the final check, which finds no documents in text of a grammar's own form.
    """
    parts, ledger, at, number = [], [Entry("", "lark", Standing.ENFORCED)], 0, 0
    for match in re.finditer(r"%json\s*(?=\{)", source):
        if match.start() < at:
            continue  # inside a schema that was read already
        schema, end = _decoded(source, match.end())
        if schema is None:
            raise GrammarError("the schema after %json is not JSON", pointer=f"%json {number}", keyword="%json")
        own = schema.pop("x-guidance", {})
        normal = normalize(schema, prefix=f"j{number}.", attempt=attempt)
        _refuse_checked(normal.ledger, number)
        ledger += [replace(e, pointer=f"%json {number}{e.pointer}") for e in normal.ledger]
        whole = normal.whole()
        parts += [source[at : match.start()], _json({**whole, "x-guidance": {**whole["x-guidance"], **own}})]
        at, number = end, number + 1
    return "".join([*parts, source[at:]]), tuple(ledger)


def _refuse_checked(ledger: Ledger, number: int) -> None:
    for entry in ledger:
        if entry.standing is Standing.CHECKED:
            raise GrammarError(
                f"{entry.keyword} at {entry.pointer or '/'!r} of %json {number} can only be checked at the end ({entry.why}), "
                "which a lark grammar has no way to; use json_schema, tools or structural tags",
                pointer=f"%json {number}{entry.pointer}",
                keyword=entry.keyword,
            )


# ---- structural tags


def structural_lark(tags: Sequence[Mapping[str, Any]], spec: GrammarSpec, attempt: Attempt) -> Composition:
    """The grammar of a `structural` spec; `tags` are its source, `attempt` what earlier ones taught.

    Raises:
        GrammarError: A tag is malformed; `pointer` says which.
    """
    if not tags:
        raise GrammarError("there are no tags; write at least one, with 'begin', 'end' and 'json_schema', 'regex' or 'lark'", param="grammar")
    ledger: list[Entry] = []
    verifiers: list[Verifier | None] = []
    by_trigger: dict[str, list[str]] = {}
    rules: list[str] = []
    for number, tag in enumerate(tags):
        trigger = _trigger(tag, number)
        by_trigger.setdefault(trigger, []).append(f"{_quoted(tag['begin'][len(trigger) :])} body_{number} {_quoted(tag.get('end', ''))}")
        body, entries, verifier = _body(tag, number, attempt)
        rules.append(f"body_{number}: {body}")
        ledger += entries
        verifiers.append(verifier)
    _refuse_overlaps(list(by_trigger))
    for number, (trigger, options) in enumerate(by_trigger.items()):
        rules += [f"head_{number}[lazy]: /(?s:.*)/ {_quoted(trigger)}", f"tag_{number}: head_{number} ({' | '.join(options)})"]
    any_tag = "(" + " | ".join(f"tag_{n}" for n in range(len(by_trigger))) + ")"
    rules += [f"start: {_structure(any_tag, spec)}", f"TEXT: {_text_without(list(by_trigger))}"]
    return Composition("\n".join(rules), tuple(ledger), _TagCheck(tuple(tags), tuple(verifiers)))


def _structure(any_tag: str, spec: GrammarSpec) -> str:
    must, once = bool(spec.option("at_least_one")), bool(spec.option("stop_after_first"))
    if once:
        return any_tag if must else f"{any_tag} | TEXT"
    return f"{any_tag}{'+' if must else '*'} TEXT"


def _trigger(tag: Mapping[str, Any], number: int) -> str:
    begin = tag.get("begin")
    if not isinstance(begin, str) or not begin:
        raise GrammarError(f"tag {number} has no 'begin'", pointer=f"/{number}/begin", keyword="begin", param="grammar")
    trigger = tag.get("trigger", begin)
    if not isinstance(trigger, str) or not trigger or not begin.startswith(trigger):
        raise GrammarError(f"tag {number}: trigger {trigger!r} is not a beginning of {begin!r}", pointer=f"/{number}/trigger", keyword="trigger", param="grammar")
    return trigger


def _refuse_overlaps(triggers: Sequence[str]) -> None:
    for one in triggers:
        for other in triggers:
            if one != other and one in other:
                raise GrammarError(f"trigger {one!r} occurs in trigger {other!r}; only the shorter one could ever be met", keyword="trigger", param="grammar")


def _body(tag: Mapping[str, Any], number: int, attempt: Attempt) -> tuple[str, list[Entry], Verifier | None]:
    kinds = [kind for kind in ("json_schema", "regex") if kind in tag]
    if len(kinds) != 1:
        raise GrammarError(f"tag {number} needs one of 'json_schema' and 'regex'", pointer=f"/{number}", param="grammar")
    if kinds == ["regex"]:
        pattern = regex_syntax.write(regex_syntax.whole(regex_syntax.parse(tag["regex"])))
        return f"/{pattern}/", [Entry(f"/{number}/regex", "regex", Standing.ENFORCED)], None
    normal = normalize(tag["json_schema"], prefix=f"g{number}.", attempt=attempt)
    entries = [replace(e, pointer=f"/{number}/json_schema{e.pointer}") for e in normal.ledger]
    return _json(normal.whole()), entries, verifier_of(tag["json_schema"])


@dataclass(frozen=True)
class _TagCheck:
    tags: tuple[Mapping[str, Any], ...]
    verifiers: tuple[Verifier | None, ...]

    def __call__(self, text: str) -> list[str]:
        found: list[str] = []
        at = 0
        while True:
            starts = [(text.find(tag["begin"], at), -len(tag["begin"]), n) for n, tag in enumerate(self.tags)]
            starts = [start for start in starts if start[0] >= 0]
            if not starts:
                return found
            begin, minus_length, number = min(starts)
            at = begin - minus_length
            verifier = self.verifiers[number]
            if verifier is not None:
                value, at = _decoded(text, at)
                found += [f"tag {number}: {line}" for line in verifier.violations(value)]
