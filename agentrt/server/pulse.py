"""Whether the engine is alive: it is asked how busy it is, and must answer in time.

At most one question is open, so that an engine which hangs holds one thread and no more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from agentrt.backend import Backend, Load
from agentrt.errors import AgentrtError, EngineError


class Pulse:
    """Watches one backend."""

    def __init__(self, backend: Backend, silence_seconds: float) -> None:
        """Watches `backend`, which may leave a question unanswered for `silence_seconds`."""
        self._backend = backend
        self._silence = silence_seconds
        self._asked: float | None = None
        self._death: EngineError | None = None
        self.load: Load | None = None
        self.answered = time.monotonic()

    @property
    def death(self) -> EngineError | None:
        """Why the engine is down, if it is."""
        return self._death

    def complaint(self) -> str | None:
        """What is wrong with the engine now; None if nothing is."""
        if self._death is not None:
            return f"the engine is down: {self._death}"
        if self._asked is not None and time.monotonic() - self._asked > self._silence:
            return f"the engine has not answered for {time.monotonic() - self._asked:.0f} s"
        return None

    def ask(self, on_death: Callable[[EngineError], None] | None = None) -> None:
        """Asks in a thread of its own, unless a question is open already."""
        if self._asked is not None or self._death is not None:
            return
        self._asked = time.monotonic()
        threading.Thread(target=self._ask, args=(on_death,), name="agentrt-pulse", daemon=True).start()

    def _ask(self, on_death: Callable[[EngineError], None] | None) -> None:
        try:
            self.load = self._backend.load()
        except EngineError as error:
            self.note_death(error, on_death)
        except AgentrtError:
            pass  # it answered, if not what was asked
        finally:
            self._asked = None
            self.answered = time.monotonic()

    def note_death(self, error: EngineError, on_death: Callable[[EngineError], None] | None = None) -> None:
        """The engine is down."""
        first, self._death = self._death is None, self._death or error
        if first and on_death is not None:
            on_death(self._death)

    async def watch(self, seconds: float, on_death: Callable[[EngineError], None]) -> None:
        """Asks every `seconds`, until the engine is down."""
        while self._death is None:
            self.ask(on_death)
            await asyncio.sleep(seconds)
