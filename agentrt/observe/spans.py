"""OpenTelemetry spans of a program: one for the run, and under it one for each call of the model and each tool.

They are made when the run ends, of its report, with the times at which things happened; names and attributes follow
OpenTelemetry's conventions for generative AI (``gen_ai.*``), what those have no word for is ``agentrt.*``. Only numbers and names go
out, never text of prompts or answers. The SDK is optional: with neither a tracer provider set by the application nor an endpoint in
the environment, nothing is imported and nothing is made. Invariant: a span that cannot be made never fails the program.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from agentrt.observe.report import Report

Record = Mapping[str, Any]

#: Environment variables of OpenTelemetry's own; either one turns spans on where the application has set no provider.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_lock = threading.Lock()
_own_provider: Any = None  # what an endpoint led to: a provider of ours, or False if there is no SDK


def caller_context() -> Any:
    """Where the spans of a run that begins here belong: the current context of OpenTelemetry; None if spans are off."""
    if _provider() is None:
        return None
    from opentelemetry import context

    return context.get_current()


def export(report: Report, began: int, context: Any) -> None:
    """Makes the spans of a run that has ended.

    Args:
        report: The run's.
        began: When it began, in nanoseconds since the epoch.
        context: What `caller_context` returned when it began.
    """
    provider = _provider()
    if provider is None:
        return
    try:
        _Spans(provider, report.values, began).make(context)
    except Exception as error:  # an exporter's fault is no fault of the program's
        warnings.warn(f"the program's spans could not be made: {type(error).__name__}: {error}", stacklevel=2)


def _provider() -> Any:
    """The provider that the application has set, else one that sends to the endpoint, else None."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return provider
    if any(os.environ.get(name) for name in ENDPOINTS) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        return _endpoint_provider() or None
    return None


def _endpoint_provider() -> Any:
    global _own_provider
    with _lock:
        if _own_provider is None:
            _own_provider = _sending_provider()
        return _own_provider


def _sending_provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        warnings.warn(
            f"{' or '.join(ENDPOINTS)} is set, but the packages that send spans are missing: pip install 'agentrt[otel]'",
            stacklevel=2,
        )
        return False
    service = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "agentrt"}
    provider = TracerProvider(resource=Resource.create(service))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class _Spans:
    """The spans of one report."""

    def __init__(self, provider: Any, values: Record, began: int) -> None:
        self._tracer = provider.get_tracer("agentrt")
        self._values = values
        self._began = began

    def make(self, context: Any) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        values = self._values
        root = self._span(
            f"invoke_workflow {values['program']}", SpanKind.INTERNAL, context, 0.0, self._of_run(), values["error"], None
        )
        inside = set_span_in_context(root, context)
        for call in values["calls"]:
            operation = "text_completion" if call["kind"] in ("gen", "select") else "chat"
            name = f"{operation} {values['model']}"
            self._span(name, SpanKind.CLIENT, inside, call["began"], self._of_call(operation, call), None, call["ended"])
        for tool in values["tools"]:
            name = f"execute_tool {tool['name']}"
            self._span(name, SpanKind.INTERNAL, inside, tool["began"], _of_tool(tool), tool["error"], tool["ended"])
        root.end(self._at(values["wall_seconds"]))

    def _at(self, seconds: float) -> int:
        return self._began + int(seconds * 1e9)

    def _span(
        self, name: str, kind: Any, context: Any, began: float, attributes: Record, error: str | None, ended: float | None
    ) -> Any:
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(
            name, context, kind=kind, attributes={k: v for k, v in attributes.items() if v is not None}, start_time=self._at(began)
        )
        if error:
            span.set_attribute("error.type", error.partition(":")[0])
            span.set_status(Status(StatusCode.ERROR, error))
        if ended is not None:
            span.end(self._at(ended))
        return span

    def _of_run(self) -> Record:
        values, totals = self._values, self._values["totals"]
        return {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": values["program"],
            "gen_ai.provider.name": "agentrt",
            "gen_ai.request.model": values["model"],
            "gen_ai.request.seed": values["seed"],
            "gen_ai.usage.input_tokens": totals["prompt_tokens"],
            "gen_ai.usage.output_tokens": totals["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": totals["cached_tokens"],
            "agentrt.calls": totals["calls"],
            "agentrt.forced_tokens": totals["forced_tokens"],
            "agentrt.passes_saved": totals["passes_saved"],
            "agentrt.critical_path_seconds": values["critical_path"]["seconds"],
        }

    def _of_call(self, operation: str, call: Record) -> Record:
        file, _, line = call["where"].rpartition(":")
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "agentrt",
            "gen_ai.request.model": self._values["model"],
            "gen_ai.response.finish_reasons": (str(call["finish_reason"]),),
            "gen_ai.usage.input_tokens": call["prompt_tokens"],
            "gen_ai.usage.output_tokens": call["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": call["cached_tokens"],
            "code.file.path": file,
            "code.line.number": int(line) if line.isdigit() else None,
            "agentrt.branch": call["branch"],
            "agentrt.variable": call["name"],
            "agentrt.kind": call["kind"],
            "agentrt.forced_tokens": call["forced_tokens"],
            "agentrt.forward_passes": call["forward_passes"],
            "agentrt.passes_saved": call["passes_saved"],
            "agentrt.queue_seconds": call["queue_seconds"],
        }


def _of_tool(tool: Record) -> Record:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool["name"],
        "gen_ai.tool.type": "function",
        "agentrt.branch": tool["branch"],
    }
