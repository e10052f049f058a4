"""How a family of models writes calls of tools: what a grammar has to know of it, and how to read it while it streams.

One small class a family. A format turns tools into a `GrammarSpec`, and gives a reader that takes text as it comes and
says which of it is text and which belongs to a call. It validates nothing: the grammar did. Invariant: the pieces of a
call's arguments concatenate to the arguments, and text that may yet become a call is held back, never told as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrt.errors import GrammarError, UserError
from agentrt.request import GrammarSpec
from agentrt.text.bare_call import BareCalls, bare_calls

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the tool `name`; the calls of an answer are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrown:
    """A further piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Said | CallBegun | ArgumentsGrown


@dataclass(frozen=True, slots=True)
class Choice:
    """Which calls an answer may have.

    Attributes:
        tool: "auto", "required", or a tool's name.
        parallel: More than one call is allowed.
        answer_schema: JSON text of what an answer without calls must satisfy; None for free text.
        strict: Refuse keywords that would only be checked at the end.
    """

    tool: str = "auto"
    parallel: bool = True
    answer_schema: str | None = None
    strict: bool = False

    @property
    def many(self) -> bool:
        """Whether a second call may follow the first."""
        return self.parallel and self.tool in ("auto", "required")


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]:
        """Takes the next text; returns what became certain."""
        ...

    def finish(self) -> list[Event]:
        """The answer is over, or was cut: returns what was held back."""
        ...


