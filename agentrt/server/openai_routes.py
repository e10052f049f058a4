"""OpenAI's chat and text completions, models and embeddings: each route converts, begins a call, and writes its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrt.request import TokenDelta
from agentrt.server import openai_convert as convert
from agentrt.server.answers import Heard, SampleAnswer
from agentrt.server.asks import ChatAsk
from agentrt.server.call import Call
from agentrt.server.events import DONE, EventStream, event
from agentrt.server.openai_types import ChatBody, CompletionBody, EmbeddingBody, SamplingFields
from agentrt.server.refusals import Refusal, Refused, not_found, refusal_of
from agentrt.server.service import Service, json_response


def openai_routes(service: Service, router: APIRouter) -> APIRouter:
    """Adds the routes to `router`."""

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request, body: ChatBody) -> Response:
        """Continues a chat."""
        service.check_model(body.model)
        ask = convert.chat_ask(body, service.options(http, body.cache_salt, body.priority))
        writer = ChatWriter(service, body, ask, service.face("chatcmpl-", body.model))
        call = await service.begin(http, "chat", writer.face.id, lambda: service.prompter.chat(ask), remembers=True)
        return await respond(service, http, call, body, writer)

    @router.post("/v1/completions")
    async def completions(http: Request, body: CompletionBody) -> Response:
        """Continues texts."""
        service.check_model(body.model)
        prompts = convert.prompts_of(body)
        sampling = convert.completion_sampling(body)
        constraint = convert.constraint_of(body, body.response_format)
        options = service.options(http, body.cache_salt, body.priority)
        writer = TextWriter(service, body, service.face("cmpl-", body.model))
        call = await service.begin(
            http, "completions", writer.face.id, lambda: service.prompter.texts(prompts, sampling, constraint, options)
        )
        return await respond(service, http, call, body, writer)

    @router.get("/v1/models")
    async def models() -> Response:
        """The models that are served."""
        return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        if name not in service.names:
            raise not_found(f"the model {name!r} is not served here; {', '.join(service.names)} is", param="model", code="model_not_found")
        return json_response(_model(service, name))

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody) -> Response:
        """Refused: the model generates text."""
        service.check_model(body.model)
        raise Refused(Refusal(501, f"{service.names[0]} generates text and has no embeddings; use an embedding model", code="not_implemented"))

    return router


def _model(service: Service, name: str) -> dict[str, Any]:
    capabilities = service.backend.capabilities
    root = {"root": capabilities.model, "parent": None, "max_model_len": capabilities.max_context}
    return {"id": name, "object": "model", "created": service.started, "owned_by": "agentrt", **root}


class Writer:
    """Writes the answer of one call in the form of its endpoint."""

    def __init__(self, service: Service, body: SamplingFields, face: convert.Face) -> None:
        """Makes a writer for a body, under a face."""
        self.service = service
        self.face = face
        self.token_ids = bool(body.return_token_ids)
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self, call: Call) -> dict[str, Any]:
        """The whole answer."""
        raise NotImplementedError

    def chunks(self, call: Call, number: int, delta: TokenDelta, heard: Sequence[Heard]) -> list[dict[str, Any]]:
        """The chunks that a delta becomes."""
        raise NotImplementedError

    def usage_chunk(self, call: Call) -> dict[str, Any]:
        """The last chunk, which tells the usage."""
        raise NotImplementedError


async def respond(service: Service, http: Request, call: Call, body: SamplingFields, writer: Writer) -> Response:
    """Sends a call's answer, streamed or whole."""
    if not body.stream:
        await service.answered(http, call)
        return json_response(writer.whole(call))
    config = service.config
    return EventStream(_stream(call, writer), keep_alive=config.keep_alive_seconds, stall=config.stall_seconds, on_end=call.end)


async def _stream(call: Call, writer: Writer) -> AsyncGenerator[bytes, None]:
    try:
        async for number, delta, heard in call.events():
            for chunk in writer.chunks(call, number, delta, heard):
                yield event(chunk)
        if writer.include_usage:
            yield event(writer.usage_chunk(call))
    except Exception as error:  # the response has begun: the error is its last event
        yield event(refusal_of(error).openai())
    yield DONE


@dataclass(slots=True)
class _Told:
    """What of one sample has been told."""

    role: bool = False
    text: int = 0


