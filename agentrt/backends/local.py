"""The engine on this machine, in a process of its own or in a thread, behind the Backend protocol.

This side needs no torch. It checks requests at the door, posts them to the worker, and gives each delta to its sink. When
the worker dies, every pending request ends with an `EngineError` that says why.
"""

from __future__ import annotations

import itertools
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from agentrt.backend import Capabilities, EngineFacts, FlushReport, Load, Sink, Tokenizer
from agentrt.backends.door import admit
from agentrt.config import EngineConfig
from agentrt.errors import AgentrtError, EngineError, QueueFullError
from agentrt.request import Request, TokenDelta

Message = tuple[Any, ...]
Receive = Callable[[Message], None]

#: Seconds that a worker may take to end when it is closed, before it is killed.
CLOSE_SECONDS = 10.0


class Host(Protocol):
    """Where the worker runs."""

    def post(self, message: Message) -> None:
        """Sends the worker a message; from any thread.

        Raises:
            EngineError: It is gone.
        """
        ...

    def close(self) -> None:
        """Ends the worker, and waits until it has ended."""
        ...


class ThreadHost:
    """A worker in a thread of this process: for notebooks and tests. Its deltas come on that thread."""

    def __init__(self, config: EngineConfig, folder: Path, receive: Receive) -> None:
        """Starts it.

        Args:
            config: The engine's.
            folder: The model's.
            receive: Called with each message.
        """
        from agentrt.engine import worker  # torch comes with it

        self._inbox: worker.Inbox = queue.SimpleQueue()
        order = worker.WorkerOrder(config, folder)
        self._thread = threading.Thread(target=self._run, args=(order, receive), name="agentrt-engine", daemon=True)
        self._thread.start()

    def _run(self, order: Any, receive: Receive) -> None:
        from agentrt.engine import worker

        worker.start(order, self._inbox, receive)
        receive(("failed", EngineError("the engine was shut down")))

    def post(self, message: Message) -> None:
        """Sends the worker a message."""
        self._inbox.put(message)

    def close(self) -> None:
        """Ends the thread."""
        self._inbox.put(("close",))
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)


