"""Chat messages as people and APIs write them, turned into the plain form that chat templates expect.

Invariant: what comes out are fresh dictionaries with a role and a text as content, so that a template cannot reach,
or change, the caller's own objects. It knows no template; what a template lacks (tools, a system role) is put in
words here, in the form of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrt.errors import PromptError

Message = Mapping[str, Any]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies messages to their plain form: contents as text, arguments of tool calls as objects.

    Args:
        messages: Each with a ``role``, and a ``content`` that is a text, None, or a list of text parts.

    Raises:
        PromptError: Something is missing or of the wrong kind; names the message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages is a {type(messages).__name__}; it must be a list of messages", param="messages")
    if not messages:
        raise PromptError("messages is empty; give at least one message", param="messages")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {index} is a {type(message).__name__}; it must be an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role or len(role) > 64 or not role.replace("_", "").replace("-", "").isalnum():
        raise PromptError(f"message {index} has the role {role!r}; it must be a word such as 'user'", param="messages")
    plain = {key: _plain_value(index, value) for key, value in message.items() if key not in ("content", "tool_calls")}
    plain["content"] = _text_of(index, message.get("content"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise PromptError(f"message {index} has the tool_calls {calls!r}; they must be a list", param="messages")
    if calls:
        plain["tool_calls"] = [_plain_call(index, call) for call in calls]
    return plain


def _plain_value(index: int, value: Any) -> Any:
    """A copy made of JSON's own kinds only."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"message {index} holds what is not JSON: {error}", param="messages") from error


def _text_of(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"message {index} has a {type(content).__name__} as content; it must be text", param="messages")
    return "".join(_text_of_part(index, part) for part in content)


def _text_of_part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(f"message {index} has a part of the kind {kind!r}; this model reads text only", param="messages")


def _plain_call(index: int, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise PromptError(f"message {index} has a tool call that is not an object", param="messages")
    plain: dict[str, Any] = _plain_value(index, call)
    function = plain.get("function", plain)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"message {index} has a tool call without a function's name", param="messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API has them; templates want the object
        function["arguments"] = _parsed(arguments)
    return plain


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments  # what the model wrote was no JSON; it sees its own words again


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies tools to the form ``{"type": "function", "function": {...}}`` that templates expect.

    Raises:
        PromptError: A tool has no name, or is not JSON.
    """
    plain: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f"tool {index} has no function's name", param="tools")
        try:
            copied = json.loads(json.dumps(dict(function)))
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"tool {function['name']!r} holds what is not JSON: {error}", param="tools") from error
        copied.pop("type", None)
        plain.append({"type": "function", "function": copied})
    return plain


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells the model, in words, which tools there are and how to call one."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call the functions below, one or more of them, to answer the user. "
        f"Their signatures are JSON Schemas:\n<tools>\n{signatures}\n</tools>\n\n"
        "To call a function, write a JSON object with its name and its arguments between these tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def tools_in_words(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """For a template that knows no tools: signatures into the system message, calls and results into the contents.

    Results come from the user, who is the nearest role that such a model was trained with; neighbouring ones make one
    message, since many templates want user and assistant to alternate.
    """
    told: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result})
        elif "tool_calls" in message:
            texts = [message["content"], *map(_call_in_words, message["tool_calls"])]
            told.append({"role": message["role"], "content": "\n".join(text for text in texts if text)})
        else:
            told.append(message)
        after_result = is_result
    return with_system_text(told, describe_tools(tools)) if tools else told


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    written = json.dumps({"name": function["name"], "arguments": function.get("arguments", {})}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Adds `text` to the system message, or makes one."""
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": "\n\n".join(part for part in (messages[0]["content"], text) if part)}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def system_into_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows no system role: its text goes before the first user message's."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    for index, message in enumerate(others):
        if message["role"] == "user":
            others[index] = message | {"content": "\n\n".join([*texts, message["content"]])}
            return others
    return [{"role": "user", "content": "\n\n".join(texts)}, *others]
