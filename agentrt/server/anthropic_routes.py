"""Anthropic's messages: create, streamed or whole, and count."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrt.server import anthropic_convert as convert
from agentrt.server.anthropic_types import CountBody, MessagesBody
from agentrt.server.blocks import BlockRow
from agentrt.server.call import Call
from agentrt.server.events import EventStream, event
from agentrt.server.openai_convert import Face
from agentrt.server.refusals import refusal_of
from agentrt.server.service import Service, json_response


def anthropic_routes(service: Service, router: APIRouter) -> APIRouter:
    """Adds the routes to `router`."""

    @router.post("/v1/messages")
    async def messages(http: Request, body: MessagesBody) -> Response:
        """Continues a conversation."""
        service.check_model(body.model)
        ask = convert.messages_ask(body, service.options(http))
        face = service.face("msg_", body.model)
        call = await service.begin(http, "messages", face.id, lambda: service.prompter.chat(ask), remembers=True)
        if body.stream:
            config = service.config
            return EventStream(_stream(call, face), keep_alive=config.keep_alive_seconds, stall=config.stall_seconds, on_end=call.end)
        await service.answered(http, call)
        usage = convert.usage_body(call.usages[0].prompt_tokens, call.usages[0])
        return json_response(convert.message_body(face.id, face.model, call.answers[0], usage))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request, body: CountBody) -> Response:
        """How many tokens a conversation is."""
        service.check_model(body.model)
        ask = convert.messages_ask(body, service.options(http))
        prepared = await service.off_loop(lambda: service.prompter.chat(ask))
        return json_response({"input_tokens": len(prepared.requests[0].prompt_ids)})

    return router


def _named(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])


async def _stream(call: Call, face: Face) -> AsyncGenerator[bytes, None]:
    row, answer = BlockRow(), call.answers[0]
    prompt_tokens = len(call.flight.requests[0].prompt_ids)
    yield _named({"type": "message_start", "message": convert.message_body(face.id, face.model, None, convert.usage_body(prompt_tokens))})
    yield _named({"type": "ping"})
    try:
        async for _, _, heard in call.events():
            for change in row.hear(heard):
                yield _named(convert.block_event(change))
        for change in row.close():
            yield _named(convert.block_event(change))
        stop = {"stop_reason": convert.stop_reason(answer), "stop_sequence": answer.stop_match if isinstance(answer.stop_match, str) else None}
        yield _named({"type": "message_delta", "delta": stop, "usage": convert.usage_body(prompt_tokens, call.usages[0])})
        yield _named({"type": "message_stop"})
    except Exception as error:  # the response has begun: the error is its last event
        yield _named(refusal_of(error).anthropic())
