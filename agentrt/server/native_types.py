"""Bodies of the native endpoints: token ids in and out, with everything that a `Request` can say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr

from agentrt.server.openai_types import Closed, Many, Number


class GrammarBody(Closed):
    """A `GrammarSpec`."""

    kind: StrictStr
    source: StrictStr
    options: dict[str, StrictStr | StrictBool | StrictInt] = Field(default_factory=dict)
    engine: StrictStr = "auto"
    strict: StrictBool = False
    jump_forward: StrictStr = "on"


class SamplingBody(Closed):
    """`SamplingParams`, by the same names."""

    max_tokens: StrictInt | None = None
    max_new_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_k: StrictInt | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(fail_fast=True)] | None = None
    stop: StrictStr | Many[StrictStr] | None = None
    stop_regex: StrictStr | Many[StrictStr] | None = None
    stop_token_ids: Many[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    include_stop: StrictBool | None = None
    seed: StrictInt | None = None
    n: StrictInt | None = None
    logprobs: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    prompt_logprobs_start: StrictInt | None = None
    json_schema: Any = None
    regex: StrictStr | None = None
    choices: Many[StrictStr] | None = None
    ebnf: StrictStr | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: StrictStr | None = None
    parallel_tool_calls: StrictBool | None = None
    grammar: GrammarBody | None = None
    strict: StrictBool | None = None
    max_resamples: StrictInt | None = None


class ProgramBody(Closed):
    """A `ProgramTag`."""

    program: StrictStr
    branch: StrictStr = ""
    expected_calls: StrictInt = 0
    will_fork: StrictInt = 0


class GenerateBody(Closed):
    """POST /generate: one prompt."""

    text: StrictStr | None = None
    input_ids: Many[StrictInt] | None = None
    messages: Many[dict[str, Any]] | None = None
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    stream: StrictBool = False
    request_id: StrictStr | None = Field(default=None, max_length=256)
    cache_salt: StrictStr | None = None
    priority: StrictInt | None = None
    program: ProgramBody | StrictStr | None = None
    prompt_tail: StrictStr = Field(default="", description="Base64 of text not in the prompt that the answer must begin by completing.")
    deadline: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    hold_seconds: float | None = Field(default=None, ge=0, le=3600)
    end_program: StrictBool = False


class HoldBody(Closed):
    """POST /programs/{id}/hold."""

    seconds: float = Field(ge=0, le=3600)


class AbortBody(Closed):
    """POST /abort: one call, or all."""

    request_id: StrictStr | None = None
    rid: StrictStr | None = None
    abort_all: StrictBool = False
