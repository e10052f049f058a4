"""The composition root: finds the model, starts an engine on it, and gives it the face that people call.

`Engine` is a backend like any other; what it adds is convenience: prompts as text or chats, lists, streams, scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, overload

from agentrt import backend as streams
from agentrt.backend import Message
from agentrt.backends.door import Prompt, is_batch, prompt_ids
from agentrt.backends.local import LocalBackend
from agentrt.config import AttentionChoice, CacheConfig, Dtype, EngineConfig, Eviction, Limits, Policy, SchedulerConfig
from agentrt.engine import collector
from agentrt.errors import UserError
from agentrt.hub import resolve_model
from agentrt.hub.fetch import ProgressCallback
from agentrt.request import Completion, Request, SamplingParams, TokenDelta, TokenLogprob
from agentrt.text import load_tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

#: What may go with a prompt besides sampling: the fields of `Request` that a caller may set.
REQUEST_OPTIONS = frozenset({"request_id", "cache_salt", "priority", "program", "deadline", "prompt_tail"})


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is.

    Attributes:
        logprob: Sum of its tokens' log-probabilities.
        tokens: Each token's own.
    """

    logprob: float
    tokens: tuple[TokenLogprob, ...]


class Engine(LocalBackend):
    """A model on this machine, with a radix cache under it.

    Example:
        >>> with agentrt.Engine() as engine:  # doctest: +SKIP
        ...     print(engine.generate("Once upon a time", agentrt.SamplingParams(max_tokens=20)).text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: Dtype = "auto",
        device: str = "auto",
        attention: AttentionChoice = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        page_size: int | None = None,
        step_tokens: int | None = None,
        max_running: int | None = None,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        eviction: Eviction | None = None,
        limits: Limits | None = None,
        record_trace: str | None = None,
        process: bool = True,
        check: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Starts an engine and waits until it is ready.

        Args:
            model: Short name, folder, .gguf file or "hf:org/name"; None: the default model.
            dtype: Arithmetic, or "int8" or "int4" for the bits of the matrices' weights (CPU); "auto": "int4" for a model
                whose file holds it in few bits, else bfloat16 where the processor multiplies it natively, else float32.
            device: "auto", "cpu" or "cuda".
            attention: "torch", "triton" or "auto": kernels where they can be had, Triton's on a GPU, native ones on a CPU.
            threads: Threads of torch; None: torch's own choice.
            max_context: Shortens the model's context.
            kv_tokens: Token slots of the KV store; None: a share of the free memory.
            page_size: Tokens a page; None: 1 on a CPU, 16 on a GPU.
            step_tokens: Most new tokens in one step.
            max_running: Most sequences in one step.
            prefix_cache: Keep computed prefixes for later requests.
            policy: Order of admission.
            eviction: Which cached prefixes go first.
            limits: Bounds on one request.
            record_trace: File to record a trace to, for `agentrt simulate`.
            process: Run in a process of its own (nothing here can stall it), or in a thread.
            check: Check that no page is lost after every step (tests).
            progress: Called while the model is fetched.

        Raises:
            ModelError: The model cannot be found, fetched, read or run.
            UserError: The machine cannot do what was asked.
            EngineError: The engine did not start.
        """
        defaults = SchedulerConfig()
        config = EngineConfig(
            model=model,
            dtype=dtype,
            device=device,
            attention=attention,
            threads=threads,
            max_context=max_context,
            record_trace=record_trace,
            cache=CacheConfig(
                kv_tokens=kv_tokens,
                page_size=page_size,
                prefix_cache=prefix_cache,
                eviction=eviction or CacheConfig().eviction,
                check=check,
            ),
            scheduler=SchedulerConfig(step_tokens=step_tokens, max_running=max_running, policy=policy or defaults.policy),
            limits=limits or Limits(),
        )
        with collector.resting():
            files = resolve_model(model, progress)
            super().__init__(config, name=files.name, folder=files.folder, tokenizer=partial(load_tokenizer, str(files.folder)), process=process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- asking ----------------------------------------------------------------------------------------------------------

    def request(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Request:
        """Makes a request.

        Args:
            prompt: Text, token ids, or chat messages (rendered through the model's template).
            sampling: How to answer; None: as the model's makers recommend.
            **options: Fields of `Request`: request_id, cache_salt, priority, program, deadline, prompt_tail.

        Raises:
            UserError: The prompt is empty or an option is unknown.
        """
        unknown = sorted(set(options) - REQUEST_OPTIONS)
        if unknown:
            raise UserError(f"{unknown[0]!r} is not an option of a request; there are {', '.join(sorted(REQUEST_OPTIONS))}")
        ids = prompt_ids(prompt, self.tokenizer)
        return Request(prompt_ids=ids, sampling=sampling or self.facts.sampling, **options)

    def _requests(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None, options: dict[str, Any]
    ) -> list[Request]:
        one = sampling is None or isinstance(sampling, SamplingParams)
        each: Sequence[Any] = [sampling] * len(prompts) if one else sampling  # type: ignore[assignment]
        if "request_id" in options:
            raise UserError("request_id names one request; leave it out with a list of prompts", param="request_id")
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give one, or one for each", param="sampling")
        return [self.request(prompt, params, **options) for prompt, params in zip(prompts, each, strict=True)]

    @overload
    def generate(self, prompt: str | Sequence[int] | Sequence[Message], sampling: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[str | Sequence[int] | Sequence[Message]], sampling: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(self, prompt: Any, sampling: Any = None, **options: Any) -> Completion | list[Completion]:
        """Answers a prompt, or a list of prompts together.

        Args:
            prompt: One prompt (see `request`), or a list of them.
            sampling: One for all, or a list with one for each.
            **options: As for `request`.

        Returns:
            A completion, or a list of them in the prompts' order.

        Raises:
            AgentrtError: Of the first request that failed; the others are aborted.
        """
        if not is_batch(prompt):
            return streams.complete(self, self.request(prompt, sampling, **options))
        return self._run_all(self._requests(prompt, sampling, options))

    def _run_all(self, requests: Sequence[Request]) -> list[Completion]:
        deltas: list[streams.DeltaStream] = []
        try:
            with self.together():
                deltas.extend(streams.stream(self, request) for request in requests)
            return [streams.collect(request, one) for request, one in zip(requests, deltas, strict=True)]
        finally:
            for one in deltas:  # after a failure: those that still run
                one.close()

    async def agenerate(self, prompt: Any, sampling: Any = None, **options: Any) -> Completion | list[Completion]:
        """The async twin of `generate`."""
        if not is_batch(prompt):
            return await streams.acomplete(self, self.request(prompt, sampling, **options))
        requests = self._requests(prompt, sampling, options)
        tasks = [asyncio.ensure_future(streams.acomplete(self, request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after the first failure, or when this call is cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> streams.DeltaStream:
        """Answers a prompt piece by piece. Leaving the iterator early aborts the request."""
        return streams.stream(self, self.request(prompt, sampling, **options))

    def astream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> AsyncIterator[TokenDelta]:
        """The async twin of `stream`."""
        return streams.astream(self, self.request(prompt, sampling, **options))

    def score(self, prompt: Prompt, continuations: Sequence[str | Sequence[int]], **options: Any) -> list[Score]:
        """Log-probabilities of given continuations of a prompt; the prompt is computed once.

        Args:
            prompt: As for `request`.
            continuations: Texts or token ids, none empty.
            **options: As for `request`.

        Raises:
            UserError: A continuation is empty.
        """
        prefix = prompt_ids(prompt, self.tokenizer)
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(prefix))
        requests = []
        for continuation in continuations:
            ids = self.tokenizer.encode(continuation) if isinstance(continuation, str) else list(continuation)
            if not ids:
                raise UserError("a continuation is empty; give at least one token of each", param="continuations")
            requests.append(self.request([*prefix, *ids], sampling, **options))
        return [_score(completion) for completion in self._run_all(requests)]

    # -- for frameworks ---------------------------------------------------------------------------------------------------

    def openai_client(self, **options: Any) -> OpenAI:
        """An `openai.OpenAI` whose server is this engine, in this process, without a port. Closing it leaves the engine open.

        Args:
            **options: Further arguments of `openai.OpenAI`.

        Raises:
            UserError: The package `openai` is not installed.
        """
        openai = _openai()
        from agentrt.server.in_process import BASE_URL, in_process_client

        http = in_process_client(self, sampling=self.facts.sampling)
        client: OpenAI = openai.OpenAI(base_url=BASE_URL, http_client=http, **{"api_key": "none"} | options)
        return client

    def async_openai_client(self, **options: Any) -> AsyncOpenAI:
        """The async twin of `openai_client`."""
        openai = _openai()
        from agentrt.server.in_process import BASE_URL, async_in_process_client

        http = async_in_process_client(self, sampling=self.facts.sampling)
        client: AsyncOpenAI = openai.AsyncOpenAI(base_url=BASE_URL, http_client=http, **{"api_key": "none"} | options)
        return client

    # -- text ------------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; text that spells a control token is text unless `special`."""
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(ids, skip_special=skip_special)


def _openai() -> Any:
    try:
        import openai
    except ImportError:
        raise UserError("the package openai is not installed; pip install openai") from None
    return openai


def _score(completion: Completion) -> Score:
    tokens = completion.prompt_logprobs or ()
    return Score(sum(token.logprob or 0.0 for token in tokens), tokens)


class Runtime(Engine):
    """An engine under SGLang's name for one: ``Runtime(model_path=...)`` and ``shutdown()``. It needs no server and no port."""

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        """Starts an engine.

        Args:
            model_path: As `Engine`'s ``model``.
            **options: As for `Engine`.
        """
        super().__init__(model_path, **options)

    def shutdown(self) -> None:
        """The same as ``close()``."""
        self.close()
