"""How the served model writes calls and thoughts, found out from what its chat template does with a small chat.

The template's source is not read: what it renders is what the model was trained on. Invariant: a template that refuses
the small chat costs nothing but the guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrt.backend import Tokenizer
from agentrt.errors import AgentrtError
from agentrt.server.thinking import ThinkingMarks, guess_marks
from agentrt.text.tool_format import CallFormat, format_named, guess_format

_USER = {"role": "user", "content": "Probe."}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "Probes.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": '{"a": 1}'}}


@dataclass(frozen=True, slots=True)
class ModelHabits:
    """What the server has to know of the model.

    Attributes:
        calls: How it writes calls of tools.
        thinking: The marks around its thinking; None if it does not think.
    """

    calls: CallFormat
    thinking: ThinkingMarks | None


def find_habits(tokenizer: Tokenizer, *, tool_format: str = "auto", reasoning: str = "auto") -> ModelHabits:
    """Finds out how the model writes.

    Args:
        tokenizer: The model's.
        tool_format: Name of a format, or "auto".
        reasoning: "auto" or "off".

    Raises:
        UserError: There is no such format.
    """
    calls = format_named(tool_format) if tool_format != "auto" else guess_format(_calling_turn(tokenizer))
    return ModelHabits(calls, guess_marks(_thinking_turns(tokenizer)) if reasoning == "auto" else None)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    try:
        return tokenizer.decode(tokenizer.encode_chat(messages, **arguments), skip_special=False)
    except AgentrtError:
        return ""


def _calling_turn(tokenizer: Tokenizer) -> str:
    before = _rendered(tokenizer, [_USER], tools=[_TOOL], add_generation_prompt=False)
    called = _rendered(tokenizer, [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], tools=[_TOOL], add_generation_prompt=False)
    return called.removeprefix(before)


def _thinking_turns(tokenizer: Tokenizer) -> str:
    answered = {"role": "assistant", "content": "Yes.", "reasoning_content": "Probing."}
    return "\n".join(
        [
            _rendered(tokenizer, [_USER]),
            _rendered(tokenizer, [_USER], enable_thinking=False),
            _rendered(tokenizer, [_USER, answered], add_generation_prompt=False),
        ]
    )
