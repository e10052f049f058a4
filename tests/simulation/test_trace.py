"""Traces in both forms, the generated workloads, and the errors of a file that is neither."""

from __future__ import annotations

import gzip
import json

import pytest

from agentrt.errors import UserError
from agentrt.simulation.trace import Blocks, load_trace, save_trace
from agentrt.simulation.workloads import END, WORKLOADS, workload


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_is_made_from_its_seed_and_survives_its_file(tmp_path, name):
    trace = workload(name, seed=3, programs=4, rate=1.0)
    assert trace == workload(name, seed=3, programs=4, rate=1.0)
    assert trace != workload(name, seed=4, programs=4, rate=1.0)
    save_trace(trace, tmp_path / "trace.jsonl")
    loaded = load_trace(tmp_path / "trace.jsonl")
    assert loaded.calls == trace.calls
    assert loaded.page_size == trace.page_size
    for call in trace.calls:
        assert call.output[-1] == END
        assert END not in call.output[:-1]
        assert all(before < call.call_id for before in call.after)
    programs = {call.program.program for call in trace.calls}
    assert len(programs) == 4
    assert sum(call.last for call in trace.calls) == 4


def test_mooncake_form(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 513, "output_length": 0, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "mooncake.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    first, second = load_trace(path).calls
    assert isinstance(first.prompt, Blocks)
    assert (len(first.prompt), len(second.prompt), second.at) == (1000, 513, 1.5)
    assert tuple(first.prompt)[:512] == tuple(second.prompt)[:512]
    assert (len(first.output), len(second.output)) == (3, 1)
    assert first.output[0] != second.output[0]


@pytest.mark.parametrize("line", ["{", '{"what": 1}', '{"agentrt_trace": 99}', '{"call": 1, "at": 0}', '{"timestamp": 0, "input_length": 9999, "output_length": 1, "hash_ids": [1]}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"agentrt_trace": 1}\n' + line)
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        load_trace(path)


def test_a_missing_file_and_an_empty_trace(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text('{"agentrt_trace": 1}')
    with pytest.raises(UserError, match="no calls"):
        load_trace(tmp_path / "empty.jsonl")
