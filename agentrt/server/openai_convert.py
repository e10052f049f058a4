"""OpenAI's bodies to asks, and answers to OpenAI's bodies and chunks: pure functions, no engine, no network.

Invariant: a field with a bad value is refused by the name that the client knows it by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrt.backend import Tokenizer
from agentrt.errors import UserError
from agentrt.request import FinishReason, TokenLogprob, Usage
from agentrt.server.answers import Heard, SampleAnswer
from agentrt.server.asks import CallOptions, ChatAsk, Constraint
from agentrt.server.openai_types import ChatBody, CompletionBody, NamedTool, ResponseFormat, SamplingFields, Tool

#: What JSON can hold in place of minus infinity.
LOWEST_LOGPROB = -9999.0

# ---- bodies to asks

_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "n", "ignore_eos", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def sampling_fields(body: SamplingFields) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` that the body gives; what it leaves out is left out."""
    given = {name: getattr(body, name) for name in (*_SAME_NAME, *_PENALTIES) if getattr(body, name) is not None}
    if body.top_k == -1:  # other servers' way to say "all"
        given["top_k"] = 0
    for name, value in (("stop", body.stop), ("stop_regex", body.stop_regex), ("stop_token_ids", body.stop_token_ids)):
        if value is not None:
            given[name] = (value,) if isinstance(value, str) else tuple(value)
    if body.include_stop_str_in_output is not None:
        given["include_stop"] = body.include_stop_str_in_output
    if body.logit_bias is not None:
        given["logit_bias"] = bias_by_id(body.logit_bias)
    if body.max_tokens is not None:
        given["max_tokens"] = body.max_tokens
    return given


def bias_by_id(bias: Mapping[str, float]) -> dict[int, float]:
    """A logit_bias with token ids for keys, which are texts in JSON.

    Raises:
        UserError: A key is no token id.
    """
    wrong = next((key for key in bias if not key.isascii() or not key.isdigit() or len(key) > 18), None)
    if wrong is not None:
        raise UserError(f"logit_bias has the key {wrong[:40]!r}; keys are token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def constraint_of(body: SamplingFields, response_format: ResponseFormat | None = None) -> Constraint | None:
    """The one constraint on the answer's text.

    Raises:
        UserError: There is more than one, or one is incomplete.
    """
    found = [*_plain_constraints(body), *_of_response_format(response_format), *_of_structured_outputs(body)]
    if len(found) > 1:
        raise UserError(f"{found[0].field} and {found[1].field} were given together; one request takes one constraint", param=found[1].field)
    return found[0] if found else None


def _plain_constraints(body: SamplingFields) -> Iterable[Constraint]:
    names = {
        "regex": "regex", "ebnf": "ebnf", "choices": "choices", "json_schema": "json_schema", "grammar": "ebnf", "guided_json": "json_schema",
        "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "ebnf",
    }
    return [Constraint(name, key, getattr(body, name)) for name, key in names.items() if getattr(body, name) is not None]


def _of_structured_outputs(body: SamplingFields) -> Iterable[Constraint]:
    asked = body.structured_outputs
    if asked is None:
        return []
    if asked.structural_tag is not None:
        raise UserError("structured_outputs.structural_tag is not supported; use tools", param="structured_outputs")
    pairs = (("json", "json_schema", asked.json_schema), ("regex", "regex", asked.regex), ("choice", "choices", asked.choice), ("grammar", "ebnf", asked.grammar))
    found = [Constraint(f"structured_outputs.{name}", key, value) for name, key, value in pairs if value is not None]
    return [*found, Constraint("structured_outputs.json_object", "json_schema", {"type": "object"})] if asked.json_object else found


def _of_response_format(asked: ResponseFormat | None) -> Iterable[Constraint]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Constraint("response_format", "json_schema", {"type": "object"})]
    if asked.json_schema is None or asked.json_schema.json_schema is None:
        raise UserError("response_format is json_schema, but response_format.json_schema.schema is missing", param="response_format.json_schema.schema")
    return [Constraint("response_format", "json_schema", asked.json_schema.json_schema)]


def chat_ask(body: ChatBody, options: CallOptions) -> ChatAsk:
    """What a chat completion asks.

    Raises:
        UserError: Fields contradict one another.
    """
    sampling = sampling_fields(body)
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise UserError("top_logprobs was given without logprobs; send logprobs: true", param="top_logprobs")
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    tools = body.tools or []
    return ChatAsk(
        messages=[_without_refusal_parts(message) for message in body.messages],
        sampling=sampling,
        constraint=constraint_of(body, body.response_format),
        functions=functions_of(tools),
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        strict=bool(body.strict),
        template=_template(body),
        continue_last=bool(body.continue_final_message),
        thinking_budget=body.thinking_budget,
        options=options,
    )


def _without_refusal_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a refusal's words as text, which is what the model had said."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": part.get("refusal")} if isinstance(part, dict) and part.get("type") == "refusal" else part for part in content]
    return {**message, "content": parts}


