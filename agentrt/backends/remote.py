"""Backends elsewhere: an agentrt server (token ids, everything the engine can), or any OpenAI or Anthropic endpoint (text).

HTTP runs on one event loop in a thread of its own; deltas are given to sinks on another, so that a sink may ask the server's
tokenizer without stopping the streams. A text endpoint is spoken to through a byte tokenizer: its "ids" turn back into exactly the text or
the messages that the program wrote. What an endpoint cannot do (a constraint, log-probabilities) is refused, never left out.
Invariant: every request that `submit` accepts ends exactly once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import httpx

from agentrt.backend import Capabilities, FlushReport, Load, Message, Sink
from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.pending import given
from agentrt.errors import AgentrtError, EngineError, GrammarError, PromptError, QueueFullError, RequestError, UserError
from agentrt.request import (
    CONSTRAINT_FIELDS,
    FinishReason,
    GrammarSpec,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class HttpBackend:
    """What all remote backends share: the loop, the streams, aborts and errors."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        capabilities: Capabilities,
        *,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._capabilities = capabilities
        self._loop = asyncio.new_event_loop()
        self._deltas: queue.SimpleQueue[tuple[Sink, TokenDelta] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="agentrt-http", daemon=True),
            threading.Thread(target=self._give, name="agentrt-remote", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._tasks: dict[str, Future[None]] = {}
        self._lock = threading.RLock()  # a lost stream aborts its request wherever memory is collected, so perhaps inside
        self._closed = False
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/"), headers=dict(headers), timeout=TIMEOUT, transport=transport
        )

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; see `agentrt.backend.Backend.submit`."""
        self._check(request)
        with self._lock:
            if self._closed:
                raise EngineError("this remote backend is closed")
            self._tasks[request.request_id] = asyncio.run_coroutine_threadsafe(self._serve(request, sink), self._loop)

    def abort(self, request_id: str) -> None:
        """Ends a request: its connection is closed, and the server drops it."""
        with self._lock:
            task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def _serve(self, request: Request, sink: Sink) -> None:
        began, last = time.monotonic(), False
        try:
            async with asyncio.timeout(request.deadline):
                async for delta in self._answer(request, began):
                    last = delta.last
                    self._deltas.put((sink, delta))
            if not last:
                raise EngineError("the server ended its answer before it was complete")
        except (asyncio.CancelledError, TimeoutError):
            usage = Usage(prompt_tokens=len(request.prompt_ids), run_seconds=time.monotonic() - began)
            self._deltas.put((sink, TokenDelta(request.request_id, finish_reason=FinishReason.ABORT, usage=usage)))
        except AgentrtError as error:
            self._deltas.put((sink, TokenDelta(request.request_id, error=error)))
        except httpx.HTTPError as error:
            self._deltas.put(
                (sink, TokenDelta(request.request_id, error=EngineError(f"the server cannot be reached: {error!r}")))
            )
        except Exception as error:
            self._deltas.put(
                (
                    sink,
                    TokenDelta(request.request_id, error=EngineError(f"the server's answer cannot be read: {error!r}")),
                )
            )
        finally:
            with self._lock:
                self._tasks.pop(request.request_id, None)

    def _give(self) -> None:
        lost: set[str] = set()  # whose sinks have raised
        while (item := self._deltas.get()) is not None:
            sink, delta = item
            if delta.request_id not in lost and not given(sink, delta) and not delta.last:
                lost.add(delta.request_id)
                self.abort(delta.request_id)
            if delta.last:
                lost.discard(delta.request_id)

    def _check(self, request: Request) -> None:
        """Refuses what this kind of server cannot do."""
        if not request.prompt_ids:
            raise PromptError("the prompt is empty", param="prompt_ids")
        if request.prompt_tail and not self._capabilities.healing:
            raise UserError("token healing needs an agentrt engine, here or behind RuntimeEndpoint", param="prompt_tail")

    def _answer(self, request: Request, began: float) -> AsyncIterator[TokenDelta]:
        """Asks, and yields the deltas."""
        raise NotImplementedError

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Posts and yields the JSON of each server-sent event."""
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                raise error_of(response.status_code, await response.aread(), response.headers)
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if text and text != "[DONE]":
                    yield json.loads(text)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = await self._client.request(method, path, json=body)
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content, response.headers)
        return response.json()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Makes one plain call and waits for it.

        Raises:
            AgentrtError: What the server refused, or that it cannot be reached.
        """
        if threading.current_thread() is self._threads[0]:
            raise AssertionError("the loop's own thread cannot wait for it")
        if self._closed:
            raise EngineError("this remote backend is closed")
        try:
            return asyncio.run_coroutine_threadsafe(self._call(method, path, body), self._loop).result()
        except httpx.HTTPError as error:
            raise EngineError(f"the server at {self._client.base_url} cannot be reached: {error!r}") from error

    def hold(self, program: str, seconds: float) -> None:
        """Nothing: this server has no holds."""

    def end_program(self, program: str) -> None:
        """Nothing: this server knows no programs."""

    def cached_prefix(self, ids: Sequence[int], *, cache_salt: str = "") -> int:
        """0: this server does not say."""
        return 0

    def load(self) -> Load:
        """What this side knows: its own requests under way."""
        return Load(len(self._tasks), 0, 0.0)

    def flush_cache(self) -> FlushReport:
        """Nothing: this server's cache is its own."""
        return FlushReport(0, 0)

    def stats(self) -> dict[str, Any]:
        """What this side knows."""
        return {"requests_under_way": len(self._tasks)}

    def close(self) -> None:
        """Aborts what is under way and closes the connections; a second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            tasks = list(self._tasks.values())
        if closed:
            return
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(5)
        self._deltas.put(None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)
        if not self._loop.is_running():
            self._loop.close()


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> AgentrtError:
    """The error that an HTTP refusal stands for."""
    message, param = body.decode(errors="replace")[:500], None
    with contextlib.suppress(ValueError, AttributeError):
        told = json.loads(body)
        detail = told.get("error", told)
        message, param = str(detail.get("message", message)), detail.get("param")
    text = f"the server refused (HTTP {status}): {message}"
    if status in (429, 503):
        seconds = headers.get("retry-after", "1")
        return QueueFullError(text, retry_after=float(seconds) if seconds.replace(".", "", 1).isdigit() else 1.0)
    return UserError(text, param=param) if status < 500 else RequestError(text)


# -------------------------------------------------------------- an agentrt server


class RemoteTokenizer:
    """A server's tokenizer, asked over HTTP; what was asked once is remembered."""

    def __init__(self, backend: HttpBackend) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes | None] = {}

    @property
    def vocab_size(self) -> int:
        """Unknown, so as large as ids can be; the server checks them."""
        return 1 << 31

    @property
    def bos_id(self) -> int | None:
        """Unknown: the server puts it where it belongs."""
        return None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Unknown: control tokens that end an answer are told by having no bytes."""
        return ()

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Tokenises; a control token by its spelling is found by how the server shows it in a chat."""
        if special:
            raise UserError(
                "a remote server does not tell how control tokens are spelled; special(...) needs a local engine",
                param="special",
            )
        if not text:
            return []
        answer = self._backend.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": bos})
        return [int(token) for token in answer["tokens"]]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids."""
        body = {"tokens": list(ids), "skip_special_tokens": skip_special}
        return str(self._backend.ask("POST", "/detokenize", body)["prompt"]) if body["tokens"] else ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one id, None for a control token."""
        if token_id not in self._bytes:
            answer = self._backend.ask("POST", "/detokenize", {"tokens": [token_id], "return_token_bytes": True})
            (piece,) = answer["token_bytes"]
            self._bytes[token_id] = None if piece is None else base64.b64decode(piece)
        return self._bytes[token_id]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Renders through the model's chat template, on the server."""
        body: dict[str, Any] = {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        if tools:
            body["tools"] = list(tools)
        if template_arguments:
            body["chat_template_kwargs"] = template_arguments
        try:
            return [int(token) for token in self._backend.ask("POST", "/tokenize", body)["tokens"]]
        except UserError as error:
            raise PromptError(str(error), param="messages") from error


class RuntimeEndpoint(HttpBackend):
    """An agentrt server: ids in and out, grammars, log-probabilities, programs and holds, as with an engine in this process.

    Args:
        base_url: Such as "http://127.0.0.1:8000".
        api_key: Its key, if it has one.
        transport: httpx's, for tests.

    Raises:
        EngineError: It cannot be reached.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        kinds = ("json_schema", "regex", "choices", "lark", "tools", "structural")
        super().__init__(base_url, headers, Capabilities("remote", grammars=kinds), transport=transport)
        self._tokenizer = RemoteTokenizer(self)
        try:
            model = str(self.ask("GET", "/version")["model"])
            size = int(self.ask("POST", "/tokenize", {"prompt": "x"}).get("max_model_len") or 0)
        except BaseException:
            self.close()
            raise
        self._capabilities = Capabilities(model, grammars=kinds, max_context=size)

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """The server's tokenizer."""
        return self._tokenizer

    async def _answer(self, request: Request, began: float) -> AsyncIterator[TokenDelta]:
        body: dict[str, Any] = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": sampling_body(request.sampling),
            "stream": True,
            "request_id": request.request_id,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "deadline": request.deadline,
            "prompt_tail": base64.b64encode(request.prompt_tail).decode(),
        }
        tag = request.program
        if tag is not None:
            body["program"] = {name.name: getattr(tag, name.name) for name in fields(tag)}
        left = request.sampling.n
        async for event in self._events(
            "/generate", {name: value for name, value in body.items() if value not in (None, "", 0)}
        ):
            if "error" in event:
                raise error_of(int(event["error"].get("status", 500)), json.dumps(event).encode(), {})
            left -= event["finish_reason"] is not None
            yield _native_delta(request, event, last=left == 0)

    def hold(self, program: str, seconds: float) -> None:
        """Asks for a soft hold, without waiting for it."""
        self._tell(f"/programs/{program}/hold", {"seconds": min(seconds, 3600.0)})

    def end_program(self, program: str) -> None:
        """Says that the program is done, without waiting."""
        self._tell(f"/programs/{program}/end", {})

    def _tell(self, path: str, body: Any) -> None:
        if not self._closed:
            told = asyncio.run_coroutine_threadsafe(self._call("POST", path, body), self._loop)
            told.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def flush_cache(self) -> FlushReport:
        """Frees what no request is using, on the server."""
        answer = self.ask("POST", "/flush_cache")
        return FlushReport(answer["freed_tokens"], answer["kept_tokens"])

    def stats(self) -> dict[str, Any]:
        """The server's version and this side's own load."""
        return {**self.ask("GET", "/version"), **super().stats()}


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """`SamplingParams` as JSON; what stands at its default is left out."""
    plain = SamplingParams()
    body: dict[str, Any] = {}
    for item in fields(sampling):
        value = getattr(sampling, item.name)
        if value != getattr(plain, item.name):
            body[item.name] = list(value) if isinstance(value, tuple) else value
    spec = sampling.grammar
    if spec is not None:
        body["grammar"] = {item.name: getattr(spec, item.name) for item in fields(spec)} | {
            "options": dict(spec.options)
        }
    if sampling.json_schema is not None:
        body["json_schema"] = _schema(sampling.json_schema)
    if sampling.logit_bias is not None:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


