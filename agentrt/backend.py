"""The Backend protocol: what the frontend and the server need from any engine, and the streams built on it.

A backend takes a `Request` and a *sink*, and calls the sink with each `TokenDelta` until one that is `last`. That is
the whole transport; iterating, awaiting and collecting are written here once, on top of it, for every backend.

This module also holds the slot for the default backend's factory: the package fills it lazily, so that the frontend
never imports the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from agentrt.errors import AgentrtError, UserError
from agentrt.request import Completion, FinishReason, Request, Sample, SamplingParams, TokenDelta, TokenLogprob, Usage

Sink = Callable[[TokenDelta], None]
Message = Mapping[str, Any]


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back; thread-safe, and without torch."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this; some of them may have no token."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that begins a text, if the model has one."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer."""
        ...

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Tokenises `text` in one piece.

        Args:
            text: Any string; text that spells a control token is text unless `special`.
            bos: Put `bos_id` before it, if the model was trained so.
            special: Text that spells a control token becomes that token.
        """
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token stands for; None for a control token or an id without a token."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Renders messages through the model's chat template and tokenises them; control tokens in the messages' own text stay text."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        model: Name to show.
        token_ids: It takes and gives token ids (a text-only endpoint does not).
        grammars: Kinds of GrammarSpec that it enforces.
        logprobs: It gives log-probabilities.
        max_context: Most tokens of prompt and answer together.
        kv_tokens: Token slots of its KV store, or None.
        vision: It takes images.
        healing: It honours `Request.prompt_tail`.
    """

    model: str
    token_ids: bool = True
    grammars: tuple[str, ...] = ()
    logprobs: bool = True
    max_context: int = 0
    kv_tokens: int | None = None
    vision: bool = False
    healing: bool = True


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the door has to know of an engine that runs.

    Attributes:
        max_context: Most tokens of prompt and output together.
        kv_tokens: Token slots.
        page_size: Tokens a page.
        vocab_size: Width of the logits.
        max_running: Most sequences in a step.
        dtype: Of weights and activations.
        device: Where it computes.
        threads: Threads of torch.
        sampling: The model's own sampling defaults.
    """

    max_context: int
    kv_tokens: int
    page_size: int
    vocab_size: int
    max_running: int
    dtype: str
    device: str
    threads: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a backend is: sequences running, requests waiting, share of the pool in use (0 to 1)."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush_cache` did: tokens freed, and tokens kept because requests are using them."""

    freed_tokens: int
    kept_tokens: int


class Backend(Protocol):
    """An engine, here or elsewhere. Every method is thread-safe."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request.

        Args:
            request: The ask.
            sink: Called from any thread with each delta, in order, ending with one that is `last`; must not block.

        Raises:
            UserError: The request is wrong or can never fit; the sink is not called.
            QueueFullError: Too many are waiting; the sink is not called.
            EngineError: The engine is down; the sink is not called.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request within a step (its sink gets a last delta with FinishReason.ABORT); unknown ids are ignored."""
        ...

    def hold(self, program: str, seconds: float) -> None:
        """Asks to keep the program's prefixes in the cache while it waits on a tool: a soft hold, bounded in time and share of the pool."""
        ...

    def end_program(self, program: str) -> None:
        """Says that the program will make no more calls; what only it could use goes first."""
        ...

    def cached_prefix(self, ids: Sequence[int], *, cache_salt: str = "") -> int:
        """How many leading tokens of `ids` are in the cache now."""
        ...

    def load(self) -> Load:
        """How busy it is."""
        ...

    def flush_cache(self) -> FlushReport:
        """Frees every cached token that no request is using."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since the start, by name."""
        ...

    def close(self) -> None:
        """Shuts down; pending requests get an EngineError. A second call does nothing."""
        ...


