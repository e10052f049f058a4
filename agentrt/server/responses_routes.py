"""OpenAI's responses: create (whole, streamed, or in the background), get, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrt.errors import UserError
from agentrt.server import responses_convert as convert
from agentrt.server.asks import Message
from agentrt.server.blocks import BlockRow
from agentrt.server.call import Call
from agentrt.server.events import EventStream, event
from agentrt.server.openai_convert import chat_logprobs
from agentrt.server.refusals import not_found, refusal_of
from agentrt.server.responses_store import ResponseStore, Stored
from agentrt.server.responses_types import ResponseBody
from agentrt.server.service import Service, json_response


@dataclass(frozen=True, slots=True)
class Begun:
    """A response on its way.

    Attributes:
        body: As it began.
        messages: The chat that it answers, instructions left out.
        keep: Whether it is stored.
        call: What answers it.
    """

    body: dict[str, Any]
    messages: tuple[Message, ...]
    keep: bool
    call: Call


class Responder:
    """Answers responses and keeps them."""

    def __init__(self, service: Service) -> None:
        """Keeps nothing yet."""
        self._service = service
        self._store = ResponseStore(service.config.stored_responses, service.config.stored_bytes)
        self._background: set[asyncio.Task[None]] = set()

    def known(self, response_id: str) -> Stored:
        """The response of that id.

        Raises:
            Refused: There is none.
        """
        stored = self._store.get(response_id)
        if stored is None:
            raise not_found(f"there is no response {response_id!r} here, or it has gone from the store", param="response_id")
        return stored

    def history_of(self, body: ResponseBody) -> tuple[Message, ...]:
        """The chat that a body continues."""
        if body.previous_response_id is None:
            return ()
        stored = self.known(body.previous_response_id)
        if stored.call is not None:
            raise UserError(f"response {body.previous_response_id!r} is still in progress", param="previous_response_id")
        return tuple(stored.messages)

    async def begin(self, http: Request, body: ResponseBody) -> Begun:
        """Begins to answer."""
        history = self.history_of(body)
        ask = convert.response_ask(body, history, self._service.options(http, body.cache_salt, body.priority))
        face = self._service.face("resp_", body.model)
        call = await self._service.begin(http, "responses", face.id, lambda: self._service.prompter.chat(ask), remembers=True)
        begun = convert.response_body(body, face.id, face.created, face.model)
        return Begun(begun, (*history, *convert.input_messages(body)), body.store is not False, call)

    def finish(self, begun: Begun) -> dict[str, Any]:
        """The whole response; kept, if it is to be."""
        answer = begun.call.answers[0]
        scores = chat_logprobs(self._service.backend.tokenizer, answer.logprobs)["content"]
        whole = convert.finished(begun.body, answer, begun.call.usages[0], scores)
        if begun.keep:
            self._store.put(Stored(whole, (*begun.messages, convert.answer_message(answer))))
        return whole

    def fail(self, begun: Begun, error: BaseException) -> dict[str, Any]:
        """The failed response; kept, if it is to be."""
        refusal = refusal_of(error)
        failed = {**begun.body, "status": "failed", "error": {"code": refusal.code or "server_error", "message": refusal.message}}
        if begun.keep:
            self._store.put(Stored(failed, begun.messages))
        return failed

    async def run(self, begun: Begun) -> None:
        """Answers to the end, with nobody listening."""
        try:
            await begun.call.whole()
            self.finish(begun)
        except Exception as error:
            self.fail(begun, error)

    async def stream(self, begun: Begun) -> AsyncGenerator[bytes, None]:
        """The events of an answer."""
        number = 0
        row = BlockRow()

        def numbered(body: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return event({**body, "sequence_number": number - 1}, body["type"])

        for kind in ("response.created", "response.in_progress"):
            yield numbered({"type": kind, "response": begun.body})
        try:
            async for _, _, heard in begun.call.events():
                for change in row.hear(heard):
                    for body in convert.change_events(begun.body["id"], change):
                        yield numbered(body)
            for change in row.close():
                for body in convert.change_events(begun.body["id"], change):
                    yield numbered(body)
            whole = self.finish(begun)
            kind = {"completed": "response.completed", "incomplete": "response.incomplete"}.get(whole["status"], "response.failed")
            yield numbered({"type": kind, "response": whole})
        except Exception as error:  # the response has begun: the error is its last event
            yield numbered({"type": "response.failed", "response": self.fail(begun, error)})

    def run_in_background(self, begun: Begun) -> dict[str, Any]:
        """Answers while the client does something else."""
        self._store.put(Stored(begun.body, begun.messages, begun.call))
        task = asyncio.create_task(self.run(begun))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return begun.body

    def drop(self, response_id: str) -> None:
        """Forgets a response."""
        self.known(response_id)
        self._store.drop(response_id)


def responses_routes(service: Service, router: APIRouter) -> APIRouter:
    """Adds the routes to `router`."""
    responder = Responder(service)

    @router.post("/v1/responses")
    async def create(http: Request, body: ResponseBody) -> Response:
        """Answers."""
        service.check_model(body.model)
        if body.background and (body.stream or body.store is False):
            raise UserError("background goes without stream, and with store", param="background")
        begun = await responder.begin(http, body)
        if body.background:
            return json_response(responder.run_in_background(begun))
        if body.stream:
            config = service.config
            return EventStream(responder.stream(begun), keep_alive=config.keep_alive_seconds, stall=config.stall_seconds, on_end=begun.call.end)
        await service.answered(http, begun.call)
        return json_response(responder.finish(begun))

    @router.get("/v1/responses/{response_id}")
    async def get(response_id: str) -> Response:
        """A response that is kept."""
        return json_response(responder.known(response_id).body)

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        """Forgets a response."""
        responder.drop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        """Ends a response that runs in the background."""
        stored = responder.known(response_id)
        if stored.call is None:
            raise UserError(f"response {response_id!r} is {stored.body['status']}; only one in the background can be cancelled", param="response_id")
        stored.call.flight.abort()
        return json_response({**stored.body, "status": "cancelled"})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        """What a response answered."""
        messages = responder.known(response_id).messages
        items = [{"id": f"msg_{n}", "type": "message", "role": m["role"], "content": m.get("content")} for n, m in enumerate(messages)]
        return json_response({"object": "list", "data": items, "has_more": False, "first_id": None, "last_id": None})

    return router
