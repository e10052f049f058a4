"""Runs the compilation of patterns in a process that can be killed, because nothing else can interrupt it.

One process is kept and used again; when it runs out of time or memory it is killed, the request that it was busy with
gets an error, and the next one a fresh process. Nothing outside this file knows that there is a process.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import GrammarError

_PROGRAM = Path(__file__).with_name("regex_worker.py")
#: Address space of the process, in bytes; more than half of it is the interpreter and numpy.
MEMORY = 2_000_000_000
#: Most seconds that the process may take to start.
START_SECONDS = 30.0


class TooManyStatesError(GrammarError):
    """The automaton would be larger than allowed."""


class PatternCompiler:
    """Compiles patterns to tables, one at a time, in a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def compile(self, pattern: str, max_states: int, seconds: float) -> tuple[NDArray[np.int32], NDArray[np.bool_], int]:
        """As `regex_worker.byte_table`, within `seconds`.

        Raises:
            TooManyStatesError: The automaton is too large.
            GrammarError: It took too long, needed too much memory, or is refused.
        """
        with self._lock:
            answer = self._ask((pattern, max_states), seconds)
        if answer[0] == "table":
            return answer[1], answer[2], answer[3]  # type: ignore[return-value]
        kind = TooManyStatesError if answer[1] == "states" else GrammarError
        raise kind(str(answer[2]), pointer="0", param="regex")

    def _ask(self, request: tuple[str, int], seconds: float) -> tuple[object, ...]:
        answer = self._answer(self._running(), seconds, request)
        if answer is None:
            raise GrammarError(
                f"the pattern's automaton needs more than {seconds:g} s or {MEMORY / 1e9:g} GB to compile; "
                "bound its repeats, or set engine='llguidance'",
                pointer="0",
                param="regex",
            )
        return answer

    def _answer(self, process: subprocess.Popen[bytes], seconds: float, request: tuple[str, int] | None = None) -> tuple[object, ...] | None:
        """What the process says next, to a request if there is one; None if it had to be killed for it, or died."""
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            if request is not None:
                pickle.dump(request, to := cast(IO[bytes], process.stdin))
                to.flush()
            return cast(tuple[object, ...], pickle.load(cast(IO[bytes], process.stdout)))
        except (EOFError, OSError, pickle.UnpicklingError):
            self.close()
            return None
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, ready: its start is no pattern's fault, so it counts against none."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._answer(self._process, START_SECONDS) is None:
                raise GrammarError("the process that compiles patterns does not start", param="regex")
        return self._process

    def close(self) -> None:
        """Ends the process; the next pattern gets a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


PATTERNS = PatternCompiler()
atexit.register(PATTERNS.close)
