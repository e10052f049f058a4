"""From an ask to requests: the chat rendered and tokenised, remembered turns put in, and the constraint made.

Runs off the event loop, since a long chat takes a while. Nothing is started here; what is wrong is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from agentrt.backend import Backend
from agentrt.config import ServerConfig
from agentrt.errors import PromptError, TooLongError, UserError
from agentrt.request import GrammarSpec, ProgramTag, Request, SamplingParams
from agentrt.server.answers import SampleAnswer
from agentrt.server.asks import CallOptions, ChatAsk, Constraint
from agentrt.server.framed_calls import Unframed
from agentrt.server.model_habits import ModelHabits
from agentrt.server.thinking import ThinkingSplitter
from agentrt.server.turns import TurnMemory
from agentrt.text.chat_messages import plain_messages
from agentrt.text.closed_schema import closed
from agentrt.text.tool_format import Choice

#: How many characters a tokenizer's normaliser may make one of.
_NORMALISED = 4
#: Names that tool_choice uses for itself.
_CHOICE_WORDS = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is ready to be submitted.

    Attributes:
        requests: In the order of their answers.
        answers: One empty answer a sample.
        inside_thinking: The prompt has already opened the model's thinking.
        thinks_first: The constraint is on what follows the thinking, so that the thinking must be generated before.
        thinking_budget: Most tokens of that thinking.
        unframed: Calls that are to be begun anew in their frame; None where there is no such thing.
    """

    requests: tuple[Request, ...]
    answers: list[SampleAnswer]
    inside_thinking: bool = False
    thinks_first: bool = False
    thinking_budget: int | None = None
    unframed: Unframed | None = None


