"""The engine's loop in a thread or a process of its own: messages in, messages out.

In: ``("submit", request)``, ``("abort", request_id)``, ``("call", call_id, method, arguments)``, ``("close",)``, ``("all", [messages])``.
Out: ``("ready", facts)`` once, ``("deltas", [...])``, ``("result", call_id, value)``, ``("error", call_id, error)``, and ``("failed", error)`` last of all.

As a process (``python -m agentrt.engine READ_FD WRITE_FD``) it talks over two pipes that only its parent holds, and ends when
they close, so that it is never an orphan.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrt.config import EngineConfig, Limits
from agentrt.engine import collector
from agentrt.engine.assembly import build_engine
from agentrt.engine.deadlines import Deadlines
from agentrt.engine.engine import EngineCore
from agentrt.errors import AbortedError, AgentrtError, EngineError, as_request_error
from agentrt.request import GrammarSpec, Request, TokenDelta
from agentrt.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from agentrt.grammar import CompiledGrammar, GrammarCache

Message = tuple[Any, ...]
Inbox = queue.SimpleQueue[Message]
Send = Callable[[Message], None]

#: What may be called between steps.
CALLS = ("flush_cache", "cached_prefix", "hold", "end_program", "load", "stats", "hot_paths", "under_way")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a worker is to be: the config, and the folder of the model that it names."""

    config: EngineConfig
    folder: Path


@dataclass(eq=False, slots=True)
class _Compiling:
    """A request whose grammar is being compiled, when it came, and how long the compiling took."""

    request: Request
    arrival: float
    seconds: float = 0.0


