"""The engine on this machine, in a process of its own or in a thread, behind the Backend protocol.

This side needs no torch. It checks requests at the door, posts them to the worker, and gives each delta to its sink. When
the worker dies, every pending request ends with an `EngineError` that says why.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentrt.backend import Capabilities, FlushReport, Load, Sink, Tokenizer
from agentrt.backends.door import admit, checked_hold, checked_ids
from agentrt.backends.hosts import Host, ProcessHost, ThreadHost
from agentrt.backends.pending import Pending
from agentrt.config import EngineConfig
from agentrt.errors import EngineError, UserError
from agentrt.request import Request

#: Most requests that are sent as one message; the first of more need not wait for the last.
TOGETHER = 64


class LocalBackend:
    """An engine on this machine."""

    def __init__(self, config: EngineConfig, *, name: str, folder: Path, tokenizer: Callable[[], Tokenizer], process: bool = True) -> None:
        """Starts an engine and waits until it is ready.

        Args:
            config: The engine's.
            name: The model's name, to show.
            folder: The model's folder, in Hugging Face's layout.
            tokenizer: Loads the model's; called while the engine starts.
            process: In a process of its own, rather than in a thread.

        Raises:
            UserError: The config does not fit the machine or the model.
            EngineError: The engine did not start.
        """
        self.config = config
        self._held = _Held()
        # The host's thread holds what is pending, not this object: one that nobody holds any more is closed.
        self._pending = pending = Pending()
        self._host: Host = (ProcessHost if process else ThreadHost)(config, folder, pending.receive)
        self._finalizer = weakref.finalize(self, self._host.close)
        pending.abort = partial(_abort, self._host)
        try:
            self._tokenizer = tokenizer()
            self.facts = self._pending.ready.result()
        except BaseException:
            self._finalizer()
            raise
        self._capabilities = Capabilities(
            model=name,
            grammars=("json_schema", "regex", "choices", "lark", "tools", "structural"),
            max_context=self.facts.max_context,
            kv_tokens=self.facts.kv_tokens,
        )

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
        self._pending.add(request.request_id, sink, limits.queued + facts.max_running)
        if self._held.requests is None:
            try:
                self._host.post(("submit", request))
            except BaseException:
                self._pending.remove(request.request_id)
                raise
        else:
            self._held.requests.append(request)
            if len(self._held.requests) >= TOGETHER:
                self._send_held([])

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread submits inside goes to the engine as one, and begins in one step, not the first request a step before the others.

        So no answer comes before the end. What then cannot be sent is told to its sink, since its submission is over.
        """
        outer, self._held.requests = self._held.requests, []
        try:
            yield
        finally:
            self._send_held(outer)

    def _send_held(self, then: list[Request] | None) -> None:
        """Sends what waits; `then` is what waits after that."""
        requests, self._held.requests = self._held.requests, then
        if requests:
            self._send(requests)

    def _send(self, requests: list[Request]) -> None:
        messages = [("submit", request) for request in requests]
        try:
            self._host.post(messages[0] if len(messages) == 1 else ("all", messages))
        except BaseException as error:
            if len(requests) > 1 and isinstance(error, Exception):  # which of them is it?
                for request in requests:
                    self._send([request])
                return
            for request in requests:
                self._pending.refuse(request.request_id, error)
            if not isinstance(error, Exception):
                raise

    def abort(self, request_id: str) -> None:
        """Ends a request within a step."""
        if any(request.request_id == request_id for request in self._held.requests or ()):
            self._send_held([])  # no message overtakes another
        if request_id in self._pending and not self._pending.down:
            self._host.post(("abort", request_id))

    def _call(self, method: str, *arguments: Any) -> Any:
        if threading.current_thread().name in (ThreadHost.THREAD, ProcessHost.THREAD):
            raise UserError(f"a sink must not wait for the engine ({method}), which waits for the sink; ask from another thread")
        return self._ask(method, *arguments).result()

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        call_id, future = self._pending.call()
        try:
            self._host.post(("call", call_id, method, arguments))
        except BaseException:
            self._pending.remove_call(call_id)
            raise
        return future

    def hold(self, program: str, seconds: float) -> None:
        """Keeps a program's prefixes while it waits. Does not wait for the engine, since a sink may call it."""
        self._ask("hold", *checked_hold(program, seconds))

    def end_program(self, program: str) -> None:
        """A program will make no more calls. Does not wait for the engine, since a sink or an event loop may call it."""
        self._ask("end_program", program)

    def cached_prefix(self, ids: Sequence[int], *, cache_salt: str = "") -> int:
        """How many leading tokens are cached."""
        length: int = self._call("cached_prefix", checked_ids(ids, self.facts.vocab_size), str(cache_salt))
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

    def under_way(self) -> dict[str, Any]:
        """Where each request stands (`agentrt.engine.live_request.UnderWay`), by id, for an inspector."""
        requests: dict[str, Any] = self._call("under_way")
        return requests

    def hot_paths(self, limit: int = 20) -> list[Any]:
        """The hottest branches of the prefix tree (`agentrt.cache.prefix_cache.HotPath`), for an inspector."""
        paths: list[Any] = self._call("hot_paths", limit)
        return paths

    def close(self) -> None:
        """Shuts down; pending requests get an EngineError."""
        self._finalizer()


class _Held(threading.local):
    """Requests of this thread that wait to be sent as one; None: they go at once."""

    requests: list[Request] | None = None


def _abort(host: Host, request_id: str) -> None:
    with suppress(EngineError):  # it is gone, and the request with it
        host.post(("abort", request_id))