class Prompter:
    """Prepares asks for one backend."""

    def __init__(self, backend: Backend, config: ServerConfig, habits: ModelHabits, turns: TurnMemory, defaults: SamplingParams) -> None:
        """Makes a prompter.

        Args:
            backend: Whose tokenizer and limits count.
            config: Bounds.
            habits: How the model writes.
            turns: Answers to be recognised.
            defaults: What holds where a client says nothing: as the model's makers recommend.
        """
        self._backend = backend
        self._config = config
        self._habits = habits
        self._turns = turns
        plain = SamplingParams()
        values = {f.name: getattr(defaults, f.name) for f in fields(defaults)}
        self._defaults = {name: value for name, value in values.items() if value != getattr(plain, name)}

    def chat(self, ask: ChatAsk) -> Prepared:
        """Prepares a chat.

        Raises:
            UserError: Something is wrong with it.
        """
        self._check(ask)
        ids = self._chat_ids(ask)
        calls = ask.functions and ask.tool_choice != "none"
        sampling = self._sampling(ask, ids, self._tools_grammar(ask) if calls else None)
        inside = self._inside_thinking(ids)
        request = Request(prompt_ids=tuple(ids), sampling=sampling, **_request_options(ask.options))
        answers = [self._answer(ask, inside=inside) for _ in range(sampling.n)]
        constrained = sampling.grammar is not None or any(getattr(sampling, key) is not None for key in ("json_schema", "regex", "choices", "ebnf"))
        thinking = self._habits.thinking is not None and not ask.continue_last and (inside or self._may_think(ask, ids))
        first = thinking and (constrained or ask.thinking_budget is not None)
        return Prepared((request,), answers, inside, first, ask.thinking_budget, self._unframed(ask) if calls and not thinking else None)

    def _answer(self, ask: ChatAsk, *, inside: bool) -> SampleAnswer:
        marks = self._habits.thinking
        reader = self._habits.calls.reader(ask.functions) if ask.functions and ask.tool_choice != "none" else None
        return SampleAnswer(reader=reader, thinking=None if marks is None else ThinkingSplitter(marks, inside=inside))

    def _check(self, ask: ChatAsk) -> None:
        _at_most("messages", len(ask.messages), self._config.messages, "messages")
        _at_most("tools", len(ask.functions), self._config.tools, "tools")
        _at_most("n", ask.sampling.get("n", 1), self._config.n, "samples")
        reserved = next((f["name"] for f in ask.functions if f["name"] in _CHOICE_WORDS), None)
        if reserved is not None:
            raise UserError(f"a tool may not be named {reserved!r}, a word of tool_choice", param="tools")
        if ask.constraint is not None and ask.constraint.key != "json_schema" and ask.functions and ask.tool_choice != "none":
            raise UserError(f"tools go together with a JSON schema, not with {ask.constraint.field}", param=ask.constraint.field)

    def _chat_ids(self, ask: ChatAsk) -> list[int]:
        messages, prefill = plain_messages(ask.messages), ""
        if ask.continue_last:
            prefill = _last_text(messages)
            messages = messages[:-1]
        self.check_length(sum(len(str(message["content"])) for message in messages), "messages")
        tools = [{"type": "function", "function": dict(function)} for function in ask.functions] or None
        ids = self._backend.tokenizer.encode_chat(messages, tools=tools, **ask.template)
        return self._turns.recall([*ids, *self._backend.tokenizer.encode(prefill)] if prefill else ids, ask.options.cache_salt)

    def check_length(self, characters: int, param: str) -> None:
        """Refuses a text that cannot fit whatever its tokens are, before it is tokenised, which takes seconds a megabyte.

        Raises:
            TooLongError: It is longer than the longest tokens could spell.
        """
        context = self._backend.capabilities.max_context
        needed = characters // (_NORMALISED * self._longest_token)
        if needed > context:
            raise TooLongError(
                f"the prompt has {characters} characters, which are more than {needed} tokens; the context is {context}", needed=needed, limit=context, param=param
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of it."""
        tokenizer = self._backend.tokenizer
        return max((len(tokenizer.token_bytes(token_id) or b"") for token_id in range(tokenizer.vocab_size)), default=1) or 1

    def _tools_grammar(self, ask: ChatAsk) -> GrammarSpec:
        schema = None if ask.constraint is None or ask.tool_choice != "auto" else _schema_text(ask.constraint)
        return self._habits.calls.grammar(_closed(ask.functions), Choice(ask.tool_choice, ask.parallel, schema, ask.strict))

    def _unframed(self, ask: ChatAsk) -> Unframed | None:
        """What is begun anew where the model is free to call: a call of no tool that there is, and one that others may follow."""
        bare = self._habits.calls.bare_calls(ask.functions)
        if bare is None or ask.tool_choice != "auto" or ask.constraint is not None:
            return None
        beginnings = (bare.misnamed, bare.offered) if ask.parallel else (bare.misnamed,)
        return Unframed(beginnings, self._habits.calls.grammar(_closed(ask.functions), Choice("required", parallel=ask.parallel, strict=ask.strict)))

    def _sampling(self, ask: ChatAsk, ids: Sequence[int], grammar: GrammarSpec | None) -> SamplingParams:
        values: dict[str, Any] = self._defaults | dict(ask.sampling)
        if ask.clamp and values.get("max_tokens") is not None:
            room = self._backend.capabilities.max_context - len(ids)
            values["max_tokens"] = max(1, min(values["max_tokens"], room))
        if grammar is not None:
            return SamplingParams(**values, grammar=grammar, strict=ask.strict)
        return SamplingParams(**values, **_constraint_fields(ask.constraint), strict=ask.strict)

    def _inside_thinking(self, ids: Sequence[int]) -> bool:
        marks = self._habits.thinking
        if marks is None:
            return False
        tail = self._backend.tokenizer.decode(ids[-16:], skip_special=False)
        return tail.rfind(marks.open) > tail.rfind(marks.close)

    def _may_think(self, ask: ChatAsk, ids: Sequence[int]) -> bool:
        """Whether the model may open its thinking itself: the prompt has not closed it, and nobody turned it off."""
        marks = self._habits.thinking
        tail = self._backend.tokenizer.decode(ids[-16:], skip_special=False)
        return marks is not None and not tail.rstrip().endswith(marks.close) and ask.template.get("enable_thinking") is not False

    def texts(self, prompts: Sequence[str | Sequence[int]], sampling: Mapping[str, Any], constraint: Constraint | None, options: CallOptions) -> Prepared:
        """Prepares text completions.

        Raises:
            UserError: Something is wrong with them.
        """
        params = SamplingParams(**(self._defaults | dict(sampling)), **_constraint_fields(constraint))
        _at_most("prompt", len(prompts) * params.n, self._config.n, "samples in all")
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        requests = tuple(Request(prompt_ids=each, sampling=params, **_request_options(options)) for each in ids)
        return Prepared(requests, [SampleAnswer() for _ in range(len(requests) * params.n)])

    def _prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self.check_length(len(prompt), "prompt")
        ids = self._backend.tokenizer.encode(prompt, bos=True) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise PromptError("the prompt is empty; give at least one token", param="prompt")
        return tuple(ids)


def _closed(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The functions with no parameters but those that they name."""
    return [{**function, "parameters": closed(function["parameters"])} for function in functions]


def _request_options(options: CallOptions) -> dict[str, Any]:
    program = None if options.program is None else ProgramTag(options.program)
    return {"cache_salt": options.cache_salt, "priority": options.priority, "program": program}


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    return {} if constraint is None else {constraint.key: constraint.value}


def _schema_text(constraint: Constraint) -> str:
    """The schema as text; text that a client sent is taken as it is, and refused later if it is no schema."""
    value = constraint.value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or len(messages) < 2:
        raise UserError("to be continued, the last message must be the assistant's, without calls, after another one", param="messages")
    return str(last["content"])


def _at_most(param: str, value: Any, limit: int, unit: str) -> None:
    if isinstance(value, int) and value > limit:
        raise UserError(f"{param} has {value} {unit}; at most {limit} are allowed", param=param)