class CallFormat(Protocol):
    """A family's way of writing calls."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    def grammar(self, functions: Sequence[Tool], choice: Choice) -> GrammarSpec:
        """The constraint: free text or calls, or calls alone.

        Args:
            functions: Each {"name": ..., "parameters": JSON Schema}; those that may be called.
            choice: Which calls.
        """
        ...

    def reader(self, functions: Sequence[Tool]) -> Reader:
        """A reader of one answer."""
        ...

    def bare_calls(self, functions: Sequence[Tool]) -> BareCalls | None:
        """How answers begin that are calls without their frame; None if a call cannot lack it."""
        ...


def read_whole(reader: Reader, text: str) -> list[Event]:
    """Reads an answer that is complete."""
    return [*reader.feed(text), *reader.finish()]


# ---- calls as JSON objects in a frame: Hermes, Qwen, SmolLM2, Mistral, Llama 3


@dataclass(frozen=True, slots=True)
class FramedFormat:
    """Calls are JSON objects: `open` (`begin` object `end`) (`separator` ...)* `close`.

    Attributes:
        name: Of the family.
        trigger: From here on a text is a call; "" where a call is told from text by its first character, a brace.
        name_key, arguments_key: Keys of the call's object.
        bare: An answer that begins as a call's object does is a call, though its frame is missing (see `bare_call`).
    """

    name: str
    open: str = ""
    begin: str = ""
    end: str = ""
    separator: str = ""
    close: str = ""
    trigger: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    bare: bool = False

    def grammar(self, functions: Sequence[Tool], choice: Choice) -> GrammarSpec:
        """See `CallFormat.grammar`."""
        fields = ("open", "begin", "end", "separator", "close", "name_key", "arguments_key")
        options: dict[str, str | int | bool] = {field: getattr(self, field) for field in fields}
        options |= {"trigger": self.trigger, "tool_choice": choice.tool, "parallel": choice.parallel}
        if self.bare:
            options["bare"] = True
        if choice.answer_schema is not None:
            options["answer_schema"] = choice.answer_schema
        return GrammarSpec("tools", _dumped(functions), tuple(sorted(options.items())), strict=choice.strict)

    def reader(self, functions: Sequence[Tool]) -> Reader:
        """See `CallFormat.reader`."""
        return _FramedReader(self, functions)

    def bare_calls(self, functions: Sequence[Tool]) -> BareCalls | None:
        """See `CallFormat.bare_calls`."""
        return bare_calls([function["name"] for function in functions], self.name_key, self.arguments_key) if self.bare else None


def _dumped(functions: Sequence[Tool]) -> str:
    return json.dumps(list(functions), ensure_ascii=False)


class _FramedReader:
    def __init__(self, form: FramedFormat, functions: Sequence[Tool]) -> None:
        key = re.escape
        bare = form.bare_calls(functions)
        self._bare = None if bare is None else bare.offered  # what only the beginning of an answer may be
        string = r'"((?:[^"\\]|\\.)*)"'
        self._form = form
        self._head = re.compile(rf'\{{\s*"{key(form.name_key)}"\s*:\s*{string}\s*,\s*"{key(form.arguments_key)}"\s*:\s*(?=\S)')
        self._held = ""
        self._calling = False
        self._free = False  # told apart by its first character, and it was text
        self._index = -1
        self._scan: _ValueScan | None = None

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while (more := self._step()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._calling or not held:
            return []  # a frame's end, or a call that was cut before its name was known
        return [Said(held)]

    def _step(self) -> list[Event] | None:
        """One step that consumes held text; None when more text is needed."""
        if not self._held:
            return None
        if self._scan is not None:
            return self._grow(self._scan)
        return self._begin_call() if self._calling else self._speak()

    def _speak(self) -> list[Event] | None:
        if not self._form.trigger and not self._free:
            if not (first := self._held.lstrip()):
                return None
            self._calling, self._free = first[0] == "{", first[0] != "{"
            return []
        if not self._form.trigger:
            said, self._held = self._held, ""
            return [Said(said)]
        if self._bare is not None:
            begun = self._bare.match(self._held, partial=True)
            if begun is not None and begun.partial:
                return None
            self._calling, self._bare = begun is not None, None
            return []
        before, found, after = self._held.partition(self._form.trigger)
        if found:
            self._calling, self._held = True, after
            return [Said(before.rstrip())] if before.strip() else []
        certain = len(_without_beginning_of(self._held, self._form.trigger).rstrip())
        said, self._held = self._held[:certain], self._held[certain:]
        return [Said(said)] if said else None

    def _begin_call(self) -> list[Event] | None:
        """Passes the frame up to the next object, and the object up to its arguments."""
        brace = self._held.find("{")
        if brace < 0:
            self._held = ""
            return None
        self._held = self._held[brace:]
        match = self._head.match(self._held)
        if match:
            return self._name(json.loads(f'"{match[1]}"'), match.end())
        try:
            call, end = json.JSONDecoder().raw_decode(self._held)
        except ValueError:
            return None
        self._held = self._held[end:]  # whole, but its keys come in another order
        name, arguments = call.get(self._form.name_key), call.get(self._form.arguments_key, {})
        if not isinstance(name, str):
            return [] if self._form.trigger else [Said(json.dumps(call, ensure_ascii=False))]
        self._index += 1
        return [CallBegun(self._index, name), ArgumentsGrown(self._index, json.dumps(arguments, ensure_ascii=False))]

    def _name(self, name: str, end: int) -> list[Event]:
        self._held = self._held[end:]
        self._index += 1
        self._scan = _ValueScan()
        return [CallBegun(self._index, name)]

    def _grow(self, scan: _ValueScan) -> list[Event]:
        end = scan.feed(self._held)
        if end is None:
            grown, self._held = self._held, ""
        else:
            grown, self._held = self._held[:end], self._held[end:].lstrip().removeprefix("}")
            self._scan = None
        return [ArgumentsGrown(self._index, grown)] if grown else []


class _ValueScan:
    """Finds where a JSON value ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Returns where in `text` the value ends, or None if all of it belongs to the value and more may."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._in_string(char):
                    return at + 1
            elif char == '"':
                self._quoted = True
            elif char in "[{":
                self._depth += 1
            elif self._depth == 0 and char in ",]})":  # a bare number or word ends before this
                return at
            elif char in "]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def _in_string(self, char: str) -> bool:
        """Takes a character of a string; True if the whole value ends with it."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            return self._depth == 0
        return False


def _without_beginning_of(text: str, mark: str) -> str:
    """`text` without an ending that may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length]
    return text


# ---- calls whose grammar is written here: Python's syntax, and Qwen3-Coder's XML

_SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"})
_PLAIN_STRING = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})


def _quoted(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Any) -> str:
    if schema is False:
        raise GrammarError("a parameter's schema is false: nothing satisfies it", keyword="false", param="tools")
    return "%json " + _quoted({"x-guidance": _SEPARATORS, **(schema if isinstance(schema, Mapping) else {})})


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    schema: Any
    required: bool


def _parameters(function: Tool, family: str) -> list[_Parameter]:
    """The parameters of a function, one by one.

    Raises:
        GrammarError: The schema says more of the object than what its properties are.
    """
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    unknown = sorted(set(schema) - _OBJECT_KEYWORDS)
    if unknown:
        raise GrammarError(
            f"tool {function['name']!r}: a call in the {family} form cannot be held to {unknown[0]!r} of its parameters; "
            "use properties and required alone, or another tool-call format",
            keyword=unknown[0],
            param="tools",
        )
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    required = set(schema.get("required", ()))
    return [
        _Parameter(name, {**each, **definitions} if isinstance(each, Mapping) else each, name in required)
        for name, each in schema.get("properties", {}).items()
    ]


def _listed(items: Sequence[tuple[str, bool]], separator: str) -> str:
    """A lark expression of (rule, required) in order, with the separator between those that are there."""
    options = []
    for number, (rule, required) in enumerate(items):
        rest = [f"{_quoted(separator)} {later}" if must else f"({_quoted(separator)} {later})?" for later, must in items[number + 1 :]]
        options.append(" ".join([rule, *rest]))
        if required:
            return f"({' | '.join(options)})"
    return f"({' | '.join(options)})?" if options else ""


