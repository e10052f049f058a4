"""Compiles and runs Jinja templates that came with a model, that is, from a stranger; it knows nothing of chats.

A template may compute, but not reach Python's internals, change what it is given, or run for ever: jinja2's immutable
sandbox closes the first two doors, and here loops, calls and growing values are counted. Every loop is rewritten to
draw on a budget of steps and processor time of its own thread, so the limit works from any thread and a busy machine
does not shorten it. Invariant: `SandboxedTemplate.render` returns within its budget, with text or with a `PromptError`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from agentrt.errors import ModelError, PromptError

#: Processor seconds of one rendering. The longest honest ones (hundreds of tools) take some ten milliseconds.
RENDER_SECONDS = 2.0
#: Turns of loops and calls in one rendering.
RENDER_STEPS = 2_000_000
#: Characters or items of one value that a template makes, and of its result.
LARGEST_VALUE = 20_000_000
#: A number as argument of a function or filter: widths and counts are small.
LARGEST_ARGUMENT = 100_000

_TICKS_PER_LOOK = 64  # looking at the clock costs more than counting

#: Filters that can make much out of little, or of which no chat template has need.
_REMOVED_FILTERS = ("center", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")


#: Filters that make text of whatever they are given.
_TEXT_FILTERS = ("tojson", "join", "replace", "indent", "string", "trim", "upper", "lower", "capitalize", "title", "batch")
_ESCAPING_FILTERS = ("escape", "e", "forceescape", "striptags", "truncate", "urlencode", "wordcount", "safe")

_LARGEST_WIDTH = 1000  # of an indentation, or a batch
_LONG_NUMBER = re.compile(r"\d{4,}")


class _Complaint(Exception):
    """What the template itself raised, through ``raise_exception``."""


class _OverBudget(Exception):
    """The template runs too long, or makes too much."""


class _Budget(threading.local):
    """What the rendering on this thread may still use."""

    steps = 0
    until = 0.0

    def begin(self, seconds: float, steps: int) -> None:
        self.steps, self.until = steps, time.thread_time() + seconds

    def spend(self) -> None:
        self.steps -= 1
        if self.steps % _TICKS_PER_LOOK == 0 and (self.steps <= 0 or time.thread_time() > self.until):
            raise _OverBudget("it takes too long")

    def weigh(self, value: Any) -> None:
        """Counts what a value holds before it is made into text: lists that share lists can be endless on paper."""
        size = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                size += len(item)
                _check_size(size)
            elif isinstance(item, Mapping):
                self.spend()
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                self.spend()
                waiting += item


class _BudgetedLoops(NodeTransformer):
    """Rewrites what a template iterates over, and what it glues together, to go through the environment's budget."""

    def visit_For(self, node: nodes.For, *_: Any) -> nodes.For:
        self.generic_visit(node)
        node.iter = _call("budgeted", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat, *_: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call("glue", node.nodes, node.lineno)


def _call(function: str, arguments: list[Any], line: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(function), arguments, [], None, None)
    call.set_lineno(line)
    return call


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.budget = _Budget()
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum")
        self.filters |= {"tojson": _to_json, "join": _join, "replace": _replace}
        for name in _TEXT_FILTERS + _ESCAPING_FILTERS:
            self.filters[name] = _weighing(self.budget, self.filters[name])
        self.finalize = self._finalized
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> Any:
        return super()._generate(_BudgetedLoops().visit(source), *arguments, **named)

    def budgeted(self, items: Any) -> Any:
        """What a loop runs over, a step of the budget for each turn."""
        if isinstance(items, jinja2.Undefined):
            return items
        return _Counted(items, self.budget) if hasattr(items, "__len__") else _counted(items, self.budget)

    def _finalized(self, value: Any) -> Any:
        """What an expression puts out."""
        self.budget.weigh(value)
        return value

    def glue(self, *values: Any) -> str:
        """The template's ``~``."""
        self.budget.weigh(values)
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, *arguments: Any, **named: Any) -> Any:
        self.budget.spend()
        if not isinstance(getattr(function, "__self__", None), _Environment):
            _check_arguments(function, arguments, named)
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend()
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Counted:
    """A sized iterable whose turns count."""

    def __init__(self, items: Any, budget: _Budget) -> None:
        self._items, self._budget = items, budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items, self._budget)


