"""A call's span, as a collector of OpenTelemetry's receives it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")


@pytest.fixture
def collector(monkeypatch):
    """What was posted to a collector that the environment names."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    seen = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                seen.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield seen
    server.shutdown()
    server.server_close()
    thread.join()


def attributes(span):
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


def test_a_calls_span_follows_the_conventions_and_joins_the_callers_trace(collector, live):
    from agentrt.backends.scripted import Answer, ScriptedBackend
    from agentrt.errors import NumericalError

    def script(prompt, request):
        return Answer("ab", error=NumericalError("nan")) if "bad" in prompt else Answer("abc", forced=1)

    backend = ScriptedBackend(script)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "x-agentrt-program": "p"}
    with live(backend) as server, server.client(headers=headers) as http:
        ask = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 9, "temperature": 0.5}
        answer = http.post("/v1/chat/completions", json=ask).json()
        http.post("/v1/completions", json={"prompt": "bad"})
    backend.close()
    good, bad = sorted(collector, key=lambda span: span.start_time_unix_nano)
    told = attributes(good)
    assert (good.name, good.trace_id.hex(), good.parent_span_id.hex()) == ("chat scripted", trace_id, parent_id)
    assert told.items() >= {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.conversation.id": "p",
        "agentrt.forced_tokens": 1,
    }.items()
    assert good.end_time_unix_nano >= good.start_time_unix_nano
    assert "secret" not in str(good)
    assert (bad.name, bad.status.code, attributes(bad)["error.type"]) == ("text_completion scripted", 2, "NumericalError")


def test_without_an_endpoint_nothing_is_sent(monkeypatch):
    from agentrt.observe.call_spans import spans_from_environment

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert spans_from_environment("m") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert spans_from_environment("m") is None
