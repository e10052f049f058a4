"""A chat for many users: FastAPI in front, one engine behind, and every user's words stream as they come.

    python examples/chat_server.py
    curl -N 127.0.0.1:8080/chat/ada -d '{"text": "Hello!"}' -H 'content-type: application/json'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import agentrt

app = FastAPI()
histories: dict[str, list[tuple[str, str]]] = defaultdict(list)


class Said(BaseModel):
    text: str = Field(max_length=2000)


@agentrt.function
async def reply(s, history: list[tuple[str, str]], text: str):
    s += agentrt.system("You are the friendly guide of a small town by the sea. Answer in one short sentence.")
    for asked, answered in history:
        s += agentrt.user(asked) + agentrt.assistant(answered)
    s += agentrt.user(text)
    s += agentrt.assistant(agentrt.gen("answer", max_tokens=32))


@app.post("/chat/{name}")
async def chat(name: str, said: Said) -> StreamingResponse:
    """Streams the answer, and remembers it."""

    async def pieces() -> AsyncIterator[str]:
        state = await reply.arun(list(histories[name]), said.text, temperature=0, stream=True)
        whole = ""
        async for piece in state.text_async_iter("answer"):
            whole += piece
            yield piece
        histories[name].append((said.text, whole))

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)