def _counted(items: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        budget.spend()
        yield item


def _check_size(size: int) -> None:
    if size > LARGEST_VALUE:
        raise _OverBudget(f"it makes a value of {size:,} characters or items; the limit is {LARGEST_VALUE:,}")


def _check_arguments(function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Small numbers only (widths, counts), and no method of a text that makes much out of little."""
    for value in (*arguments, *named.values()):
        if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
            raise _OverBudget(f"it calls a function with the number {value}; the limit is {LARGEST_ARGUMENT:,}")
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str):
        return
    if name == "replace" and len(arguments) > 1:
        _check_replacement(owner, str(arguments[0]), str(arguments[1]))
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple | str):
        _check_size(sum(map(len, arguments[0])) + len(owner) * len(arguments[0]))
    elif name in ("format", "format_map") and _LONG_NUMBER.search(owner):
        raise _OverBudget("it formats with a width of thousands of characters")


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**" and not (abs(left) <= LARGEST_ARGUMENT and abs(right) <= 64):
        raise _OverBudget(f"it computes {left} ** {right}")
    elif operator == "%" and isinstance(left, str) and ("*" in left or _LONG_NUMBER.search(left)):
        raise _OverBudget("it formats with a width of thousands of characters")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            _check_size(len(value) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise _OverBudget("it computes a number of thousands of digits")


def _weighing(budget: _Budget, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes text, with its arguments weighed first."""

    def weighed(*arguments: Any, **named: Any) -> Any:
        for value in (*arguments, *named.values()):
            if isinstance(value, int) and abs(value) > _LARGEST_WIDTH:
                raise _OverBudget(f"it calls a filter with the number {value}; the limit is {_LARGEST_WIDTH:,}")
            budget.weigh(value)
        return plain(*arguments, **named)

    if hasattr(plain, "jinja_pass_arg"):  # whether the filter wants the context or the environment before its value
        weighed.jinja_pass_arg = plain.jinja_pass_arg  # type: ignore[attr-defined]
    return weighed


def _join(items: Any, separator: Any = "", attribute: Any = None) -> str:
    """jinja2's ``join``, on plain text and within bounds."""
    if attribute is not None:
        items = [item[attribute] if isinstance(item, Mapping) else _environment.getattr(item, attribute) for item in items]
    texts = [str(item) for item in items]
    _check_size(sum(map(len, texts)) + len(str(separator)) * len(texts))
    return str(separator).join(texts)


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    """jinja2's ``replace``, within bounds."""
    _check_replacement(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as Hugging Face's chat templates expect it, not jinja2's, which escapes for HTML."""
    if isinstance(indent, int) and indent > 64:
        raise _OverBudget(f"it indents JSON by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Complaint(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_environment = _Environment()


class SandboxedTemplate:
    """A compiled template; immutable and thread-safe."""

    def __init__(self, source: str) -> None:
        """Compiles.

        Raises:
            ModelError: The source is not a Jinja template, or uses what is not allowed.
        """
        self.source = source
        try:
            tree = _environment.parse(source)
            self._template = _environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}", param="model") from error
        self._names = meta.find_undeclared_variables(tree)

    @property
    def variables(self) -> frozenset[str]:
        """Names that it takes from outside."""
        return frozenset(self._names)

    def render(self, variables: Mapping[str, Any], *, seconds: float = RENDER_SECONDS, steps: int = RENDER_STEPS) -> str:
        """Renders.

        Args:
            variables: What the template sees; it cannot change it.
            seconds: Processor seconds it may take.
            steps: Turns of loops and calls it may take.

        Raises:
            PromptError: The template complains, fails, or uses up its budget; carries its own words.
        """
        _environment.budget.begin(seconds, steps)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                _check_size(size)
        except _Complaint as error:
            raise PromptError(f"the model's chat template refuses these messages: {error}", param="messages") from None
        except _OverBudget as error:
            raise PromptError(f"the model's chat template was stopped: {error}", param="messages") from None
        except Exception as error:  # whatever an expression of the template raises
            what = f"{type(error).__name__}: {error}"
            raise PromptError(f"the model's chat template fails on these messages: {what}", param="messages") from error
        return "".join(parts)
