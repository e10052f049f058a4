"""The bodies that Anthropic clients send."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from agentrt.server.openai_types import Body, Many, Number


class TextBlock(BaseModel):
    """Text."""

    type: Literal["text"]
    text: StrictStr


class MessageBody(BaseModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Many[dict[str, Any]]


class ToolBody(BaseModel):
    """A tool of the client's."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"] | None = None
    name: StrictStr = Field(min_length=1, max_length=256, pattern=r"^[^\s\"\\<>\[\](){}]+$")
    description: StrictStr | None = None
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolChoiceBody(BaseModel):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class ThinkingBody(BaseModel):
    """Whether and how long to think."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: StrictInt | None = Field(default=None, ge=1)


class OutputFormat(BaseModel):
    """What the answer's text must be."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How to answer."""

    model_config = ConfigDict(extra="allow")

    format: OutputFormat | None = None
    effort: StrictStr | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: StrictStr | None = None
    messages: Many[MessageBody]
    system: StrictStr | Many[TextBlock] | None = None
    tools: Many[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: StrictInt = Field(ge=1)
    stop_sequences: Many[StrictStr] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    inference_geo: StrictStr | None = None
