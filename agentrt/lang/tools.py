"""Tools: typed Python functions that a model may call.

``@tool`` reads a function's signature and docstring into a JSON Schema, checks a call's arguments against it, and runs the function
in a thread of its own or on the event loop, with a timeout. How calls and results are written for a model, and what follows from
them, is `agentrt.lang.agent`'s. Invariant: a call ends with a result or an error, never with neither.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, get_type_hints, overload

from agentrt.errors import RequestError, UserError
from agentrt.lang.waiting import Promise, event_loop, on_loop

DEFAULT_TIMEOUT = 60.0  #: seconds a tool may take, unless it says otherwise
MAX_TOOL_THREADS = 32
IDLE_SECONDS = 5.0


class ToolRetry(Exception):
    """Raised by a tool: the model should call again, and is told why."""


class ToolError(RequestError):
    """Raised by a tool, or by the runtime on its behalf.

    Attributes:
        fatal: It ends the program; otherwise the model is told and goes on.
    """

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool whose first parameter is ``ctx`` is told: the call's id, the program's run and branch, and the step of an agent loop."""

    call_id: str
    program: str
    branch: str
    step: int


@dataclass(slots=True)
class Call:
    """One call that a model made.

    Attributes:
        id: Unique in its run.
        name: Of the tool.
        arguments: As the model gave them.
        result: What the tool returned.
        error: What went wrong instead, in words; None if nothing did.
        approved: None while a tool that needs approval waits for it; True or False after.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    result: Any = None
    error: str | None = None
    approved: bool | None = True

    def text(self) -> str:
        """What the model is told."""
        if self.error is not None:
            return f"Error: {self.error}"
        return self.result if isinstance(self.result, str) else to_json(self.result)


def to_json(value: Any) -> str:
    """JSON of any value that pydantic can write; else its repr, as a string."""
    from pydantic_core import to_json as dump

    return dump(value, fallback=repr).decode()


def plain(value: Any) -> Any:
    """The same value in JSON's own types."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=repr)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: What the model calls it.
        description: What it does, for the model.
        parameters: JSON Schema of its arguments.
        func: The function.
        timeout: Seconds that it may take; None for no bound.
        approve: Every call waits until someone approves it.
        takes_context: Its first parameter is ``ctx``.
        model: pydantic model of its arguments; None passes them as they are.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    func: Callable[..., Any] = field(compare=False)
    timeout: float | None = DEFAULT_TIMEOUT
    approve: bool = False
    takes_context: bool = False
    model: Any = field(default=None, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself."""
        return self.func(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def start(self, arguments: Mapping[str, Any], context: ToolContext) -> Future[Any]:
        """Checks the arguments and starts the function; returns the future of its result."""
        done: Promise[Any] = Promise()
        try:
            given = self._checked(arguments)
        except ValueError as error:
            done.set_exception(ToolRetry(f"the arguments are not valid: {_in_words(error)}"))
            return done
        args = (context,) if self.takes_context else ()
        if inspect.iscoroutinefunction(self.func):
            started: Future[Any] = on_loop(_bounded(self.func(*args, **given), self.timeout))
        else:
            started = _threads.run(lambda: self.func(*args, **given))
            self._expire(started)
        return started

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.model is None:
            return dict(arguments)
        checked = self.model.model_validate(dict(arguments))
        return {
            name: getattr(checked, name)
            for name in self.model.model_fields
            if name in checked.model_fields_set or name in arguments
        }

    def _expire(self, started: Future[Any]) -> None:
        if self.timeout is None:
            return
        loop, seconds = event_loop(), self.timeout

        def expire() -> None:
            if not started.done():
                with _ignore_late():
                    started.set_exception(TimeoutError(f"the tool took longer than {seconds:g} s"))

        loop.call_soon_threadsafe(loop.call_later, seconds, expire)


class _ignore_late:
    """Whoever sets an outcome second is late, and that is all right."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, InvalidStateError)


async def _bounded(work: Any, seconds: float | None) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"the tool took longer than {seconds:g} s") from error


