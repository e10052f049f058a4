"""agentrt's own endpoints: ids in and out, the cache, programs, and how the server is."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentrt import __version__
from agentrt.errors import EngineError, PromptError, UserError
from agentrt.request import GrammarSpec, ProgramTag, SamplingParams, TokenDelta, TokenLogprob
from agentrt.request import Request as Ask
from agentrt.server.answers import SampleAnswer
from agentrt.server.call import Call
from agentrt.server.events import DONE, EventStream, event
from agentrt.server.native_types import AbortBody, GenerateBody, HoldBody, ProgramBody, SamplingBody
from agentrt.server.openai_convert import bias_by_id, functions_of
from agentrt.server.openai_types import DetokenizeBody, TokenizeBody
from agentrt.server.prompting import Prepared
from agentrt.server.refusals import not_found, refusal_of
from agentrt.server.service import Service, json_response
from agentrt.text.chat_messages import plain_messages

_KINDS = ("json_schema", "regex", "choices", "lark", "tools", "structural")


def native_routes(service: Service, router: APIRouter) -> APIRouter:
    """Adds the routes to `router`."""
    _generating(service, router)
    _text(service, router)
    _programs(service, router)
    _operating(service, router)
    return router


# ---- generating


def _generating(service: Service, router: APIRouter) -> None:
    @router.post("/generate")
    async def generate(http: Request, body: GenerateBody) -> Response:
        """Continues text, token ids or a chat."""
        call_id = body.request_id or service.face("gen-", None).id
        call = await service.begin(http, "generate", call_id, lambda: _prepare(service, http, body), on_end=_after(service, body))
        if body.stream:
            config = service.config
            return EventStream(_stream(call), keep_alive=config.keep_alive_seconds, stall=config.stall_seconds, on_end=call.end)
        await service.answered(http, call)
        return json_response(_whole(call))

    @router.post("/abort")
    async def abort(body: AbortBody) -> Response:
        """Ends a call by its id, or all calls."""
        wanted = body.request_id or body.rid
        if wanted is None and not body.abort_all:
            raise UserError("give request_id, or abort_all: true", param="request_id")
        return json_response({"aborted": service.flights.abort(None if body.abort_all else wanted)})


def _prepare(service: Service, http: Request, body: GenerateBody) -> Prepared:
    given = [name for name in ("text", "input_ids", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise PromptError(f"give one of text, input_ids and messages, not {' and '.join(given) or 'none'}", param="input_ids")
    tokenizer = service.backend.tokenizer
    if body.text is not None:
        service.prompter.check_length(len(body.text), "text")
        ids = tokenizer.encode(body.text, bos=True)
    else:
        ids = body.input_ids if body.input_ids is not None else tokenizer.encode_chat(plain_messages(body.messages or []))
    if not ids:
        raise PromptError("the prompt is empty; give at least one token", param=given[0])
    options = service.options(http, body.cache_salt, body.priority)
    sampling = _sampling(body.sampling_params)
    if sampling.n > service.config.n:
        raise UserError(f"n is {sampling.n}; at most {service.config.n} samples are given", param="n")
    named: dict[str, Any] = {"request_id": body.request_id} if body.request_id else {}
    ask = Ask(
        prompt_ids=tuple(ids),
        sampling=sampling,
        cache_salt=options.cache_salt,
        priority=options.priority,
        program=_program(body.program, options.program),
        deadline=body.deadline,
        prompt_tail=_tail(body.prompt_tail),
        **named,
    )
    return Prepared((ask,), [SampleAnswer() for _ in range(sampling.n)])


def _tail(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise UserError("prompt_tail is not base64; it is the bytes that the answer must begin by completing", param="prompt_tail") from None


def _program(given: ProgramBody | str | None, header: str | None) -> ProgramTag | None:
    if isinstance(given, ProgramBody):
        return ProgramTag(**given.model_dump())
    name = given or header
    return ProgramTag(name) if name else None


def _sampling(body: SamplingBody) -> SamplingParams:
    values = {name: value for name, value in body if value is not None and name not in ("grammar", "max_new_tokens", "logit_bias")}
    if body.max_new_tokens is not None:
        values["max_tokens"] = body.max_new_tokens
    if body.logit_bias is not None:
        values["logit_bias"] = bias_by_id(body.logit_bias)
    if body.grammar is not None:
        spec = body.grammar
        for name, value, allowed in (
            ("kind", spec.kind, _KINDS),
            ("engine", spec.engine, ("auto", "llguidance", "fsm")),
            ("jump_forward", spec.jump_forward, ("on", "off", "exact_masked")),
        ):
            if value not in allowed:
                raise UserError(f"grammar.{name} is {value!r}; it must be one of {', '.join(allowed)}", param=f"grammar.{name}")
        values["grammar"] = GrammarSpec(**spec.model_dump() | {"options": tuple(sorted(spec.options.items()))})
    return SamplingParams(**values)


def _after(service: Service, body: GenerateBody) -> Any:
    """What is to be done for the program once the call has ended."""

    def after(call: Call) -> None:
        program = call.flight.requests[0].program
        if program is None:
            return
        if body.end_program:
            service.later(lambda: service.backend.end_program(program.program))
        elif body.hold_seconds:
            seconds = body.hold_seconds
            service.later(lambda: service.backend.hold(program.program, seconds))

    return after


def _score(scores: tuple[TokenLogprob, ...] | list[TokenLogprob] | None) -> list[Any] | None:
    if scores is None:
        return None
    return [{"token_id": score.token_id, "logprob": score.logprob, "top": [list(pair) for pair in score.top]} for score in scores]


def _usage(call: Call) -> dict[str, Any]:
    usage = call.usages[0]
    return {name: getattr(usage, name) for name in usage.__dataclass_fields__}


def _whole(call: Call) -> dict[str, Any]:
    samples = [
        {
            "index": index,
            "text": answer.text,
            "output_ids": answer.token_ids,
            "forced_tokens": answer.forced_tokens,
            "finish_reason": answer.finish_reason,
            "stop_match": answer.stop_match,
            "logprobs": _score(answer.logprobs or None),
        }
        for index, answer in enumerate(call.answers)
    ]
    first = call.answers[0]
    ids = list(call.flight.requests[0].prompt_ids)
    scores = {"prompt_logprobs": _score(first.prompt_logprobs)} if first.prompt_logprobs is not None else {}
    return {"id": call.flight.call_id, **samples[0], "samples": samples, "prompt_ids": ids, **scores, "usage": _usage(call)}


async def _stream(call: Call) -> AsyncGenerator[bytes, None]:
    try:
        async for number, delta, _ in call.events():
            yield event(_chunk(call, number, delta))
    except Exception as error:  # the response has begun: the error is its last event
        yield event(refusal_of(error).openai())
    yield DONE


def _chunk(call: Call, number: int, delta: TokenDelta) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "id": call.flight.call_id,
        "index": number,
        "text": delta.text,
        "output_ids": list(delta.token_ids),
        "forced": list(delta.forced),
        "finish_reason": delta.finish_reason,
        "stop_match": delta.stop_match,
    }
    if delta.logprobs is not None:
        chunk["logprobs"] = _score(delta.logprobs)
    if delta.prompt_logprobs is not None:
        chunk["prompt_logprobs"] = _score(delta.prompt_logprobs)
    if delta.usage is not None:
        chunk["usage"] = _usage(call)
    return chunk


# ---- text


def _text(service: Service, router: APIRouter) -> None:
    tokenizer = service.backend.tokenizer

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a chat."""
        service.check_model(body.model)
        text = body.prompt if body.prompt is not None else body.text
        if (text is None) == (body.messages is None):
            raise UserError("give either prompt or messages", param="prompt")

        def work() -> list[int]:
            if text is not None:
                return tokenizer.encode(text, bos=body.add_special_tokens)
            tools = [{"type": "function", "function": each} for each in functions_of(body.tools or [])] or None
            arguments = {"add_generation_prompt": body.add_generation_prompt, **(body.chat_template_kwargs or {})}
            return tokenizer.encode_chat(plain_messages(body.messages or []), tools=tools, **arguments)

        ids = await service.off_loop(work)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": service.backend.capabilities.max_context}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.decode([token_id], skip_special=False) for token_id in ids]
        return json_response(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids."""
        service.check_model(body.model)
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is not in the vocabulary (0 to {tokenizer.vocab_size - 1})", param="tokens")
        answer: dict[str, Any] = {"prompt": await service.off_loop(lambda: tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens))}
        if body.return_token_bytes:  # exact where a text cannot be: a token may be a part of a character
            pieces = [tokenizer.token_bytes(token_id) for token_id in body.tokens]
            answer["token_bytes"] = [None if piece is None else base64.b64encode(piece).decode() for piece in pieces]
        return json_response(answer)


# ---- programs


#: A report is one file with its own style: it runs nothing and takes nothing from anywhere.
_REPORT_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"}


def _programs(service: Service, router: APIRouter) -> None:
    tokenizer = service.backend.tokenizer

    @router.get("/programs")
    async def programs() -> Response:
        """The programs that were seen lately."""
        return json_response({"programs": service.programs.names()})

    @router.get("/programs/{program:path}/report")
    async def report(http: Request, program: str) -> Response:
        """What each call of a program reused, what it computed, and why: JSON, or a page for a browser."""
        if program not in service.programs:
            raise not_found(f"no call of a program {program!r} has ended here; send the header X-Agentrt-Program", param="program")
        made = service.programs.report(program, service.names[0], lambda ids: tokenizer.decode(ids, skip_special=False))
        if "text/html" in http.headers.get("accept", ""):
            return Response(made.to_html(), media_type="text/html", headers=_REPORT_POLICY)
        return json_response(made.values)

    @router.post("/programs/{program:path}/hold")
    async def hold(program: str, body: HoldBody) -> Response:
        """Keeps a program's prefixes while it waits."""
        await service.off_loop(lambda: service.backend.hold(program, body.seconds))
        return json_response({"program": program, "seconds": body.seconds})

    @router.post("/programs/{program:path}/end")
    async def end(program: str) -> Response:
        """A program makes no more calls; what only it could use goes first."""
        await service.off_loop(lambda: service.backend.end_program(program))
        return json_response({"program": program})


# ---- operating


def _operating(service: Service, router: APIRouter) -> None:
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Frees every cached token that no request is using."""
        report = await service.off_loop(service.backend.flush_cache)
        return json_response({"freed_tokens": report.freed_tokens, "kept_tokens": report.kept_tokens})

    @router.get("/health")
    async def health() -> Response:
        """Whether the engine is alive."""
        complaint = service.pulse.complaint()
        return json_response({"status": complaint or "ok"}, 503 if complaint else 200)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken."""
        complaint = service.pulse.complaint() or (None if service.flights.accepting else "the server is shutting down")
        return json_response({"status": complaint or "ready"}, 503 if complaint else 200)

    @router.get("/version")
    async def version() -> Response:
        """Versions of what serves."""
        return json_response({"version": __version__, "model": service.backend.capabilities.model})

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        stats: dict[str, Any] = {}
        if service.pulse.complaint() is None:
            try:
                stats = await service.off_loop(service.backend.stats)
                service.pulse.load = await service.off_loop(service.backend.load)
            except EngineError:
                pass  # the counters of this process are told all the same
        return Response(service.metrics.text(service.pulse.load, stats), media_type="text/plain; version=0.0.4; charset=utf-8")