def functions_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The functions among tools, as templates and grammars take them.

    Raises:
        UserError: Two have one name.
    """
    functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in tools]
    for function in functions:
        function.setdefault("parameters", {"type": "object", "properties": {}})
    names = [function["name"] for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"tools has two functions named {twice!r}; names must differ", param="tools")
    return functions


def _tool_choice(asked: str | NamedTool | None, tools: Sequence[Tool]) -> str:
    if asked is None:
        return "auto" if tools else "none"
    names = [tool.function.name for tool in tools]
    if isinstance(asked, NamedTool):
        if asked.function.name not in names:
            raise UserError(f"tool_choice names {asked.function.name!r}, but tools has {names}", param="tool_choice")
        return asked.function.name
    if asked == "required" and not tools:
        raise UserError("tool_choice is required, but there are no tools", param="tool_choice")
    return asked if tools else "none"


def _template(body: ChatBody) -> dict[str, Any]:
    template = dict(body.chat_template_kwargs or {})
    reserved = sorted({"messages", "tools", "add_generation_prompt", "conversation", "chat_template", "tokenize"} & set(template))
    if reserved:
        raise UserError(f"chat_template_kwargs may not set {reserved[0]!r}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
        template.setdefault("enable_thinking", body.reasoning_effort != "none")
    return template


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion, each text or token ids.

    Raises:
        UserError: There is none, or one is empty.
    """
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
    if not prompts or any(not each for each in prompts):
        raise UserError("prompt is empty; give at least one token", param="prompt")
    return prompts


def completion_sampling(body: CompletionBody) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` for a text completion.

    Raises:
        UserError: A field is not supported.
    """
    if body.suffix:
        raise UserError("suffix is not supported; put what follows into the prompt", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UserError("best_of is not supported; ask for n and choose", param="best_of")
    sampling = {"max_tokens": 16} | sampling_fields(body) | {"strict": bool(body.strict)}
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    return sampling


# ---- answers to bodies


@dataclass(frozen=True, slots=True)
class Face:
    """What every body and chunk of one answer repeats.

    Attributes:
        id: Of the answer.
        model: Name to show.
        created: Unix time.
        fingerprint: Names model and engine version.
    """

    id: str
    model: str
    created: int
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """The repeated fields."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}


def usage_body(usages: Sequence[Usage], *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """What the call cost, all its requests together."""
    prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens, "forced_tokens": sum(u.forced_tokens for u in usages)},
    }


def finish_reason(reason: FinishReason, *, called: bool, named: bool, named_finish: str) -> str:
    """OpenAI's finish_reason: tool_calls for auto and required, stop for a named tool (or as configured)."""
    if reason is not FinishReason.STOP or not called:
        return reason.value
    return named_finish if named else "tool_calls"


def call_body(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """One call of a tool."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message_body(answer: SampleAnswer) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.thoughts:
        message |= {"reasoning_content": answer.thoughts, "reasoning": answer.thoughts}
    if answer.calls:
        message["tool_calls"] = [call_body(call.id, call.name, call.arguments) for call in answer.calls]
    return message


def delta_body(heard: Iterable[Heard]) -> dict[str, Any]:
    """The delta of a chunk; empty if nothing was heard."""
    text, thoughts, calls = "", "", []
    for event in heard:
        if event.kind == "text":
            text += event.text
        elif event.kind == "thought":
            thoughts += event.text
        elif event.kind == "call":
            calls.append({"index": event.index, **call_body(event.call_id, event.text, "")})
        else:
            _grow(calls, event)
    delta: dict[str, Any] = {}
    if text:
        delta["content"] = text
    if thoughts:
        delta |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls:
        delta["tool_calls"] = calls
    return delta


def _grow(calls: list[dict[str, Any]], event: Heard) -> None:
    if calls and calls[-1]["index"] == event.index:
        calls[-1]["function"]["arguments"] += event.text
    else:
        calls.append({"index": event.index, "function": {"arguments": event.text}})


# ---- log-probabilities


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    text = tokenizer.decode([token_id], skip_special=False) if raw is None else raw.decode("utf-8", "replace")
    return {"token": text, "bytes": None if raw is None else list(raw)}


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As chat completions tell them."""
    content = []
    for score in scores:
        top = [{**_token(tokenizer, token_id), "logprob": _number(logprob)} for token_id, logprob in score.top]
        content.append({**_token(tokenizer, score.token_id), "logprob": _number(score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprob], *, offset: int = 0) -> dict[str, Any]:
    """As text completions tell them."""
    tokens = [_token(tokenizer, score.token_id)["token"] for score in scores]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = [
        None if score.logprob is None else {_token(tokenizer, token_id)["token"]: _number(logprob) for token_id, logprob in score.top}
        for score in scores
    ]
    return {"tokens": tokens, "token_logprobs": [_number(s.logprob) for s in scores], "top_logprobs": top, "text_offset": offsets}


def json_text(value: Mapping[str, Any]) -> str:
    """JSON of a schema, as a grammar takes it."""
    return json.dumps(value, ensure_ascii=False)