def _schema(value: Any) -> Any:
    return value.model_json_schema() if hasattr(value, "model_json_schema") else value


def _native_delta(request: Request, event: Mapping[str, Any], *, last: bool) -> TokenDelta:
    reason = event["finish_reason"]
    usage = event.get("usage")
    return TokenDelta(
        request.request_id,
        event["index"],
        tuple(event["output_ids"]),
        event["text"],
        tuple(event["forced"]),
        _scores(event.get("logprobs")),
        _scores(event.get("prompt_logprobs")),
        None if reason is None else FinishReason(reason),
        event.get("stop_match"),
        Usage(**usage) if usage is not None else Usage(prompt_tokens=len(request.prompt_ids)) if last else None,
    )


def _scores(values: Sequence[Mapping[str, Any]] | None) -> tuple[TokenLogprob, ...] | None:
    if values is None:
        return None
    return tuple(TokenLogprob(v["token_id"], v["logprob"], tuple((i, p) for i, p in v["top"])) for v in values)


# ---------------------------------------------------------------- text endpoints


class TextBackend(HttpBackend):
    """What the text endpoints share: a byte tokenizer, and deltas made of text."""

    def __init__(
        self,
        model: str,
        base_url: str,
        headers: Mapping[str, str],
        *,
        grammars: tuple[str, ...],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        capabilities = Capabilities(
            model, token_ids=False, grammars=grammars, logprobs=False, max_context=1_000_000_000, healing=False
        )
        super().__init__(base_url, headers, capabilities, transport=transport)
        self._tokenizer = ByteTokenizer(merges=())

    @property
    def tokenizer(self) -> ByteTokenizer:
        """Bytes; it gives back the text that the program wrote."""
        return self._tokenizer

    def _check(self, request: Request) -> None:
        super()._check(request)
        sampling = request.sampling
        if sampling.prompt_logprobs is not None or sampling.logprobs is not None:
            raise UserError(f"{self._capabilities.model} gives no log-probabilities here", param="logprobs")
        if sampling.stop_regex or sampling.min_tokens or sampling.stop_token_ids or sampling.logit_bias:
            raise UserError(
                f"{self._capabilities.model} takes no stop_regex, min_tokens, stop_token_ids or logit_bias",
                param="sampling",
            )
        for name in CONSTRAINT_FIELDS:
            value = getattr(sampling, name)
            kind = value.kind if isinstance(value, GrammarSpec) else {"ebnf": "lark"}.get(name, name)
            if value is not None and kind not in self._capabilities.grammars:
                raise GrammarError(
                    f"{self._capabilities.model} cannot enforce {name}; use an engine that can",
                    keyword=kind,
                    param=name,
                )

    async def _answer(self, request: Request, began: float) -> AsyncIterator[TokenDelta]:
        if request.sampling.max_tokens == 0:  # warming a cache is not for this server
            yield TokenDelta(
                request.request_id,
                finish_reason=FinishReason.LENGTH,
                usage=Usage(prompt_tokens=len(request.prompt_ids)),
            )
            return
        reasons: dict[int, tuple[FinishReason, str | None]] = {}
        usage = Usage(prompt_tokens=len(request.prompt_ids))
        async for index, text, reason, told in self._texts(request):
            usage = told or usage
            if reason is not None:
                reasons[index] = reason
            if text:
                ids = tuple(self._tokenizer.encode(text))
                yield TokenDelta(request.request_id, index, ids, text, (False,) * len(ids))
        for index in range(request.sampling.n):
            ended, match = reasons.get(index, (FinishReason.STOP, None))
            end = self._tokenizer.eos_ids if ended is FinishReason.STOP and match is None else ()
            last = usage if index == request.sampling.n - 1 else None
            yield TokenDelta(
                request.request_id,
                index,
                end,
                "",
                (False,) * len(end),
                finish_reason=ended,
                stop_match=match,
                usage=last,
            )

    def _texts(
        self, request: Request
    ) -> AsyncIterator[tuple[int, str, tuple[FinishReason, str | None] | None, Usage | None]]:
        """Asks, and yields (sample, text, why it ended, usage)."""
        raise NotImplementedError


class OpenAI(TextBackend):
    """Any server with OpenAI's API.

    Args:
        model_name: The model's name there.
        base_url: Such as "http://127.0.0.1:8000/v1"; None: OpenAI's own.
        api_key: None takes ``OPENAI_API_KEY`` from the environment.
        is_chat_model: Ask as a chat (roles needed), or as plain completions; None decides by how the prompt begins.
        transport: httpx's, for tests.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        key = api_key or os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(
            model_name, base_url or "https://api.openai.com/v1", headers, grammars=("json_schema",), transport=transport
        )
        self._chat = is_chat_model

    async def _texts(
        self, request: Request
    ) -> AsyncIterator[tuple[int, str, tuple[FinishReason, str | None] | None, Usage | None]]:
        messages = None if self._chat is False else self._tokenizer.messages(request.prompt_ids)
        if messages is None and self._chat:
            raise PromptError(
                "this model takes chats only: use system(...), user(...) and assistant(...)", param="prompt"
            )
        body = self._body(request)
        body |= (
            {"messages": messages} if messages is not None else {"prompt": self._tokenizer.decode(request.prompt_ids)}
        )
        async for event in self._events("/chat/completions" if messages is not None else "/completions", body):
            if "error" in event:
                raise RequestError(f"the server failed: {event['error']}")
            usage = _openai_usage(event.get("usage"))
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content") if messages is not None else choice.get("text")
                reason = choice.get("finish_reason")
                ended = (
                    None if reason is None else (FinishReason.LENGTH if reason == "length" else FinishReason.STOP, None)
                )
                yield int(choice.get("index", 0)), text or "", ended, None
            if usage is not None:
                yield 0, "", None, usage

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._capabilities.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": sampling.n,
        }
        optional = {
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "frequency_penalty": sampling.frequency_penalty or None,
            "presence_penalty": sampling.presence_penalty or None,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        if sampling.json_schema is not None:
            form = {"name": "answer", "schema": _schema(sampling.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _openai_usage(told: Mapping[str, Any] | None) -> Usage | None:
    if not told:
        return None
    cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(told.get("prompt_tokens", 0), cached, told.get("completion_tokens", 0))


class Anthropic(TextBackend):
    """Anthropic's Messages API; chats only.

    Args:
        model_name: The model's name there.
        api_key: None takes ``ANTHROPIC_API_KEY`` from the environment.
        base_url: None: Anthropic's own.
        max_tokens: For answers of open length, which this API does not have.
        transport: httpx's, for tests.
    """

    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        max_tokens: int = 4096,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"x-api-key": api_key or os.environ.get("ANTHROPIC_API_KEY", ""), "anthropic-version": "2023-06-01"}
        super().__init__(model_name, base_url or "https://api.anthropic.com", headers, grammars=(), transport=transport)
        self._max_tokens = max_tokens

    def _check(self, request: Request) -> None:
        super()._check(request)
        if request.sampling.n != 1:
            raise UserError("this API gives one sample a request; n must be 1", param="n")

    async def _texts(
        self, request: Request
    ) -> AsyncIterator[tuple[int, str, tuple[FinishReason, str | None] | None, Usage | None]]:
        messages = self._tokenizer.messages(request.prompt_ids)
        if not messages:
            raise PromptError(
                "this API takes chats only: use system(...), user(...) and assistant(...)", param="prompt"
            )
        asked = 0
        async for event in self._events("/v1/messages", self._body(request, messages)):
            if event.get("type") == "error":
                raise RequestError(f"the server failed: {event.get('error')}")
            if event.get("type") == "message_start":
                asked = event["message"].get("usage", {}).get("input_tokens", 0)
            elif event.get("type") == "content_block_delta":
                yield 0, event["delta"].get("text", ""), None, None
            elif event.get("type") == "message_delta":
                delta = event["delta"]
                ended = FinishReason.LENGTH if delta.get("stop_reason") == "max_tokens" else FinishReason.STOP
                usage = Usage(asked, 0, event.get("usage", {}).get("output_tokens", 0))
                yield 0, "", (ended, delta.get("stop_sequence")), usage

    def _body(self, request: Request, messages: list[dict[str, str]]) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._capabilities.model,
            "stream": True,
            "max_tokens": sampling.max_tokens or self._max_tokens,
            "temperature": min(sampling.temperature, 1.0),
            "messages": [m for m in messages if m["role"] != "system"],
        }
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        return (
            body
            | ({"system": system} if system else {})
            | ({"stop_sequences": list(sampling.stop)} if sampling.stop else {})
        )