class ProcessHost:
    """A worker in a process of its own, so that nothing in this one can stall its steps."""

    def __init__(self, config: EngineConfig, folder: Path, receive: Receive) -> None:
        """Starts it.

        Args:
            config: The engine's.
            folder: The model's.
            receive: Called with each message, on a thread of this host's.
        """
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrt.engine.worker", str(child_read), str(child_write)],
            pass_fds=(child_read, child_write),
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            env=_environment(),
        )
        os.close(child_read)
        os.close(child_write)
        self._writer = Connection(parent_write, readable=False)
        self._reader = Connection(parent_read, writable=False)
        self._lock = threading.Lock()
        self._post_order(config, folder)
        self._thread = threading.Thread(target=self._read, args=(receive,), name="agentrt-deltas", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def _post_order(self, config: EngineConfig, folder: Path) -> None:
        # The order's class lives beside torch, which this process need not have; the worker's own module unpickles it.
        self.post((config, folder))

    def post(self, message: Message) -> None:
        """Sends the worker a message."""
        try:
            with self._lock:
                self._writer.send(message)
        except OSError as error:
            raise EngineError(f"the engine's process is gone{self._last_words()}") from error

    def _read(self, receive: Receive) -> None:
        while True:
            try:
                message = self._reader.recv()
            except (EOFError, OSError):
                code = self._process.wait()
                receive(("failed", EngineError(f"the engine's process ended with status {code}{self._last_words()}")))
                return
            receive(message)

    def _last_words(self) -> str:
        try:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(size - 2000, 0))
            text = self._errors.read().decode(errors="replace").strip()
        except ValueError:  # closed
            text = ""
        return f"; its last words were:\n{text}" if text else ""

    def close(self) -> None:
        """Ends the process."""
        try:
            self.post(("close",))
            self._process.wait(CLOSE_SECONDS)
        except (EngineError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        self._writer.close()
        self._reader.close()
        self._errors.close()


def _environment() -> dict[str, str]:
    """The worker's environment: ours, the same modules, and threads that sleep while they wait for each other.

    OpenMP's threads spin at each barrier by default. Where anything else wants a core, the one spun for never runs, and a
    step takes ten times as long; sleeping costs a few microseconds a barrier.
    """
    modules = os.pathsep.join(path for path in sys.path if path)
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": modules}


class LocalBackend:
    """An engine on this machine."""

    def __init__(self, config: EngineConfig, *, name: str, folder: Path, tokenizer: Tokenizer, process: bool = True) -> None:
        """Starts an engine and waits until it is ready.

        Args:
            config: The engine's.
            name: The model's name, to show.
            folder: The model's folder, in Hugging Face's layout.
            tokenizer: The model's.
            process: In a process of its own, rather than in a thread.

        Raises:
            UserError: The config does not fit the machine or the model.
            EngineError: The engine did not start.
        """
        self.config = config
        self._tokenizer = tokenizer
        self._sinks: dict[str, Sink] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._lock = threading.Lock()
        self._failure: AgentrtError | None = None
        self._ready: Future[EngineFacts] = Future()
        # The host must not keep this object alive, or it would never be collected and closed.
        receive = _weakly(self)
        self._host: Host = (ProcessHost if process else ThreadHost)(config, folder, receive)
        self._finalizer = weakref.finalize(self, self._host.close)
        try:
            self.facts = self._ready.result()
        except BaseException:
            self._finalizer()
            raise
        self._capabilities = Capabilities(
            model=name,
            grammars=("json_schema", "regex", "choices", "lark", "tools", "structural"),
            max_context=self.facts.max_context,
            kv_tokens=self.facts.kv_tokens,
        )

    # -- messages from the worker --------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        kind = message[0]
        if kind == "deltas":
            for delta in message[1]:
                self._give(delta)
        elif kind == "result":
            self._calls.pop(message[1]).set_result(message[2])
        elif kind == "ready":
            self._ready.set_result(message[1])
        else:
            self._fail(message[1])

    def _give(self, delta: TokenDelta) -> None:
        sink = self._sinks.pop(delta.request_id, None) if delta.last else self._sinks.get(delta.request_id)
        if sink is not None:
            sink(delta)

    def _fail(self, error: AgentrtError) -> None:
        """The worker is gone: whatever waits for it ends now."""
        with self._lock:
            self._failure = self._failure or error
            sinks, self._sinks = self._sinks, {}
            calls, self._calls = self._calls, {}
        if not self._ready.done():
            self._ready.set_exception(error)
        for call in calls.values():
            call.set_exception(self._down())
        for request_id, sink in sinks.items():
            sink(TokenDelta(request_id, error=self._down()))

    def _down(self) -> EngineError:
        failure = self._failure
        return failure if isinstance(failure, EngineError) else EngineError(f"the engine is down: {failure}")

    # -- the Backend protocol -------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; see `agentrt.backend.Backend.submit`."""
        facts, limits = self.facts, self.config.limits
        request = admit(
            request, limits, max_context=facts.max_context, kv_tokens=facts.kv_tokens, vocab_size=facts.vocab_size
        )
        with self._lock:
            if self._failure is not None:
                raise self._down()
            pending = len(self._sinks)
            if pending >= limits.queued + facts.max_running:
                raise QueueFullError(f"{pending} requests are pending; at most {limits.queued + facts.max_running} are taken")
            if request.request_id in self._sinks:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._sinks[request.request_id] = sink
        try:
            self._host.post(("submit", request))
        except EngineError:
            self._sinks.pop(request.request_id, None)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request within a step."""
        if request_id in self._sinks and self._failure is None:
            self._host.post(("abort", request_id))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._ask(method, *arguments).result()

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        call_id, future = next(self._call_ids), Future[Any]()
        with self._lock:
            if self._failure is not None:
                raise self._down()
            self._calls[call_id] = future
        self._host.post(("call", call_id, method, arguments))
        return future

    def hold(self, program: str, seconds: float) -> None:
        """Keeps a program's prefixes while it waits. Does not wait for the engine, since a sink may call it."""
        self._ask("hold", program, seconds)

    def end_program(self, program: str) -> None:
        """A program will make no more calls. Does not wait for the engine, since a sink or an event loop may call it."""
        self._ask("end_program", program)

    def cached_prefix(self, ids: Sequence[int], *, cache_salt: str = "") -> int:
        """How many leading tokens are cached."""
        length: int = self._call("cached_prefix", tuple(ids), cache_salt)
        return length

    def load(self) -> Load:
        """How busy it is."""
        load: Load = self._call("load")
        return load

    def flush_cache(self) -> FlushReport:
        """Frees every cached token that no request uses."""
        report: FlushReport = self._call("flush_cache")
        return report

    def stats(self) -> dict[str, Any]:
        """Counters since the start, by name."""
        stats: dict[str, Any] = self._call("stats")
        return stats

    def hot_paths(self, limit: int = 20) -> list[Any]:
        """The hottest branches of the prefix tree (`agentrt.cache.prefix_cache.HotPath`), for an inspector."""
        paths: list[Any] = self._call("hot_paths", limit)
        return paths

    def close(self) -> None:
        """Shuts down; pending requests get an EngineError."""
        self._finalizer()


def _weakly(backend: LocalBackend) -> Receive:
    reference = weakref.ref(backend)

    def receive(message: Message) -> None:
        alive = reference()
        if alive is not None:
            alive._receive(message)

    return receive
