"""OpenAI's clients on an engine in this process: no port, the same streams, and a hang-up that is one."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

import agentrt
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.server.in_process import BASE_URL, async_in_process_client, in_process_client

HI = [{"role": "user", "content": "hi"}]


def plain(backend):
    return openai.OpenAI(base_url=BASE_URL, api_key="none", http_client=in_process_client(backend), max_retries=0)


def later(backend):
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", http_client=async_in_process_client(backend), max_retries=0)


def test_a_plain_client_streams_as_it_comes_and_errors_come_through(wait_until):
    backend = ScriptedBackend(lambda prompt, request: Answer("one two three"), step_seconds=0.002)
    with plain(backend) as client:
        whole = client.chat.completions.create(model="scripted", messages=HI)
        assert whole.choices[0].message.content == "one two three"
        pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(model="scripted", messages=HI, stream=True)]
        assert "".join(pieces) == "one two three"
        assert len([piece for piece in pieces if piece]) > 3
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="scripted", messages=HI, temperature=-1)
    assert not [thread for thread in threading.enumerate() if thread.name == "agentrt-in-process"]
    assert backend.load().running == 0  # and the backend is still there
    backend.close()


def test_a_stream_that_is_left_is_a_client_that_hung_up(wait_until):
    backend = ScriptedBackend(lambda prompt, request: "x" * 5000, step_seconds=0.002)
    with plain(backend) as client:
        with client.chat.completions.create(model="scripted", messages=HI, stream=True) as stream:
            next(iter(stream))
            next(iter(stream))
        wait_until(lambda: backend.load().running == 0)
        assert len(backend.aborts) == 1
        assert client.chat.completions.create(model="scripted", messages=HI, max_tokens=3).choices[0].finish_reason == "length"
    backend.close()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_a_client_ends_what_another_thread_waits_for(wait_until, stream):
    backend, ended = ScriptedBackend(lambda prompt, request: Answer("slow", delay=60)), []
    client = plain(backend)

    def ask():
        try:
            list(client.chat.completions.create(model="scripted", messages=HI, stream=stream))
        except openai.APIConnectionError as error:
            ended.append(error)

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: backend.load().running == 1)
    client.close()
    wait_until(lambda: ended)
    wait_until(lambda: backend.load().running == 0)
    backend.close()


def test_an_async_client_runs_many_at_once_and_a_cancelled_one_frees_its_slot(wait_until):
    backend = ScriptedBackend(lambda prompt, request: "x" * (9999 if "long" in prompt else 5), step_seconds=0.002)

    async def run():
        async with later(backend) as client:

            async def one(text):
                return await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": text}])

            answers = await asyncio.gather(*(one(f"n{number}") for number in range(8)))
            assert {answer.choices[0].message.content for answer in answers} == {"xxxxx"}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one("long"), 0.2)
            async for chunk in await client.chat.completions.create(model="scripted", messages=HI, stream=True):
                assert chunk.choices
            await asyncio.to_thread(wait_until, lambda: backend.load().running == 0)

    asyncio.run(run())
    backend.close()


@pytest.mark.slow
def test_an_engine_gives_its_clients(tiny_model):
    with agentrt.Engine(str(tiny_model), threads=1, process=False) as engine:
        with engine.openai_client() as client:
            answer = client.completions.create(model=client.models.list().data[0].id, prompt="a b", max_tokens=4)
            assert answer.usage.completion_tokens <= 4

        async def ask():
            async with engine.async_openai_client() as client:
                return await client.completions.create(model=(await client.models.list()).data[0].id, prompt="a b", max_tokens=4, temperature=0)

        assert asyncio.run(ask()).usage.prompt_tokens == answer.usage.prompt_tokens
