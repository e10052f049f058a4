"""The steps that let a model call tools: once (`tool_call`), or until it answers (`agent_loop`).

Each turn is constrained to the model's own way of writing calls; calls run at the same time; their results are appended through the
model's chat template. It runs inside a branch (see `agentrt.lang.interpreter`). Invariant: what the model is shown of a call
and what ``s[name]`` says of it are the same, and no call runs before it is allowed to.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrt.errors import RequestError, UserError
from agentrt.lang import ir
from agentrt.lang.generate import ask, meta_of, read_value
from agentrt.lang.options import sampling_fields
from agentrt.lang.recording import ToolRun
from agentrt.lang.roles import chat_roles
from agentrt.lang.tools import Call, Tool, ToolContext, ToolError, ToolRetry, as_tools, in_thread, plain
from agentrt.lang.values import InvalidValueError, document_type
from agentrt.lang.waiting import Promise, on_loop
from agentrt.request import Completion
from agentrt.text.chat_messages import describe_tools
from agentrt.text.tool_format import ArgumentsGrown, CallBegun, CallFormat, Choice, Said, read_whole

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch
    from agentrt.lang.items import Item

Waits = Generator[Future[Any], Any, Any]


class StepsError(RequestError):
    """An agent loop did not come to an answer in its steps.

    Attributes:
        calls: The calls that were made.
    """

    def __init__(self, message: str, *, calls: tuple[Call, ...] = ()) -> None:
        super().__init__(message)
        self.calls = calls


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """Something that happened in an agent loop.

    Attributes:
        kind: "text" (the model said something beside its calls), "call", "approval" (a call waits for it), "result" or "answer".
        step: In which step, from 0.
        text: What was said, for "text" and "answer".
        call: The call, for the others.
    """

    kind: str
    step: int
    text: str = ""
    call: Call | None = None


@dataclass(slots=True)
class Turns:
    """Where a tool node stands: kept by the item, shown by ``pending_calls``, saved and resumed.

    Attributes:
        step: The step that is under way.
        calls: Calls of this step.
        made: Calls of the steps before.
        decided: By call id: told when it is approved or denied.
    """

    step: int = 0
    calls: list[Call] = field(default_factory=list)
    made: list[Call] = field(default_factory=list)
    decided: dict[str, Promise[None]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[Call]:
        """Calls that wait for approval."""
        return [call for call in self.calls if call.approved is None]


def call_once(branch: Branch, item: Item) -> Waits:
    """Runs a tool_call node."""
    node: ir.ToolCall = item.node
    turns = item.state = item.state or Turns()
    completion = None
    if not turns.calls:
        completion, _ = yield from _turn(branch, item, turns, node.choice, None)
    if turns.calls:
        yield from _run_calls(branch, item, turns)
    meta = {} if completion is None else meta_of(completion, completion.samples[0])
    if item.variable is not None:
        item.variable.settle(turns.calls, meta)


def loop(branch: Branch, item: Item) -> Waits:
    """Runs an agent_loop node."""
    node: ir.AgentLoop = item.node
    turns = item.state = item.state or Turns()
    schema = None if node.value is None else node.value.constraint.get("json_schema")
    while turns.step < node.max_steps:
        if not turns.calls:
            choice = node.choice if turns.step == 0 else "auto"
            completion, said = yield from _turn(branch, item, turns, choice, schema)
            if not turns.calls:
                done = yield from _answer(branch, item, turns, completion, said)
                if done:
                    return
                turns.step += 1
                continue
        yield from _run_calls(branch, item, turns)
        turns.made += turns.calls
        turns.calls = []
        turns.step += 1
    raise StepsError(
        f"agent_loop({node.name!r}) came to no answer in max_steps={node.max_steps} steps", calls=tuple(turns.made)
    )


def _answer(branch: Branch, item: Item, turns: Turns, completion: Completion, said: str) -> Waits:
    """Takes a turn without calls as the answer; False if it is not valid and the model is asked again."""
    node: ir.AgentLoop = item.node
    sample = completion.samples[0]
    try:
        value = said if node.value is None else read_value(node.value, sample)
    except InvalidValueError as error:
        if turns.step + 1 >= node.max_steps:
            raise
        branch.begin_message("user")
        branch.write(
            "That is not a valid answer:\n"
            + "\n".join(f"- {line}" for line in error.violations)
            + "\nAnswer again, with a valid one."
        )
        branch.end_message("user")
        return False
    yield from _tell(node, AgentEvent("answer", turns.step, text=said))
    meta = meta_of(completion, sample) | {"steps": turns.step + 1, "calls": [plain(call) for call in turns.made]}
    if item.variable is not None:
        item.variable.push(said)
        item.variable.settle(value, meta)
    return True


def _turn(branch: Branch, item: Item, turns: Turns, choice: str, schema: Any) -> Waits:
    """Lets the model speak once; sets the turn's calls; returns (completion, what it said beside them)."""
    node: ir.ToolCall | ir.AgentLoop = item.node
    offer(branch, node.tools, item.where)
    if not branch.in_chat:
        branch.begin_message("assistant")
    form = chat_roles(branch.run.tokenizer).call_format()
    functions = [tool.schema["function"] for tool in node.tools]
    grammar = form.grammar(
        functions, Choice(choice, node.parallel, None if schema is None else json.dumps(schema, ensure_ascii=False))
    )
    sampling = branch.run.sampling.params(
        {**node.sampling, "grammar": grammar},
        typed=True,
        seed=lambda: branch.seed(item, turns.step),
    )
    kind = "tool_call" if isinstance(node, ir.ToolCall) else "agent_loop"
    completion: Completion = yield from ask(branch, item, sampling, branch.feed.push, kind=kind)
    branch.end_message(branch.messages[-1].role)
    said, calls = read_turn(form, functions, completion.text)
    turns.calls = [
        Call(
            f"{branch.path or 'trunk'}.{item.number}.{turns.step}.{place}",
            name,
            arguments,
            approved=_approved(node.tools, name),
        )
        for place, (name, arguments) in enumerate(calls)
    ]
    if said and turns.calls:
        yield from _tell(node, AgentEvent("text", turns.step, text=said))
    return completion, said


