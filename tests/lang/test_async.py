"""Asynchronous programs, and synchronous ones within a running event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.lang.expressions import gen
from agentrt.lang.program import function


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


@function
async def native(s, question):
    s += "Q: " + question
    first = await s.gen("a")
    s += "R" + gen("b")
    pieces = [piece async for piece in s.text_iter("b")]
    forks = s.fork(2)
    forks += gen("c")
    await forks.join()
    return first, await s["b"], pieces, await s["c"]


def test_async_programs_work_natively_and_from_synchronous_code():
    backend = ScriptedBackend("hey")
    expected = ("hey", "hey", list("hey"), ["hey", "hey"])
    assert native.run("x", backend=backend).ret_value == expected

    async def main():
        one, two = await asyncio.gather(native.arun("x", backend=backend), native.arun("y", backend=backend))
        return one.ret_value, two.ret_value, native.run("z", backend=backend).ret_value

    assert asyncio.run(main()) == (expected, expected, expected)


def test_sync_programs_can_be_called_from_a_running_event_loop():
    @function
    def plain(s):
        s += "Q" + gen("a")
        return s["a"]

    backend = ScriptedBackend("x")

    async def main():
        return plain.run(backend=backend).ret_value, (await plain.arun(backend=backend)).ret_value

    assert asyncio.run(main()) == ("x", "x")


def test_awaiting_a_program_does_not_block_the_loop_and_cancelling_the_task_cancels_it():
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))

    async def main(program):
        task = asyncio.create_task(program.arun(backend=backend))
        while not backend.requests or len(backend.requests) == len(backend.aborts):
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    @function
    def plain(s):
        s += "Q" + gen("a")
        s["a"]

    @function
    async def native_one(s):
        s += "Q" + gen("a")
        await s["a"]

    for count, program in enumerate((plain, native_one), start=1):
        asyncio.run(main(program))
        wait_until(lambda: not backend.load().running)
        assert len(backend.aborts) == count


def test_streams_work_in_async_code():
    @function
    def plain(s):
        s += "Q" + gen("a")

    async def main():
        state = await plain.arun(backend=ScriptedBackend("añ🙂"), stream=True)
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)]

    pairs = asyncio.run(main())
    assert "".join(text for text, _ in pairs) == "añ🙂"