class DeltaStream:
    """An iterator over the deltas of one request, which is submitted when this is made.

    Closing it, or losing it, before the last delta aborts the request.
    """

    def __init__(self, backend: Backend, request: Request) -> None:
        """Submits `request`.

        Raises:
            AgentrtError: As `Backend.submit`.
        """
        self._deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        backend.submit(request, self._deltas.put)
        self._abort = weakref.finalize(self, _abort_quietly, backend, request.request_id)
        self._abort.atexit = False  # the backend closes itself

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenDelta:
        if not self._abort.alive:
            raise StopIteration
        delta = self._deltas.get()
        if delta.last:
            self._abort.detach()
        if delta.error is not None:
            raise delta.error
        return delta

    def close(self) -> None:
        """Aborts the request, if it has not ended."""
        self._abort()


def _abort_quietly(backend: Backend, request_id: str) -> None:
    with contextlib.suppress(AgentrtError):
        backend.abort(request_id)


def stream(backend: Backend, request: Request) -> DeltaStream:
    """Submits `request` at once and returns an iterator over its deltas. Leaving the iterator early aborts the request.

    Raises:
        AgentrtError: As `Backend.submit`; while iterating, the delta's own error.
    """
    return DeltaStream(backend, request)


async def astream(backend: Backend, request: Request) -> AsyncIterator[TokenDelta]:
    """The async twin of `stream`: submits on first iteration; leaving early, or cancelling, aborts the request."""
    loop = asyncio.get_running_loop()
    deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()

    def sink(delta: TokenDelta) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop may be closed before its aborted request ends
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

    backend.submit(request, sink)
    done = False
    try:
        while not done:
            delta = await deltas.get()
            done = delta.last
            if delta.error is not None:
                raise delta.error
            yield delta
    finally:
        if not done:
            backend.abort(request.request_id)


class Collector:
    """A sink's memory: adds deltas up to a `Completion`. One per request; not thread-safe."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._samples = [_SampleParts() for _ in range(request.sampling.n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: TokenDelta) -> Completion | None:
        """Adds one delta; returns the completion when it was the last.

        Raises:
            AgentrtError: The delta's own error.
        """
        if delta.error is not None:
            raise delta.error
        self._samples[delta.index].add(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        return self._finish(delta.usage) if delta.usage is not None else None

    def _finish(self, usage: Usage) -> Completion:
        samples = tuple(parts.sample() for parts in self._samples)
        return Completion(self._request.request_id, samples, usage, self._prompt_logprobs)


class _SampleParts:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.forced: list[bool] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_match: str | int | None = None

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.ids.extend(delta.token_ids)
        self.forced.extend(delta.forced)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_match = delta.finish_reason, delta.stop_match

    def sample(self) -> Sample:
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        reason = self.finish_reason or FinishReason.ABORT
        return Sample("".join(self.texts), tuple(self.ids), reason, tuple(self.forced), logprobs, self.stop_match)


def complete(backend: Backend, request: Request) -> Completion:
    """Runs one request to its end and returns the whole answer; raises as `stream` does."""
    return collect(request, stream(backend, request))


def collect(request: Request, deltas: Iterable[TokenDelta]) -> Completion:
    """Adds a stream up to a completion."""
    collector = Collector(request)
    for delta in deltas:
        completion = collector.add(delta)
        if completion is not None:
            return completion
    raise AssertionError("a stream ends with a last delta or an error")


async def acomplete(backend: Backend, request: Request) -> Completion:
    """The async twin of `complete`."""
    collector = Collector(request)
    async for delta in astream(backend, request):
        completion = collector.add(delta)
        if completion is not None:
            return completion
    raise AssertionError("a stream ends with a last delta or an error")


_default: Backend | None = None
_factory: Callable[[], Backend] | None = None


def set_default_backend(backend: Backend | None) -> None:
    """Sets the backend that programs run on when none is named; None goes back to making one on first use."""
    global _default
    _default = backend


def set_default_factory(factory: Callable[[], Backend]) -> None:
    """Says how to make the default backend on first use; the package does this when it is imported."""
    global _factory
    _factory = factory


def default_backend() -> Backend:
    """Returns the default backend, made on first use.

    Raises:
        UserError: There is neither a backend nor a way to make one.
    """
    global _default
    if _default is None:
        if _factory is None:
            raise UserError("no backend is set; call agentrt.set_default_backend(agentrt.Engine())")
        _default = _factory()
    return _default
