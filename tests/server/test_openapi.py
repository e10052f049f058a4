"""The server's own description, turned against it: whatever fits or misses the schemas, nothing goes wrong inside."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest

from agentrt.backends.scripted import ScriptedBackend
from agentrt.config import ServerConfig
from agentrt.server.app import create_app


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [600, pytest.param(2000, marks=pytest.mark.proof)])
def test_no_error_inside_whatever_is_asked(count):
    schemathesis = pytest.importorskip("schemathesis")
    backend = ScriptedBackend("ok", tokens_per_delta=8)
    app = create_app(backend, ServerConfig(n=4))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    posts = [operation for operation in operations if operation.method == "post" and operation.body]
    each = count // len(posts) + 1
    seen: Counter[int] = Counter()

    def run(operation, examples: int) -> None:
        both = operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE) if operation in posts else operation.as_strategy()

        @hypothesis.settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=both)
        def one(case) -> None:
            answer = case.call()
            seen[answer.status_code] += 1
            told = answer.status_code == 501 and operation.path == "/v1/embeddings"
            assert answer.status_code < 500 or told, f"{operation.label}: {answer.status_code} {answer.text}\n{case.body!r}"

        one()

    for operation in operations:
        run(operation, each if operation in posts else 10)
    backend.close()
    assert sum(seen.values()) >= count, seen
    assert seen[200] > count // 40, seen
    assert seen[400] > count // 40, seen
