"""Anthropic's bodies to asks, and answers to Anthropic's messages and events: pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrt.errors import UserError
from agentrt.request import FinishReason, Usage
from agentrt.server.answers import SampleAnswer
from agentrt.server.anthropic_types import CountBody, MessageBody, MessagesBody
from agentrt.server.asks import CallOptions, ChatAsk, Constraint
from agentrt.server.blocks import Block, Change, blocks_of


def messages_ask(body: CountBody, options: CallOptions) -> ChatAsk:
    """What a body asks.

    Raises:
        UserError: Something in it contradicts the rest, or is not supported.
    """
    choice, parallel = _tool_choice(body)
    messages = [*_system(body), *(plain for number, turn in enumerate(body.messages) for plain in _plain(turn, number))]
    return ChatAsk(
        messages=messages,
        sampling=_sampling(body) if isinstance(body, MessagesBody) else {},
        constraint=_constraint(body),
        functions=[{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in body.tools or ()],
        tool_choice=choice,
        parallel=parallel,
        template={} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
        continue_last=bool(messages) and messages[-1]["role"] == "assistant",
        clamp=True,
        thinking_budget=None if body.thinking is None or body.thinking.type == "disabled" else body.thinking.budget_tokens,
        options=options,
    )


def _sampling(body: MessagesBody) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k") if getattr(body, name) is not None}
    return given | ({"stop": tuple(body.stop_sequences)} if body.stop_sequences else {})


def _constraint(body: CountBody) -> Constraint | None:
    form = (body.output_config.format if body.output_config else None) or body.output_format
    return None if form is None else Constraint("output_config.format", "json_schema", form.json_schema)


def _tool_choice(body: CountBody) -> tuple[str, bool]:
    asked, names = body.tool_choice, [tool.name for tool in body.tools or ()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"tools has two tools named {twice!r}; names must differ", param="tools")
    if asked is None:
        return ("auto" if names else "none"), True
    parallel = not asked.disable_parallel_tool_use
    if asked.type == "tool":
        if asked.name not in names:
            raise UserError(f"tool_choice names {asked.name!r}, but tools has {names}", param="tool_choice")
        return str(asked.name), parallel
    if asked.type == "any" and not names:
        raise UserError("tool_choice is any, but there are no tools", param="tool_choice")
    return {"auto": "auto", "any": "required", "none": "none"}[asked.type] if names else "none", parallel


def _system(body: CountBody) -> list[dict[str, Any]]:
    if not body.system:
        return []
    text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
    return [{"role": "system", "content": text}]


def _plain(turn: MessageBody, number: int) -> Iterable[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return _assistant(turn.content, number) if turn.role == "assistant" else _user(turn.role, turn.content, number)


def _user(role: str, content: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in content:
        if block.get("type") == "tool_result":
            plain.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _result(block, number)})
        else:
            texts.append(_text(block, number))
    return [*plain, {"role": role, "content": "\n".join(texts)}] if texts or not plain else plain


def _result(block: Mapping[str, Any], number: int) -> str:
    content = block.get("content", "")
    text = content if isinstance(content, str) else "\n".join(_text(part, number) for part in content or ())
    return f"Error: {text}" if block.get("is_error") else text


def _text(block: Any, number: int) -> str:
    if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise UserError(f"message {number} has a block of the kind {kind!r}; this model reads text only", param="messages")


def _assistant(content: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    texts, calls, thoughts = [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": str(block.get("name", "")), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(block, number))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message]


# ---- answers


def stop_reason(answer: SampleAnswer) -> str:
    """Why the answer ended, in Anthropic's words."""
    if answer.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    return "stop_sequence" if isinstance(answer.stop_match, str) else "end_turn"


def usage_body(prompt_tokens: int, usage: Usage | None = None, output_tokens: int = 0) -> dict[str, Any]:
    """What it cost; tokens that were cached are told apart from the other input."""
    cached = usage.cached_tokens if usage else 0
    output = usage.completion_tokens if usage else output_tokens
    return {"input_tokens": prompt_tokens - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0, "output_tokens": output}


def block_body(block: Block) -> dict[str, Any]:
    """A whole block."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(block.text)}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # cut by max_tokens
        return {}


def message_body(message_id: str, model: str, answer: SampleAnswer | None, usage: dict[str, Any]) -> dict[str, Any]:
    """A message; without an answer, as a stream begins it."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [block_body(block) for block in blocks_of(answer)] if answer else [],
        "stop_reason": stop_reason(answer) if answer else None,
        "stop_sequence": answer.stop_match if answer and isinstance(answer.stop_match, str) else None,
        "usage": usage,
    }


def block_event(change: Change) -> dict[str, Any]:
    """The event of a change."""
    block, index = change.block, change.block.index
    if change.what == "open":
        return {"type": "content_block_start", "index": index, "content_block": block_body(Block(block.kind, index, "", block.name, block.call_id))}
    if change.what == "close":
        return {"type": "content_block_stop", "index": index}
    deltas = {
        "text": {"type": "text_delta", "text": change.grown},
        "thought": {"type": "thinking_delta", "thinking": change.grown},
        "call": {"type": "input_json_delta", "partial_json": change.grown},
    }
    return {"type": "content_block_delta", "index": index, "delta": deltas[block.kind]}