class Worker:
    """Runs an engine until it is told to close."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, limits: Limits, inbox: Inbox, send: Send) -> None:
        """Makes a worker.

        Args:
            core: The engine; used by the thread that calls `run` alone.
            tokenizer: The model's, for compiling grammars.
            limits: Bounds on compiling them.
            inbox: Messages in, from any thread.
            send: Takes messages out; called by the thread that calls `run`.
        """
        self._core = core
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._send = send
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="agentrt-grammar")
        self._limits = limits
        self._grammars: GrammarCache | None = None  # made by the first to compile, since its imports would take a third of a start
        self._making = threading.Lock()
        self._compiling: dict[str, _Compiling] = {}
        self._deadlines: Deadlines[_Compiling] = Deadlines()
        self._open = True

    def run(self) -> None:
        """Takes messages and steps, until closed. An error of the engine itself goes to every pending request."""
        try:
            while self._open:
                self._take_messages()
                if self._open:
                    self._tell(self._core.step(self._meanwhile))
            self._tell(self._core.abort_all(EngineError("the engine was shut down")))
        except Exception as error:
            self._send(("failed", EngineError(f"the engine stopped: {error!r}\n{traceback.format_exc()}")))
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)
            self._core.close()

    def _meanwhile(self, deltas: list[TokenDelta]) -> None:
        """While a device computes."""
        self._tell(deltas)
        self._take_messages()

    def _tell(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._send(("deltas", deltas))

    def _take_messages(self) -> None:
        """Takes all messages there are; waits for one if there is nothing else to do."""
        while self._open:
            try:
                message = self._inbox.get(block=self._core.idle, timeout=self._patience())
            except queue.Empty:
                self._expire()
                return
            self._take(message)

    def _take(self, message: Message) -> None:
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_all(self, messages: list[Message]) -> None:
        """Messages that came as one, so that no step begins between them."""
        for message in messages:
            self._take(message)

    def _patience(self) -> float | None:
        """Seconds until the first deadline of a request whose grammar is being compiled."""
        first = self._deadlines.next()
        return None if first is None else max(first - self._core.now, 0.0)

    def _expire(self) -> None:
        for compiling in self._deadlines.passed(self._core.now):
            del self._compiling[compiling.request.request_id]
            error = AbortedError(f"the deadline of {compiling.request.deadline:g} s passed while its constraint was compiled")
            self._tell([TokenDelta(compiling.request.request_id, error=error)])

    def _on_submit(self, request: Request) -> None:
        try:
            self._begin(request)
        except Exception as error:  # whatever is wrong with it, the others are not to pay for it
            self._tell([TokenDelta(request.request_id, error=as_request_error(error))])

    def _begin(self, request: Request) -> None:
        """Submits it, or has its grammar compiled first."""
        spec = request.sampling.grammar
        begun = time.perf_counter()
        found = None if spec is None or self._grammars is None else self._grammars.find(spec, self._tokenizer)
        if spec is None or found is not None:  # at once, so that requests that come together begin together
            if found is not None:
                self._core.note_compile(time.perf_counter() - begun)
            self._submit(request, found, self._core.now)
            return
        compiling = self._compiling[request.request_id] = _Compiling(request, self._core.now)
        if request.deadline is not None:
            self._deadlines.add(compiling.arrival + request.deadline, compiling)
        future = self._compilers.submit(self._compile, spec, compiling)
        future.add_done_callback(lambda done: self._inbox.put(("compiled", compiling, done)))

    def _compile(self, spec: GrammarSpec, compiling: _Compiling) -> CompiledGrammar:
        """Compiles, or finds compiled, in a thread of the pool."""
        begun = time.perf_counter()
        try:
            return self._cache().compile(spec, self._tokenizer)
        finally:
            compiling.seconds = time.perf_counter() - begun

    def _cache(self) -> GrammarCache:
        with self._making:
            if self._grammars is None:
                from agentrt.grammar import GrammarCache

                self._grammars = GrammarCache(self._limits)
            return self._grammars

    def _on_compiled(self, compiling: _Compiling, done: Future[CompiledGrammar]) -> None:
        request = compiling.request
        self._core.note_compile(compiling.seconds)
        if self._compiling.get(request.request_id) is not compiling:
            return  # aborted meanwhile, and its id perhaps in use again
        self._forget(compiling)
        error = done.exception()
        if error is None:
            self._submit(request, done.result(), compiling.arrival)
        else:
            self._tell([TokenDelta(request.request_id, error=as_request_error(error))])

    def _submit(self, request: Request, grammar: CompiledGrammar | None, arrival: float) -> None:
        try:
            self._core.submit(request, grammar, arrival)
        except Exception as error:
            self._tell([TokenDelta(request.request_id, error=as_request_error(error))])

    def _forget(self, compiling: _Compiling) -> None:
        del self._compiling[compiling.request.request_id]
        self._deadlines.discard(compiling)

    def _on_abort(self, request_id: str) -> None:
        compiling = self._compiling.get(request_id)
        if compiling is not None:
            self._forget(compiling)
            self._tell([self._core.never_started(request_id)])
        self._core.abort(request_id)

    def _on_call(self, call_id: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if method not in CALLS:
                raise ValueError(f"{method} is not one of {CALLS}")
            answer: Message = ("result", call_id, getattr(self._core, method)(*arguments))
        except Exception as error:
            answer = ("error", call_id, as_request_error(error))
        self._send(answer)

    def _on_close(self) -> None:
        self._open = False


def start(order: WorkerOrder, inbox: Inbox, send: Send, built: Callable[[], None] | None = None) -> None:
    """Builds the engine, calls `built`, and runs it in this thread until it is closed; an engine that cannot be built says why."""
    try:
        tokenizer = load_tokenizer(str(order.folder))
        core, facts = build_engine(order.config, order.folder, tokenizer)
    except Exception as error:
        known = isinstance(error, AgentrtError)
        send(("failed", error if known else EngineError(f"the engine did not start: {error!r}\n{traceback.format_exc()}")))
        return
    if built is not None:
        built()
    send(("ready", facts))
    Worker(core, tokenizer, order.config.limits, inbox, send).run()


def main() -> None:
    """The worker process: its parent's pipes are the only way in and out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us
    reader, writer = Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False)
    inbox: Inbox = queue.SimpleQueue()
    order = WorkerOrder(*reader.recv())
    threading.Thread(target=_read, args=(reader, inbox), daemon=True).start()
    start(order, inbox, _sender(writer), built=collector.settle)


def _read(reader: Connection, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(reader.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone, and with it everyone who could want an answer
    except BaseException:  # a message that means nothing here; whoever waits for its answer would wait for ever
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)


def _sender(writer: Connection) -> Send:
    def send(message: Message) -> None:
        try:
            writer.send(message)
        except OSError:
            os._exit(1)

    return send