def _lark(functions: Sequence[Tool], choice: Choice, rules: Sequence[str], *, frame: tuple[str, str, str], free: Sequence[str]) -> GrammarSpec:
    """The grammar of calls `c0`, `c1`, ...; `frame` is what stands before, between and after them, `free` the rules of free text."""
    begin, between, end = (_quoted(part) if part else "" for part in frame)
    offered = [number for number, function in enumerate(functions) if choice.tool in ("auto", "required", function["name"])]
    calls = f"calls: {begin} call {f'({between} call)*' if choice.many else ''} {end}"
    call = "call: " + " | ".join(f"c{number}" for number in offered)
    if choice.tool != "auto":
        start: Sequence[str] = ["start: calls"]
    elif choice.answer_schema is not None:
        start = ["start: calls | answer", f"answer: {_json_rule(json.loads(choice.answer_schema))}"]
    else:
        start = free
    return GrammarSpec("lark", "\n".join([*start, calls, call, *rules]), strict=choice.strict)


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Calls in Python's syntax with JSON's values: ``[get_weather(city="Paris"), now()]``."""

    name: str = "pythonic"

    def grammar(self, functions: Sequence[Tool], choice: Choice) -> GrammarSpec:
        """See `CallFormat.grammar`."""
        rules: list[str] = []
        for number, function in enumerate(functions):
            listed = []
            for place, parameter in enumerate(_parameters(function, self.name)):
                rule = f"a{number}_{place}"
                rules += [f"{rule}: {_quoted(parameter.name + '=')} {rule}_v", f"{rule}_v: {_json_rule(parameter.schema)}"]
                listed.append((rule, parameter.required))
            rules.append(f"c{number}: {_quoted(function['name'] + '(')} {_listed(listed, ', ')} \")\"")
        free = ["start: calls | TEXT |", r"TEXT: /[^\[](?s:.*)/"]
        return _lark(functions, choice, rules, frame=("[", ", ", "]"), free=free)

    def reader(self, functions: Sequence[Tool]) -> Reader:
        """See `CallFormat.reader`."""
        return _PythonicReader()

    def bare_calls(self, functions: Sequence[Tool]) -> None:
        """See `CallFormat.bare_calls`."""
        return None


class _PythonicReader:
    _CALL = re.compile(r"[\[,\s]*([^\s\[(,]+)\(")
    _KEY = re.compile(r"[,\s]*([^\s,=)]+)=(?=\S)")

    def __init__(self) -> None:
        self._held = ""
        self._step: Callable[[], list[Event] | None] = self._start
        self._index = -1
        self._first = True
        self._scan = _ValueScan()

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and (more := self._step()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        return []  # a frame's end, or a call that was cut before its name was known

    def _start(self) -> list[Event] | None:
        if not (first := self._held.lstrip()):
            return None
        self._step = self._frame if first[0] == "[" else self._text
        return []

    def _text(self) -> list[Event] | None:
        said, self._held = self._held, ""
        return [Said(said)]

    def _frame(self) -> list[Event] | None:
        match = self._CALL.match(self._held)
        if match is None:
            return None
        self._held = self._held[match.end() :]
        self._index, self._first, self._step = self._index + 1, True, self._key
        return [CallBegun(self._index, match[1]), ArgumentsGrown(self._index, "{")]

    def _key(self) -> list[Event] | None:
        if self._held.lstrip().startswith(")"):
            self._held, self._step = self._held.lstrip()[1:], self._frame
            return [ArgumentsGrown(self._index, "}")]
        match = self._KEY.match(self._held)
        if match is None:
            return None
        comma, self._first = "" if self._first else ", ", False
        self._held, self._step, self._scan = self._held[match.end() :], self._value, _ValueScan()
        return [ArgumentsGrown(self._index, f"{comma}{_quoted(match[1])}: ")]

    def _value(self) -> list[Event] | None:
        end = self._scan.feed(self._held)
        if end is None:
            end = len(self._held)
        else:
            self._step = self._key
        grown, self._held = self._held[:end], self._held[end:]
        return [ArgumentsGrown(self._index, grown)] if grown else []


#: What ends a parameter.
_XML_CLOSE = "\n</parameter>\n"


@dataclass(frozen=True, slots=True)
class Qwen3CoderFormat:
    """Calls as Qwen3-Coder writes them: a tag for the function and one for each parameter, strings as they are, the rest JSON."""

    name: str = "qwen3_coder"

    def grammar(self, functions: Sequence[Tool], choice: Choice) -> GrammarSpec:
        """See `CallFormat.grammar`."""
        rules = [f'raw[lazy]: /(?s:.*)/ {_quoted(_XML_CLOSE)}']
        for number, function in enumerate(functions):
            parts = []
            for place, parameter in enumerate(_parameters(function, self.name)):
                rule = f"a{number}_{place}"
                opening = _quoted(f"<parameter={parameter.name}>\n")
                rules += [f"{rule}: {opening} {rule}_v", f"{rule}_v: {_xml_value(function, parameter)}"]
                parts.append(rule if parameter.required else f"{rule}?")
            opening, closing = _quoted(f"\n<function={function['name']}>\n"), _quoted("</function>\n</tool_call>")
            rules += [f"b{number}: {opening} {' '.join(parts)} {closing}", f'c{number}: "<tool_call>" b{number}']
        bodies = " | ".join(f"b{number}" for number in range(len(functions)))
        more = '("\\n" call)*' if choice.many else ""
        free = [f"start: TEXT | head ({bodies}) {more}", 'head[lazy]: /(?s:.*)/ "<tool_call>"', "TEXT: /(?s:.*)/ & ~/(?s:.*)(<tool_call>)(?s:.*)/"]
        return _lark(functions, choice, rules, frame=("", "\n", ""), free=free)

    def reader(self, functions: Sequence[Tool]) -> Reader:
        """See `CallFormat.reader`."""
        return _XmlReader(functions)

    def bare_calls(self, functions: Sequence[Tool]) -> None:
        """See `CallFormat.bare_calls`."""
        return None


def _is_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _xml_value(function: Tool, parameter: _Parameter) -> str:
    schema = parameter.schema
    if not _is_string(schema):
        return f"{_json_rule(schema)} {_quoted(_XML_CLOSE)}"
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if texts is not None:
        return " | ".join(_quoted(text + _XML_CLOSE) for text in texts if isinstance(text, str))
    unknown = sorted(set(schema) - _PLAIN_STRING - {"$defs"})
    if unknown:
        raise GrammarError(
            f"tool {function['name']!r}, parameter {parameter.name!r}: a raw string in the qwen3_coder form cannot be held to "
            f"{unknown[0]!r}; drop it, or use another tool-call format",
            keyword=unknown[0],
            param="tools",
        )
    return "raw"


class _XmlReader:
    _FUNCTION = re.compile(r"\s*(?:<tool_call>)?\s*<function=([^>]+)>")
    _PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n((?s:.*?))\n</parameter>")
    _END = re.compile(r"\s*</function>\s*</tool_call>")

    def __init__(self, functions: Sequence[Tool]) -> None:
        self._strings = {f["name"]: {p for p, s in _properties(f).items() if _is_string(s)} for f in functions}
        self._held = ""
        self._step: Callable[[], list[Event] | None] = self._text
        self._index = -1
        self._name = ""
        self._first = True

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and (more := self._step()) is not None:
            events += more
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [Said(held)] if held and self._step == self._text else []

    def _text(self) -> list[Event] | None:
        before, found, after = self._held.partition("<tool_call>")
        if found:
            self._held, self._step = after, self._function
            return [Said(before.rstrip())] if before.strip() else []
        certain = len(_without_beginning_of(self._held, "<tool_call>").rstrip())
        said, self._held = self._held[:certain], self._held[certain:]
        return [Said(said)] if said else None

    def _function(self) -> list[Event] | None:
        match = self._FUNCTION.match(self._held)
        if match is None:
            return None
        self._held, self._step = self._held[match.end() :], self._inside
        self._index, self._name, self._first = self._index + 1, match[1], True
        return [CallBegun(self._index, match[1]), ArgumentsGrown(self._index, "{")]

    def _inside(self) -> list[Event] | None:
        if match := self._PARAMETER.match(self._held):
            self._held = self._held[match.end() :]
            comma, self._first = "" if self._first else ", ", False
            value = _quoted(match[2]) if match[1] in self._strings.get(self._name, ()) else match[2]
            return [ArgumentsGrown(self._index, f"{comma}{_quoted(match[1])}: {value}")]
        if match := self._END.match(self._held):
            self._held, self._step = self._held[match.end() :], self._function
            return [ArgumentsGrown(self._index, "}")]
        return None


def _properties(function: Tool) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    found = parameters.get("properties", {}) if isinstance(parameters, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


# ---- which format a model writes

HERMES = FramedFormat("hermes", begin="<tool_call>\n", end="\n</tool_call>", separator="\n", trigger="<tool_call>", bare=True)
SMOLLM2 = FramedFormat("smollm2", open="<tool_call>[", separator=", ", close="]</tool_call>", trigger="<tool_call>")
MISTRAL = FramedFormat("mistral", open="[TOOL_CALLS] [", separator=", ", close="]", trigger="[TOOL_CALLS]")
LLAMA3 = FramedFormat("llama3_json", separator="; ", arguments_key="parameters")

FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (HERMES, SMOLLM2, MISTRAL, LLAMA3, PythonicFormat(), Qwen3CoderFormat())}


def format_named(name: str) -> CallFormat:
    """The format of that name.

    Raises:
        UserError: There is none.
    """
    if name not in FORMATS:
        raise UserError(f"tool_format is {name!r}; it must be auto or one of {', '.join(FORMATS)}", param="tool_format")
    return FORMATS[name]


#: What betrays a family in a turn that calls; the first that is found decides.
_SIGNS: Sequence[tuple[str, str]] = (
    (r"<function=", "qwen3_coder"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>\s*\[", "smollm2"),
    (r"<tool_call>", "hermes"),
    (r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"parameters"', "llama3_json"),
    (r"\[\s*\w+\(", "pythonic"),
)


def guess_format(turn: str) -> CallFormat:
    """The format of a model whose chat template renders an assistant's turn with a call like this; Hermes' if none is recognised."""
    return next((FORMATS[name] for sign, name in _SIGNS if re.search(sign, turn)), HERMES)
