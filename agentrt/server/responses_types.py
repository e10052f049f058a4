"""The bodies that clients of OpenAI's responses API send."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from agentrt.server.openai_types import Body, Many, Number, StreamOptions


class ResponseTool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: StrictStr = Field(min_length=1, max_length=256, pattern=r"^[^\s\"\\<>\[\](){}]+$")
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedResponseTool(BaseModel):
    """A tool_choice that names one."""

    type: Literal["function"]
    name: StrictStr


class TextFormat(BaseModel):
    """What the answer's text must be."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextBody(BaseModel):
    """How the answer's text is."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ReasoningBody(BaseModel):
    """How much to think."""

    model_config = ConfigDict(extra="allow")

    effort: StrictStr | None = None


class ResponseBody(Body):
    """POST /v1/responses."""

    model: StrictStr | None = None
    input: StrictStr | Many[dict[str, Any]]
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    max_tool_calls: StrictInt | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: StrictInt | None = None
    previous_response_id: StrictStr | None = None
    store: StrictBool | None = None
    background: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    seed: StrictInt | None = None
    cache_salt: StrictStr | None = None
    priority: StrictInt | None = None
