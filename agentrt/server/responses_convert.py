"""The responses API's bodies to asks, and answers to its objects and events: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrt.errors import UserError
from agentrt.request import FinishReason, Usage
from agentrt.server.answers import SampleAnswer
from agentrt.server.asks import CallOptions, ChatAsk, Constraint, Message
from agentrt.server.blocks import Block, Change, blocks_of
from agentrt.server.responses_types import NamedResponseTool, ResponseBody

# ---- bodies to asks


def response_ask(body: ResponseBody, history: Sequence[Message], options: CallOptions) -> ChatAsk:
    """What a body asks.

    Args:
        body: The body.
        history: Messages of the responses before it.
        options: What concerns the call.

    Raises:
        UserError: Something in it contradicts the rest, or is not supported.
    """
    return ChatAsk(
        messages=[*_instructions(body), *history, *input_messages(body)],
        sampling=_sampling(body),
        constraint=_constraint(body),
        functions=_functions(body),
        tool_choice=_tool_choice(body),
        parallel=body.parallel_tool_calls is not False,
        template=_template(body),
        options=options,
    )


def _instructions(body: ResponseBody) -> list[Message]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _sampling(body: ResponseBody) -> dict[str, Any]:
    given: dict[str, Any] = {name: getattr(body, name) for name in ("temperature", "top_p", "seed") if getattr(body, name) is not None}
    if body.max_output_tokens is not None:
        given["max_tokens"] = body.max_output_tokens
    return given | ({"logprobs": body.top_logprobs} if body.top_logprobs else {})


def _constraint(body: ResponseBody) -> Constraint | None:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint("text.format", "json_schema", {"type": "object"})
    if form.json_schema is None:
        raise UserError("text.format is json_schema, but text.format.schema is missing", param="text.format.schema")
    return Constraint("text.format", "json_schema", form.json_schema)


def _functions(body: ResponseBody) -> list[dict[str, Any]]:
    names = [tool.name for tool in body.tools or ()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"tools has two functions named {twice!r}; names must differ", param="tools")
    empty = {"type": "object", "properties": {}}
    return [{"name": t.name, "description": t.description or "", "parameters": t.parameters or empty} for t in body.tools or ()]


def _tool_choice(body: ResponseBody) -> str:
    asked, names = body.tool_choice, [tool.name for tool in body.tools or ()]
    if isinstance(asked, NamedResponseTool):
        if asked.name not in names:
            raise UserError(f"tool_choice names {asked.name!r}, but tools has {names}", param="tool_choice")
        return asked.name
    if asked == "required" and not names:
        raise UserError("tool_choice is required, but there are no tools", param="tool_choice")
    return (asked or "auto") if names else "none"


def _template(body: ResponseBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def input_messages(body: ResponseBody) -> list[Message]:
    """The input as messages.

    Raises:
        UserError: An item is of a kind that is not known here.
    """
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(body.input):
        _add_item(messages, item, number)
    return list(messages)


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], number: int) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), number)})
    elif kind == "function_call":
        function = {"name": str(item.get("name", "")), "arguments": str(item.get("arguments", "{}"))}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": _text(item.get("output"), number)})
    elif kind == "reasoning":
        thoughts = "".join(str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, Mapping))
        if thoughts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    else:
        raise UserError(f"input[{number}] is of the kind {kind!r}; messages, function calls and their outputs are known", param="input")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that a call belongs to; a new one if the last message is someone else's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        known = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text", "text", "refusal")
        if not known:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"input[{number}] has a part of the kind {kind!r}; this model reads text only", param="input")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


# ---- answers to bodies


def item_body(response_id: str, block: Block, status: str, *, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """An output item."""
    number = f"{response_id.removeprefix('resp_')}{block.index:02x}"
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"id": f"fc_{number}", "type": "function_call", "status": status, **call}
    if block.kind == "thought":
        content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
        return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content, "status": status}
    part = [] if status == "in_progress" else [text_part(block.text, logprobs)]
    return {"id": f"msg_{number}", "type": "message", "status": status, "role": "assistant", "content": part}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The part of a message that has its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def usage_body(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """What it cost."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_body(body: ResponseBody, response_id: str, created: int, model: str) -> dict[str, Any]:
    """A response that has just begun."""
    form = body.text.format if body.text and body.text.format else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedResponseTool) else body.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_none=True) | {"strict": tool.strict, "parameters": tool.parameters} for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def finished(begun: Mapping[str, Any], answer: SampleAnswer, usage: Usage, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The response with its answer."""
    cut = answer.finish_reason is FinishReason.LENGTH
    aborted = answer.finish_reason is FinishReason.ABORT
    status = "incomplete" if cut else "cancelled" if aborted else "completed"
    item_status = "completed" if status == "completed" else "incomplete"
    output = [item_body(begun["id"], block, item_status, logprobs=logprobs) for block in blocks_of(answer)]
    reason = {"reason": "max_output_tokens"} if cut else None
    return {**begun, "status": status, "incomplete_details": reason, "output": output, "usage": usage_body(usage, answer.thinking_tokens)}


def answer_message(answer: SampleAnswer) -> Message:
    """The answer as a turn of the history."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
    return message


def change_events(response_id: str, change: Change) -> Iterable[dict[str, Any]]:
    """The events of a change; their numbers in the sequence are left to the caller."""
    block, place = change.block, change.block.index
    item = item_body(response_id, block, "in_progress" if change.what != "close" else "completed")
    where = {"item_id": item["id"], "output_index": place}
    part = {**where, "content_index": 0}
    if change.what == "open":
        yield {"type": "response.output_item.added", "output_index": place, "item": item}
        if block.kind == "text":
            yield {"type": "response.content_part.added", **part, "part": text_part("")}
    elif change.what == "grow":
        yield _grown(block, change.grown, where, part)
    else:
        yield from _closed(block, where, part)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _grown(block: Block, grown: str, where: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "response.function_call_arguments.delta", **where, "delta": grown}
    if block.kind == "thought":
        return {"type": "response.reasoning_text.delta", **part, "delta": grown}
    return {"type": "response.output_text.delta", **part, "delta": grown, "logprobs": []}


def _closed(block: Block, where: dict[str, Any], part: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if block.kind == "call":
        yield {"type": "response.function_call_arguments.done", **where, "arguments": block.text, "name": block.name}
    elif block.kind == "thought":
        yield {"type": "response.reasoning_text.done", **part, "text": block.text}
    else:
        yield {"type": "response.output_text.done", **part, "text": block.text, "logprobs": []}
        yield {"type": "response.content_part.done", **part, "part": text_part(block.text)}
