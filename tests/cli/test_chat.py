"""A conversation: two turns as a person has them, and everything that must not end it."""

from __future__ import annotations

import builtins
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrt import ScriptedBackend
from agentrt.backends.door import Prompt, prompt_ids
from agentrt.backends.scripted import Answer
from agentrt.cli.chat import run
from agentrt.cli.generate import Options
from agentrt.errors import EngineError, NumericalError, UserError
from agentrt.request import Request, SamplingParams

AGENTRT = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]


class Scripted(ScriptedBackend):
    """A backend with as much of an engine's face as a chat looks at."""

    facts = SimpleNamespace(sampling=SamplingParams(max_tokens=100))

    def request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        if "unfit" in str(prompt):
            raise UserError("it does not fit [/b]")
        return Request(prompt_ids=prompt_ids(prompt, self.tokenizer), sampling=sampling)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnScript(Options):
    """Options that answer from a script."""

    script: Any

    def engine(self) -> Any:
        return Scripted(self.script, inline=True)


def type_in(monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> None:
    lines = iter(typed)

    def read(_: str) -> str:
        line = next(lines, EOFError)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)


def test_a_turn_that_fails_leaves_nothing_behind(monkeypatch, capsys):
    prompts: list[str] = []

    def answer(prompt: str, request: Request) -> Answer:
        prompts.append(prompt)
        return Answer("half", error=NumericalError("NaN in [/b] :smile:") if "poison" in prompt else None)

    type_in(monkeypatch, "poison", "unfit", KeyboardInterrupt, "one", "poison", "two")
    run(OnScript(script=answer))
    shown = capsys.readouterr()
    assert prompts[-1].count("half") == 1  # only the turn that went well is remembered
    assert all(word not in prompts[-1] for word in ("poison", "unfit"))
    assert "one" in prompts[-1]
    assert shown.err.count("error: NaN in [/b] :smile:") == 2
    assert "error: it does not fit [/b]" in shown.err


def test_an_engine_that_is_gone_ends_it(monkeypatch):
    type_in(monkeypatch, "hello", "never asked")
    with pytest.raises(EngineError, match="gone"):
        run(OnScript(script=lambda prompt, request: Answer("half", error=EngineError("it is gone"))))


def heed_interrupts() -> None:
    """A shell's background jobs ignore Ctrl-C, and so does all that they start; in a terminal it is heeded."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A chat in a pseudo-terminal, as a person sees it."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*AGENTRT, "chat", *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=heed_interrupts
        )
        os.close(slave)
        self.screen = b""
        self._seen = 0

    def wait_for(self, text: bytes) -> None:
        """Reads until the text has come, after what was waited for before."""
        assert self._comes(text, seconds=60), self.screen[self._seen :]

    def _comes(self, text: bytes, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (place := self.screen.find(text, self._seen)) < 0:
            if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self.screen += os.read(self._master, 1024)
        self._seen = place + len(text)
        return True

    def type(self, line: str) -> None:
        os.write(self._master, line.encode() + b"\n")
        self.wait_for(b"\n")

    def interrupt_until(self, text: bytes) -> None:
        """What a terminal does at Ctrl-C: everyone in the group is told, the engine's process too.

        Again and again, as a person does: Python misses the one that comes between a prompt's printing and its reading.
        """
        for _ in range(30):
            os.killpg(self.process.pid, signal.SIGINT)
            if self._comes(text, seconds=2):
                return
        raise AssertionError(self.screen[self._seen :])

    def close(self) -> int:
        try:
            while chunk := os.read(self._master, 1024):
                self.screen += chunk
        except OSError:  # the terminal closes with the process
            pass
        os.close(self._master)
        return self.process.wait(30)


@pytest.fixture
def terminal(talker: Path) -> Iterator[Terminal]:
    terminal = Terminal("--model", str(talker), "-n", "8000", "-t", "0")
    yield terminal
    terminal.process.kill()
    terminal.process.wait()


@pytest.mark.slow
def test_chat_talks_in_a_terminal(tiny_model: Path):
    """Two turns, a command, and out."""
    terminal = Terminal("--model", str(tiny_model), "-n", "4", "-t", "0")
    for line in ("hello", "and again", "/clear", "/quit"):
        terminal.wait_for(b"> ")
        terminal.type(line)
    assert terminal.close() == 0
    assert terminal.screen.count(b"of them reused") == 2
    assert b"Traceback" not in terminal.screen


@pytest.mark.slow
def test_what_goes_wrong_in_the_middle_does_not_end_it(terminal: Terminal):
    """Ctrl-C stops the answer, at the prompt it does nothing; a request that fails is said."""
    terminal.wait_for(b"> ")
    for _ in range(2):
        terminal.type("hello")
        terminal.wait_for(b"e")  # the answer has begun
        terminal.interrupt_until(b"(stopped)")
        terminal.wait_for(b"> ")
        terminal.interrupt_until(b"> ")
    terminal.type("not ~ a number")
    terminal.wait_for(b"error:")
    terminal.wait_for(b"taken back")
    terminal.wait_for(b"> ")
    terminal.type("/quit")
    assert terminal.close() == 0
    assert b"Traceback" not in terminal.screen