def _approved(tools: Sequence[Tool], name: str) -> bool | None:
    return None if any(tool.name == name and tool.approve for tool in tools) else True


def read_turn(
    form: CallFormat, functions: Sequence[dict[str, Any]], text: str
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Reads a turn in the model's own form: (what was said, the calls as (name, arguments)).

    Raises:
        RequestError: A call was cut, or its arguments are no JSON object.
    """
    said: list[str] = []
    names: list[str] = []
    pieces: list[list[str]] = []
    for event in read_whole(form.reader(functions), text):
        match event:
            case Said():
                said.append(event.text)
            case CallBegun():
                names.append(event.name)
                pieces.append([])
            case ArgumentsGrown():
                pieces[event.index].append(event.text)
    return "".join(said).strip(), [
        (name, _arguments(name, "".join(parts))) for name, parts in zip(names, pieces, strict=True)
    ]


def _arguments(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(
            f"the model's call of {name!r} was cut, or is no JSON: {text[-80:]!r}; raise max_tokens"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"the model's call of {name!r} has arguments that are no object: {text[:80]!r}")
    return value


# ------------------------------------------------------------------ running calls


def _run_calls(branch: Branch, item: Item, turns: Turns) -> Waits:
    node: ir.ToolCall | ir.AgentLoop = item.node
    run, tools = branch.run, {tool.name: tool for tool in node.tools}
    for call in turns.calls:
        yield from _tell(node, AgentEvent("call" if call.approved else "approval", turns.step, call=call))
    longest = max((tools[call.name].timeout or 0.0 for call in turns.calls if call.name in tools), default=0.0)
    # Not here: this is the thread that brings answers, and a backend may wait for one of them before it says that it holds.
    in_thread(lambda: run.backend.hold(run.id, longest or 60.0))
    yield from _await_approval(branch, turns)
    began = run.clock()
    started = [(call, _start(branch, item, turns, tools, call)) for call in turns.calls]
    fatal: BaseException | None = None
    for call, future in started:
        error = yield from _outcome(call, future)
        fatal = fatal or error
        run.tool_runs.append(ToolRun(branch.path, call.name, began, run.clock(), call.error))
        run.recording.results[call.id] = {"result": plain(call.result), "error": call.error}
    if fatal is not None:
        raise fatal
    for call in turns.calls:
        yield from _tell(node, AgentEvent("result", turns.step, call=call))
    branch.write_results([call.text() for call in turns.calls], item.where)


def _await_approval(branch: Branch, turns: Turns) -> Waits:
    for call in turns.calls:
        if call.approved is None:
            turns.decided[call.id] = Promise()
    waiting = list(turns.waiting)
    if not waiting:
        return
    branch.park()
    for call in waiting:
        yield turns.decided[call.id]


def _start(branch: Branch, item: Item, turns: Turns, tools: dict[str, Tool], call: Call) -> Future[Any] | None:
    """Starts a call; None if it has its outcome already."""
    if call.approved is False or call.error is not None:
        call.error = call.error or "the call was denied"
        return None
    replay = branch.run.replay
    if replay is not None and call.id in replay.results:
        known = replay.results[call.id]
        call.result, call.error = known["result"], known["error"]
        return None
    tool = tools.get(call.name)
    if tool is None:
        call.error = f"there is no tool {call.name!r}; there are {', '.join(sorted(tools))}"
        return None
    return tool.start(call.arguments, ToolContext(call.id, branch.run.id, branch.path, turns.step))


def _outcome(call: Call, future: Future[Any] | None) -> Generator[Future[Any], Any, BaseException | None]:
    """Waits for a call; returns the error that ends the program, if that is what it is."""
    if future is None:
        return None
    try:
        call.result = yield future
    except ToolRetry as error:
        call.error = f"{error} Call again."
    except ToolError as error:
        call.error = str(error)
        return error if error.fatal else None
    except Exception as error:
        call.error = f"{type(error).__name__}: {error}"
    return None


def _tell(node: Any, event: AgentEvent) -> Waits:
    """Calls the author's on_event, on a thread where it may block, or on the loop if it is a coroutine function."""
    listener = getattr(node, "on_event", None)
    if listener is None:
        return
    if inspect.iscoroutinefunction(listener):
        yield on_loop(listener(event))
    else:
        yield in_thread(lambda: listener(event))


# ------------------------------------------------------- what the model is shown


def offer(branch: Branch, tools: Sequence[Tool], where: ir.Where) -> None:
    """Sees to it that the model has been told of the tools, through its chat template.

    While nothing has been fed, the messages so far are written anew with the tools where the template puts them; later,
    the tools come in a message of their own, since what was fed is never changed.
    """
    names = tuple(tool.name for tool in tools)
    if branch.offered == names:
        return
    if not chat_roles(branch.run.tokenizer).knows_tools():
        branch.run.warn_once(
            "tools",
            f"the chat template of {branch.run.backend.capabilities.model!r} knows no tools: they are described to it in words; "
            "a model that was trained to call tools, such as 'qwen2.5-coder-0.5b', does it better",
            where,
        )
    schemas = [tool.schema for tool in tools]
    fresh = not len(branch.transcript) and branch.transcript.overhang is None and branch.offered is None
    branch.offered = names
    if fresh and branch.messages:
        branch.roles = chat_roles(branch.run.tokenizer).with_tools(schemas)
        branch.rewrite_messages()
        return
    opened = branch.messages[-1].role if branch.in_chat else None
    if opened is not None:
        branch.end_message(opened)
    branch.begin_message("system" if not branch.messages else "user")
    branch.write(describe_tools(schemas))
    branch.end_message(branch.messages[-1].role)
    if opened is not None:
        branch.begin_message(opened)


def tool_call(name: str, tools: Sequence[Any], choice: str = "auto", parallel: bool = True, **options: Any) -> ir.Expr:
    """Lets the model call tools once, runs the calls, and appends their results.

    Args:
        name: Variable that gets the list of calls (`Call`: name, arguments, result or error); empty if the model answered in text.
        tools: `@tool` functions, or plain typed functions.
        choice: "auto" (call or say something), "required", or a tool's name.
        parallel: More than one call is allowed.
        **options: As for `gen`: temperature, max_tokens...

    Raises:
        UserError: The tools or an option are wrong.
    """
    made = as_tools(tools)
    _check_choice(choice, made)
    return ir.ToolCall(name, made, choice, parallel, sampling_fields(options))


def agent_loop(
    name: str,
    tools: Sequence[Any],
    *,
    output_type: Any = None,
    max_steps: int = 10,
    on_event: Any = None,
    choice: str = "auto",
    parallel: bool = True,
    **options: Any,
) -> ir.Expr:
    """Lets the model call tools, and see their results, until it answers.

    Args:
        name: Variable that gets the answer.
        tools: `@tool` functions, or plain typed functions.
        output_type: Type of the answer, as for ``gen(type=...)``; None for text.
        max_steps: Most turns of the model; without an answer by then, the program fails with `StepsError`.
        on_event: Called with each `AgentEvent`; may block, may be a coroutine function.
        choice: For the first turn: "auto", "required", or a tool's name.
        parallel: More than one call in a turn is allowed.
        **options: As for `gen`: temperature, max_tokens...

    Raises:
        UserError: The tools or an option are wrong.
    """
    made = as_tools(tools)
    _check_choice(choice, made)
    if max_steps < 1:
        raise UserError(f"max_steps is {max_steps}; it must be at least 1", param="max_steps")
    value = None if output_type is None else document_type(output_type)
    return ir.AgentLoop(name, made, value, max_steps, on_event, choice, parallel, sampling_fields(options))


def _check_choice(choice: str, tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    if choice not in ("auto", "required", *names):
        raise UserError(f"choice is {choice!r}; it must be 'auto', 'required' or one of {names}", param="choice")