class ChatWriter(Writer):
    """Chat completions."""

    def __init__(self, service: Service, body: ChatBody, ask: ChatAsk, face: convert.Face) -> None:
        super().__init__(service, body, face)
        self._named = ask.tool_choice not in ("none", "auto", "required")
        self._logprobs = bool(body.logprobs)
        self._told: dict[int, _Told] = {}

    def _finish(self, answer: SampleAnswer) -> str | None:
        if answer.finish_reason is None:
            return None
        finish = self.service.config.named_tool_finish
        return convert.finish_reason(answer.finish_reason, called=bool(answer.calls), named=self._named, named_finish=finish)

    def _usage(self, call: Call) -> dict[str, Any]:
        return convert.usage_body(call.usages, reasoning_tokens=sum(answer.thinking_tokens for answer in call.answers))

    def whole(self, call: Call) -> dict[str, Any]:
        """The chat completion."""
        tokenizer = self.service.backend.tokenizer
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(call.answers):
            logprobs = convert.chat_logprobs(tokenizer, answer.logprobs) if self._logprobs else None
            choice = {"index": index, "message": convert.message_body(answer), "logprobs": logprobs, "finish_reason": self._finish(answer)}
            choice["stop_reason"] = answer.stop_match
            choices.append(choice | ({"token_ids": answer.token_ids} if self.token_ids else {}))
        body = self.face.fields("chat.completion") | {"choices": choices, "usage": self._usage(call)}
        return body | ({"prompt_token_ids": list(call.flight.requests[0].prompt_ids)} if self.token_ids else {})

    def chunks(self, call: Call, number: int, delta: TokenDelta, heard: Sequence[Heard]) -> list[dict[str, Any]]:
        """The role first, then what was heard, then the finish_reason."""
        told = self._told.setdefault(number, _Told())
        chunks = []
        if not told.role:
            told.role = True
            chunks.append(self._chunk(number, {"role": "assistant", "content": ""}))
        body = convert.delta_body(heard)
        logprobs = None
        if self._logprobs and delta.logprobs:
            logprobs = convert.chat_logprobs(self.service.backend.tokenizer, delta.logprobs)
        ids = {"token_ids": list(delta.token_ids)} if self.token_ids and delta.token_ids else {}
        if body or logprobs or ids:
            chunks.append(self._chunk(number, body, logprobs=logprobs, **ids))
        if delta.finish_reason is not None:
            answer = call.answers[number]
            chunks.append(self._chunk(number, {}, finish_reason=self._finish(answer), stop_reason=answer.stop_match))
        return chunks

    def _chunk(self, number: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = self.face.fields("chat.completion.chunk") | {"choices": [choice]}
        return chunk | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self, call: Call) -> dict[str, Any]:
        """A chunk without choices."""
        return self.face.fields("chat.completion.chunk") | {"choices": [], "usage": self._usage(call)}


class TextWriter(Writer):
    """Text completions."""

    def __init__(self, service: Service, body: CompletionBody, face: convert.Face) -> None:
        super().__init__(service, body, face)
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._told: dict[int, _Told] = {}

    def _prompt(self, call: Call, number: int) -> str:
        """The prompt that a sample continues, if it is to be echoed."""
        if not self._echo:
            return ""
        n = call.flight.requests[0].sampling.n
        return self.service.backend.tokenizer.decode(call.flight.requests[number // n].prompt_ids)

    def _scores(self, answer: SampleAnswer, first: SampleAnswer) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        prompt = list(first.prompt_logprobs or ()) if self._echo else []
        return convert.text_logprobs(self.service.backend.tokenizer, [*prompt, *answer.logprobs])

    def whole(self, call: Call) -> dict[str, Any]:
        """The completion."""
        n = call.flight.requests[0].sampling.n
        choices = []
        for index, answer in enumerate(call.answers):
            logprobs = self._scores(answer, call.answers[index - index % n])
            reason = answer.finish_reason.value if answer.finish_reason else None
            choice = {"index": index, "text": self._prompt(call, index) + answer.text, "logprobs": logprobs, "finish_reason": reason}
            choice["stop_reason"] = answer.stop_match
            choices.append(choice | ({"token_ids": answer.token_ids} if self.token_ids else {}))
        return self.face.fields("text_completion") | {"choices": choices, "usage": convert.usage_body(call.usages)}

    def chunks(self, call: Call, number: int, delta: TokenDelta, heard: Sequence[Heard]) -> list[dict[str, Any]]:
        """One chunk a delta; the first one begins with what is echoed."""
        told = self._told.setdefault(number, _Told())
        text = "".join(each.text for each in heard)
        scores = list(delta.logprobs or ())
        if not told.role:
            told.role = True
            text = self._prompt(call, number) + text
            scores = [*(delta.prompt_logprobs or ()), *scores] if self._echo else scores
        reason = delta.finish_reason.value if delta.finish_reason else None
        if not text and not scores and reason is None and not self.token_ids:
            return []
        logprobs = convert.text_logprobs(self.service.backend.tokenizer, scores, offset=told.text) if self._logprobs else None
        told.text += len(text)
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": delta.stop_match}
        ids = {"token_ids": list(delta.token_ids)} if self.token_ids else {}
        chunk = self.face.fields("text_completion") | {"choices": [choice | ids]}
        return [chunk | ({"usage": None} if self.include_usage else {})]

    def usage_chunk(self, call: Call) -> dict[str, Any]:
        """A chunk without choices."""
        return self.face.fields("text_completion") | {"choices": [], "usage": convert.usage_body(call.usages)}
