"""OpenTelemetry spans: those of a run, under whoever began it, by the conventions; and none, at no cost, where nobody asked."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading

import pytest

import agentrt
from agentrt.backends.scripted import ScriptedBackend
from agentrt.observe import spans

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


@pytest.fixture
def made(monkeypatch):
    """What is exported while the application has set a provider."""
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@agentrt.function
def questions(s, subject):
    s += f"About {subject}, at some length: "
    s += agentrt.gen("first", max_tokens=4)
    forks = s.fork(2)
    forks += agentrt.gen("more", max_tokens=4)
    forks.join()
    s["more"]


def test_a_run_its_calls_and_its_tools_are_spans_with_the_conventions_attributes(made):
    calls = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "It is 3."]

    @agentrt.tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @agentrt.function
    def asking(s):
        s += agentrt.user("What is 1 + 2?")
        s += agentrt.agent_loop("answer", [add])

    asking.run(backend=ScriptedBackend(calls), seed=5)
    by_name = {span.name: span for span in made.get_finished_spans()}
    assert set(by_name) == {"invoke_workflow asking", "chat scripted", "execute_tool add"}
    run, tool = by_name["invoke_workflow asking"], by_name["execute_tool add"]
    chats = [span for span in made.get_finished_spans() if span.name == "chat scripted"]
    assert len(chats) == 2
    assert all(span.parent.span_id == run.context.span_id for span in [*chats, tool])
    assert run.parent is None
    assert run.attributes["gen_ai.operation.name"] == "invoke_workflow"
    assert run.attributes["gen_ai.request.seed"] == 5
    for kind in ("input_tokens", "output_tokens", "cache_read.input_tokens"):
        name = f"gen_ai.usage.{kind}"
        assert run.attributes[name] == sum(span.attributes[name] for span in chats) > 0
    assert tool.attributes["gen_ai.tool.name"] == "add"
    assert all(run.start_time <= span.start_time <= span.end_time <= run.end_time for span in [*chats, tool])
    assert not any("What is" in str(span.attributes) for span in by_name.values())  # no text goes out


def test_a_batch_of_runs_belongs_under_the_span_in_which_it_was_started(made):
    with trace.get_tracer_provider().get_tracer("test").start_as_current_span("mine") as mine:
        questions.run_batch([{"subject": name} for name in ("rain", "snow", "hail")], backend=ScriptedBackend("yes"))
    runs = [span for span in made.get_finished_spans() if span.name == "invoke_workflow questions"]
    assert len(runs) == 3
    assert all(span.parent.span_id == mine.get_span_context().span_id for span in runs)


def test_a_program_that_fails_is_a_span_with_its_error(made):
    @agentrt.function
    def failing(s):
        s += "Well: "
        s += agentrt.gen("x")
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        failing.run(backend=ScriptedBackend("a"))
    run = next(span for span in made.get_finished_spans() if span.name.startswith("invoke_workflow"))
    assert run.status.status_code is trace.StatusCode.ERROR
    assert run.attributes["error.type"] == "ValueError"


def test_an_exporter_that_fails_costs_a_warning_and_no_program(made, monkeypatch):
    monkeypatch.setattr(sdk.TracerProvider, "get_tracer", lambda *given: 1 / 0)
    with pytest.warns(UserWarning, match="could not be made: ZeroDivisionError"):
        assert questions.run("rain", backend=ScriptedBackend("yes"))["first"] == "yes"


def test_where_nobody_asked_for_spans_opentelemetry_is_not_even_imported():
    program = (
        "import sys, agentrt\n"
        "from agentrt.backends.scripted import ScriptedBackend\n"
        "@agentrt.function\n"
        "def ask(s):\n"
        "    s += 'Say: '\n"
        "    s += agentrt.gen('x')\n"
        "assert ask.run(backend=ScriptedBackend('a'))['x'] == 'a'\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_an_endpoint_in_the_environment_is_enough(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(spans, "_own_provider", None)
    try:
        questions.run("rain", backend=ScriptedBackend("yes"))
        spans._own_provider.shutdown()  # sends what is waiting
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert b"invoke_workflow questions" in b"".join(got)


def test_an_endpoint_without_the_packages_is_one_warning(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(spans, "_own_provider", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.warns(UserWarning, match=r"pip install 'agentrt\[otel\]'") as caught:
        questions.run_batch([{"subject": "rain"}, {"subject": "snow"}], backend=ScriptedBackend("yes"))
    assert len(caught) == 1
