"""One OpenTelemetry span a call, under the conventions for generative AI (`gen_ai.*`), for whoever traces a system that calls us.

On only if the SDK is installed (`pip install agentrt[otel]`) and an endpoint is set in the environment, as OpenTelemetry names it
(`OTEL_EXPORTER_OTLP_ENDPOINT`). No text goes into a span: sizes, times and reasons alone. Invariant: telling never fails or delays
a call; spans that cannot be sent are dropped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrt.request import SamplingParams, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger("agentrt.server")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

#: How the conventions call what an endpoint does.
_OPERATIONS = {"completions": "text_completion", "generate": "text_completion"}


@dataclass(frozen=True, slots=True)
class CallEnded:
    """What a span tells.

    Attributes:
        call_id, endpoint: Of the call.
        context: The caller's headers `traceparent` and `tracestate`, if it sent them.
        seconds: How long it took.
        first_token_seconds: Until its first token; None if none came.
        sampling: How it was asked; of its first request.
        usages: What its requests cost, those that ended well.
        finish_reasons: One a sample.
        error: A short word for why it failed; None if it did not.
        program: Its program.
    """

    call_id: str
    endpoint: str
    context: Mapping[str, str]
    seconds: float
    first_token_seconds: float | None
    sampling: SamplingParams
    usages: Sequence[Usage]
    finish_reasons: Sequence[str]
    error: str | None
    program: str | None


class CallSpans:
    """Sends spans to the endpoint that the environment names."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        """Makes it; use `spans_from_environment`."""
        self._provider = provider
        self._tracer = provider.get_tracer("agentrt")
        self._model = model

    def tell(self, call: CallEnded) -> None:
        """Makes the span of a call that has just ended."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ended = time.time_ns()
        name = f"{_OPERATIONS.get(call.endpoint, 'chat')} {self._model}"
        begun = ended - int(call.seconds * 1e9)
        span = self._tracer.start_span(name, extract(dict(call.context)), SpanKind.SERVER, self._attributes(call), start_time=begun)
        if call.error is not None:
            span.set_status(Status(StatusCode.ERROR, call.error))
        span.end(ended)

    def _attributes(self, call: CallEnded) -> dict[str, str | int | float | Sequence[str]]:
        sampling, usages = call.sampling, call.usages
        told: dict[str, str | int | float | Sequence[str] | None] = {
            "gen_ai.operation.name": _OPERATIONS.get(call.endpoint, "chat"),
            "gen_ai.provider.name": "agentrt",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": call.call_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
            "gen_ai.response.finish_reasons": list(call.finish_reasons) or None,
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
            "gen_ai.conversation.id": call.program,
            "gen_ai.server.time_to_first_token": call.first_token_seconds,
            "agentrt.forced_tokens": sum(usage.forced_tokens for usage in usages),
            "agentrt.queue_seconds": max((usage.queue_seconds for usage in usages), default=0.0),
            "error.type": call.error,
        }
        return {name: value for name, value in told.items() if value is not None}

    def close(self) -> None:
        """Sends what waits, and ends; may take a few seconds."""
        self._provider.shutdown()


def spans_from_environment(model: str) -> CallSpans | None:
    """What sends spans, if the environment asks for it; None if it does not, or if the SDK is not installed, which is logged."""
    if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("an OpenTelemetry endpoint is set, but no spans are sent: %s; pip install 'agentrt[otel]'", error)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "agentrt")
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return CallSpans(provider, model)
