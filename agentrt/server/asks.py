"""What a client asks, whichever API it speaks: the form that chat completions, responses and messages are all brought to.

Plain values only; nothing is rendered or tokenised here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer's text must satisfy.

    Attributes:
        field: What the client called it, for messages.
        key: The field of `SamplingParams` that takes it.
        value: Its value.
    """

    field: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What concerns the call rather than its answer.

    Attributes:
        cache_salt: Requests with different salts never share KV.
        priority: Higher runs first.
        program: Id of the agent program that this call belongs to, or None.
    """

    cache_salt: str = ""
    priority: int = 0
    program: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """A chat to be continued.

    Attributes:
        messages: In OpenAI's form.
        sampling: Keyword arguments of `SamplingParams`, the constraint left out.
        constraint: On the text of the answer, or None.
        functions: Tools, each {"name", "description", "parameters"}.
        tool_choice: "none", "auto", "required" or a tool's name.
        parallel: More than one call is allowed.
        strict: Refuse a constraint of which a keyword would only be checked at the end.
        template: Variables for the chat template.
        continue_last: The last message is the assistant's and is to be continued.
        clamp: Lower max_tokens to what fits, where a client must send one.
        thinking_budget: Most tokens of thinking; None: no bound of its own.
        options: What concerns the call.
    """

    messages: Sequence[Message]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    functions: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "none"
    parallel: bool = True
    strict: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool = False
    clamp: bool = False
    thinking_budget: int | None = None
    options: CallOptions = field(default_factory=CallOptions)
