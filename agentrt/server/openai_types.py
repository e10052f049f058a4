"""The bodies that OpenAI clients send, as pydantic models; and which of their fields are heeded, ignored or refused.

Nothing is converted here. Invariant: a field is heeded, or in the short list of those that change no answer, or the
request is refused; none is dropped in silence. ``null`` is as good as absent everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from agentrt.errors import UserError

#: Fields that change no answer: bookkeeping of the caller's, and hints to caches and queues that we do not have.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
        "safety_identifier", "verbosity", "prediction", "extra_headers", "request_id", "include",
    }
)

#: Fields that would change the answer and that we lack, with what to do instead.
LACKED = {
    "audio": "this model gives text only",
    "best_of": "ask for n and choose",
    "conversation": "use previous_response_id",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "moderation": "moderate in a call of your own",
    "prompt": "send the messages themselves",
    "web_search_options": "give the model a search tool",
}

T = TypeVar("T")
Text = StrictStr
Number = Annotated[float, Field(strict=True)]
#: A list whose first wrong item refuses it: to name each of a million would take more memory than the list.
Many = Annotated[list[T], Field(fail_fast=True)]


class Closed(BaseModel):
    """An object whose unknown fields are refused by name, the first one alone."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.harmless:
                continue
            if name in LACKED:
                raise UserError(f"{name} is not supported; {LACKED[name]}", param=name)
            raise UserError(f"{name[:64]!r} is not a field that is known here", param=name[:64])
        return self


class Body(Closed):
    """The body of a request to one of the APIs that others made."""

    harmless = HARMLESS


class StreamOptions(BaseModel):
    """What a stream carries beside the answer."""

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class StructuredOutputs(Closed):
    """vLLM's way to ask for a constraint."""

    json_schema: Any = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Many[Text] | None = None
    grammar: Text | None = None
    json_object: StrictBool | None = None
    structural_tag: Any = None


class SamplingFields(Body):
    """How to choose tokens; the names of OpenAI, and those that other servers gave to the rest."""

    model: Text | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    n: StrictInt | None = None
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[StrictInt] | None = None
    stop_regex: Text | Many[Text] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    seed: StrictInt | None = None
    logit_bias: Annotated[dict[str, Number], Field(fail_fast=True)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    cache_salt: Text | None = None
    priority: StrictInt | None = None
    return_token_ids: StrictBool | None = None
    # constraints
    regex: Text | None = None
    ebnf: Text | None = None
    choices: Many[Text] | None = None
    json_schema: Any = None
    grammar: Text | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Many[Text] | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    strict: StrictBool | None = None


class SchemaFormat(BaseModel):
    """The schema of a response_format."""

    name: Text | None = None
    description: Text | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """What the answer's text must be."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class FunctionTool(BaseModel):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\s\"\\<>\[\](){}]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedFunction(BaseModel):
    """The name of a function."""

    name: Text


class NamedTool(BaseModel):
    """A tool_choice that names one."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Many[dict[str, Any]]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    thinking_budget: Annotated[StrictInt, Field(ge=0)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    modalities: Many[Literal["text"]] | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Text | Many[Text] | Many[StrictInt] | Many[Many[StrictInt]]
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    suffix: Text | None = None
    best_of: StrictInt | None = None
    response_format: ResponseFormat | None = None


class EmbeddingBody(BaseModel):
    """POST /v1/embeddings."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    input: Any = None


class TokenizeBody(BaseModel):
    """POST /tokenize: a text or a chat."""

    model_config = ConfigDict(extra="ignore")

    model: Text | None = None
    prompt: Text | None = None
    text: Text | None = None
    messages: Many[dict[str, Any]] | None = None
    tools: Many[Tool] | None = None
    add_generation_prompt: StrictBool = True
    add_special_tokens: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool = False


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    model: Text | None = None
    tokens: Many[StrictInt]
    skip_special_tokens: StrictBool = True
    return_token_bytes: StrictBool = False