def _in_words(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    if not callable(details):
        return str(error)
    found = details(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found)


class ToolThreads:
    """Threads for synchronous tools: as many as run at once, up to a bound; idle ones end. A tool that hangs keeps its thread only."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Promise[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0
        self._numbers = itertools.count()

    def run(self, work: Callable[[], Any]) -> Promise[Any]:
        """Starts `work`; returns the future of its result."""
        done: Promise[Any] = Promise()
        self._work.put((work, done))
        with self._lock:
            grow = self._idle < self._work.qsize() and self._count < MAX_TOOL_THREADS
            self._count += grow
        if grow:
            threading.Thread(target=self._loop, name=f"agentrt-tool-{next(self._numbers)}", daemon=True).start()
        return done

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                work, done = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    self._idle -= 1
                    if self._work.empty():
                        self._count -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
            _settle(work, done)


def _settle(work: Callable[[], Any], done: Promise[Any]) -> None:
    result, failure = None, None
    try:
        result = work()
    except BaseException as error:
        failure = error
    with _ignore_late():
        if failure is None:
            done.set_result(result)
        else:
            done.set_exception(failure)


_threads = ToolThreads()


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` on one of the tools' threads; for callbacks of the author's that may block."""
    return _threads.run(work)


@overload
def tool(func: Callable[..., Any]) -> Tool: ...


@overload
def tool(
    func: None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    approve: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    func: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    approve: bool = False,
) -> Any:
    """Makes a tool of a typed function, ``def`` or ``async def``.

    Args:
        func: The function. Its annotations become the JSON Schema, its docstring the description, and the docstring's "Args:" those
            of the parameters. A first parameter named ``ctx`` gets a `ToolContext` and is not the model's to give.
        name: Instead of the function's name.
        description: Instead of its docstring.
        timeout: Seconds that a call may take; None for no bound.
        approve: Every call waits until ``state.approve(call_id)`` or ``state.deny(call_id)``.

    Raises:
        UserError: A parameter has no annotation, is positional only, or cannot be described in JSON Schema.
    """
    if func is None:
        return lambda made: tool(made, name=name, description=description, timeout=timeout, approve=approve)
    doc = inspect.getdoc(func) or ""
    summary, notes = _read_docstring(doc)
    model, takes_context = _arguments_model(func, notes)
    schema = model.model_json_schema()
    schema.pop("title", None)
    return Tool(name or func.__name__, description or summary, schema, func, timeout, approve, takes_context, model)


def _arguments_model(func: Callable[..., Any], notes: Mapping[str, str]) -> tuple[Any, bool]:
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    label = getattr(func, "__name__", "tool")
    try:
        hints = get_type_hints(func, include_extras=True)
    except NameError as error:
        raise UserError(f"tool {label}: an annotation cannot be resolved: {error}", param="func") from error
    parameters = list(inspect.signature(func).parameters.values())
    takes_context = bool(parameters) and parameters[0].name == "ctx"
    fields: dict[str, Any] = {}
    for parameter in parameters[takes_context:]:
        if (
            parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            or parameter.name not in hints
        ):
            raise UserError(
                f"tool {label}: parameter {parameter.name!r} must be a named one with a type annotation, so that the model can be told of it",
                param=parameter.name,
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=notes.get(parameter.name)))
    try:
        model = create_model(f"{label}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, NameError) as error:
        raise UserError(f"tool {label}: its parameters have no JSON Schema: {error}", param="func") from error
    return model, takes_context


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Splits a Google-style docstring into what it does, and what each argument is."""
    summary, _, rest = doc.partition("\nArgs:")
    notes: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text and indent == 0:
            break
        head, colon, note = text.partition(":")
        if colon and indent <= 4 and head.split(" ")[0].isidentifier():
            last = head.split(" ")[0]
            notes[last] = note.strip()
        elif text and last:
            notes[last] += " " + text
    for heading in ("\nReturns:", "\nRaises:", "\nYields:"):
        summary = summary.partition(heading)[0]
    return " ".join(summary.split()), notes


def as_tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    """Makes tools of what a program lists: tools, or plain typed functions.

    Raises:
        UserError: There is none, two have one name, or one is neither.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise UserError("tools must be a list of at least one @tool", param="tools")
    made = tuple(item if isinstance(item, Tool) else _from_function(item) for item in given)
    names = [item.name for item in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"two tools are called {twice[0]!r}; give one of them another name: @tool(name=...)", param="tools"
        )
    return made


def _from_function(item: Any) -> Tool:
    if not callable(item):
        raise UserError(f"{item!r:.60} is neither a @tool nor a function", param="tools")
    made: Tool = tool(item)
    return made


def mcp_tools(session: Any, listed: Any, loop: asyncio.AbstractEventLoop) -> list[Tool]:
    """Makes tools of an MCP server's.

    Args:
        session: An ``mcp.Client``, or an initialised ``mcp.ClientSession``.
        listed: What ``await session.list_tools()`` gave.
        loop: The event loop that the session lives on.

    The package's first version writes its fields in camel case, the second in snake case; both are read.
    """
    return [_mcp_tool(session, loop, item) for item in listed.tools]


def _mcp_tool(session: Any, loop: asyncio.AbstractEventLoop, item: Any) -> Tool:
    async def call(**arguments: Any) -> Any:
        work = asyncio.run_coroutine_threadsafe(session.call_tool(item.name, arguments), loop)
        answer = await asyncio.wrap_future(work)
        text = "\n".join(part.text for part in answer.content if getattr(part, "text", None) is not None)
        if _either(answer, "is_error", "isError"):
            raise ToolError(text)
        structured = _either(answer, "structured_content", "structuredContent")
        return text if structured is None else structured

    return Tool(item.name, item.description or "", _either(item, "input_schema", "inputSchema"), call)


def _either(holder: Any, name: str, older: str) -> Any:
    return getattr(holder, name, getattr(holder, older, None))
