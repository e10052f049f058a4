"""The comparison's protocol, its processes and its table, on an engine of ten lines that needs no model."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

DRIVER = """
import os, sys
sys.path.insert(0, {peers!r})
from driver import Ask, CannotError, Setting, Told, serve

class Echo:
    about = "echo 1.0"

    def __init__(self, setting):
        if setting.threads == 0:
            sys.exit("no threads, no answers")
        if setting.threads < 0:
            os.abort()
        print("what an engine prints is no answer", flush=True)

    def answer(self, ask):
        print("neither is this", flush=True)
        if ask.schemas:
            raise CannotError("echo knows no schemas")
        if ask.max_tokens == 99:
            os.abort()
        answers = [(ids * ask.max_tokens)[: ask.max_tokens] for ids in ask.prompts]
        return Told(answers, computed=sum(map(len, ask.prompts)), passes=ask.max_tokens)

serve(Echo)
"""


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which lie outside the package."""
    before = list(sys.path)
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    try:
        import compare

        yield compare
    finally:
        sys.path[:] = before


@pytest.fixture
def echo(bench, tmp_path):
    """Starts the little engine with so many threads."""
    script = tmp_path / "echo.py"
    script.write_text(DRIVER.format(peers=str(BENCHMARKS / "peers")))
    made = []

    def start(threads: int):
        setting = bench.Setting("m.gguf", "folder", threads, 128, 1024)
        made.append(bench.EngineProcess("echo", [sys.executable, str(script)], setting, tmp_path / "log"))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def test_an_engine_is_asked_frozen_and_asked_again(bench, echo):
    import rows

    engine = echo(2)
    assert engine.about == "echo 1.0"
    for _ in range(2):
        with engine.awake():
            seconds, told = engine.ask(rows.Ask([[1, 2], [3]], ["ab", "c"], 3))
        assert seconds >= 0
        assert told == bench.Told([[1, 2, 1], [3, 3, 3]], computed=3, passes=3)
    with engine.awake(), pytest.raises(bench.CannotError, match="no schemas"):
        engine.ask(rows.Ask([[1]], ["a"], 3, [{}]))
    with engine.awake():
        engine.forget_peak()
        assert engine.peak_bytes() > 1_000_000


def test_what_does_not_start_or_ends_says_why(bench, echo):
    import rows

    with pytest.raises(bench.PeerError, match="no threads, no answers"):
        echo(0)
    with pytest.raises(bench.CrashedError, match="SIGABRT"):
        echo(-1)
    engine = echo(1)
    with pytest.raises(bench.CrashedError, match="SIGABRT"):
        engine.ask(rows.Ask([[1]], ["a"], 99))


def test_a_row_adds_up_what_counts(bench, echo):
    import rows

    def work(tokenizer, repeat, quick):
        yield rows.Part(rows.Ask([[7] * 50], [""], 1), counts=False)
        told = yield rows.Part(rows.Ask([[1, 2, 3]], [""], 4))
        yield rows.Part(rows.Ask([told.answers[0]], [""], 2))
        return {"right": 1, "of": 2}

    row = rows.Row("r", "some work", "m", "s", 3, work)
    told = bench.measure(row, echo(1), None, 0, False)
    assert (told.tokens, told.computed, told.passes, told.note) == (4 + 2, 3 + 4, 4 + 2, {"right": 1, "of": 2})


def test_the_table_has_medians_and_the_ratio_to_the_best_peer(bench):
    import rows

    def measured(*seconds: float) -> list:
        return [bench.Measured(each, 640, 700, None, 3 << 20, None) for each in seconds]

    results = {"agentrt": measured(2.0, 1.0, 9.0), "slow": measured(8.0, 8.0, 8.0), "fast": measured(5.0, 4.0, 3.0), "mute": "it has no such thing"}
    timed = bench.summary(rows.ROWS["few-shot"], results)
    assert {name: told.get("of_best_peer") for name, told in timed["engines"].items()} == {"agentrt": 2.0, "slow": 0.5, "fast": 1.0, "mute": None}
    rated = bench.summary(rows.ROWS["one"], results)
    assert rated["engines"]["agentrt"]["value"] == 320
    assert rated["engines"]["agentrt"]["of_best_peer"] == 2.0

    text = bench.markdown({"machine": "a machine", "about": {"fast": "fast 2.0"}, "left_out": ["gone: no wheel"], "rows": {"few-shot": timed, "one": rated}})
    assert "| 5-shot GSM8K, 32 questions | agentrt | **2.00 s** | **2.00** (goal 3) | 700 | ? | 3 MiB |" in text
    assert "|  | fast | 160 tokens/s | 1.00 | 700 | ? | 3 MiB |" in text
    assert "mute (it has no such thing)" in text
    assert "gone: no wheel" in text


def test_the_whole_command_on_little_engines(bench, tmp_path, monkeypatch, capsys):
    """Engines take turns, one that does not start is left out by name, and a later run adds its row to the file."""
    script, files = tmp_path / "echo.py", SimpleNamespace(name="m", folder=tmp_path, gguf="m.gguf")
    script.write_text(DRIVER.format(peers=str(BENCHMARKS / "peers")))
    (tmp_path / "gone.py").write_text("raise SystemExit('no wheel for this machine')")
    monkeypatch.setattr(bench, "ENVIRONMENTS", tmp_path / "clients")
    monkeypatch.setattr(bench, "resolve_model", lambda name: files)
    monkeypatch.setattr(bench, "load_tokenizer", lambda folder: Letters())
    monkeypatch.setattr(bench, "OURSELVES", bench.Contestant("agentrt", bench.OURS, str(script)))
    peers = {"echo": bench.Contestant("echo", bench.OURS, str(script)), "gone": bench.Contestant("gone", bench.OURS, str(tmp_path / "gone.py"))}
    monkeypatch.setattr(bench, "PEERS", peers)
    monkeypatch.setattr(bench.signal, "signal", lambda *given: None)

    for row in ("start", "eight"):
        monkeypatch.setattr(sys, "argv", ["compare.py", "--quick", "--threads", "1", "--only", row, "--json", str(tmp_path / "out.json")])
        bench.main()
    told = json.loads((tmp_path / "out.json").read_text())
    assert list(told["rows"]) == ["eight", "start"]
    assert told["rows"]["eight"]["engines"]["echo"]["tokens"] == 8 * 16
    assert told["rows"]["start"]["engines"]["agentrt"]["of_best_peer"] > 0
    assert {row["engines"]["gone"]["left_out"] for row in told["rows"].values()} == {"it ended: no wheel for this machine"}
    assert "- left out: 8 at once, 64 tokens: gone (it ended: no wheel for this machine)" in capsys.readouterr().out


@pytest.mark.slow
def test_our_own_driver_answers_and_counts(bench, tiny_model, tmp_path):
    """Two prompts that share their beginning: it is computed once; an answer under a schema ends where its document does."""
    import rows

    setting = bench.Setting("", str(tiny_model), 1, 256, 1 << 24)
    engine = bench.EngineProcess("agentrt", [sys.executable, str(BENCHMARKS / "peers" / "agentrt_driver.py")], setting, tmp_path / "log")
    try:
        shared = list(range(5, 105))
        _, told = engine.ask(rows.Ask([[*shared, 7], [*shared, 8]], ["", ""], 6))
        assert [len(ids) for ids in told.answers] == [6, 6]
        assert told.computed == 100 + 2 * (1 + 5)
        _, told = engine.ask(rows.Ask([shared], [""], 20, [{"type": "boolean"}]))
        assert bench.load_tokenizer(str(tiny_model)).decode(told.answers[0]) in ("true", "false")
        assert told.passes <= told.computed < 10  # the prompt is in the cache
    finally:
        engine.close()


def test_an_engine_far_behind_is_asked_once(bench):
    def measured(*seconds: float) -> list:
        return [bench.Measured(each, 64, 64, 64, 1, None) for each in seconds]

    results = {"agentrt": measured(1.0), "near": measured(4.9), "far": measured(5.1), "mute": "it has no such thing", "new": []}
    assert [name for name in results if bench.far_behind(results, name)] == ["far"]


def test_rows_of_other_work_are_not_mixed(bench, tmp_path):
    file = tmp_path / "compare.json"
    assert bench.earlier_figures(file, False) == {"about": {}, "rows": {}}
    file.write_text('{"quick": true, "about": {"a": "b"}, "rows": {}, "left_out": [], "machine": "m"}')
    assert bench.earlier_figures(file, True)["about"] == {"a": "b"}
    with pytest.raises(bench.PeerError, match="has rows with --quick"):
        bench.earlier_figures(file, False)


def test_every_row_asks_for_the_same_of_all(bench, corpora):
    """Each repeat has prompts of its own, and what a row calls cached was asked before."""
    import rows

    tokenizer = Letters()
    for row in rows.ROWS.values():
        first, second = (_asked(row, tokenizer, repeat) for repeat in (0, 1))
        counted = [part.ask for part in first if part.counts]
        assert counted, row.name
        assert all(len(ask.prompts) == len(ask.texts) for ask in counted)
        assert not {tuple(ids) for part in first for ids in part.ask.prompts} & {tuple(ids) for part in second for ids in part.ask.prompts}, row.name
    asked = [part.ask.prompts for part in _asked(rows.ROWS["cached"], tokenizer, 0)]
    assert asked[0][0][:1990] == asked[1][0][:1990] != asked[1][0]


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, **options: object) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages, tools=None, **options: object) -> list[int]:
        return self.encode(repr((messages, tools)))

    def decode(self, ids, **options: object) -> str:
        return "".join(map(chr, ids))


def _asked(row, tokenizer: Letters, repeat: int) -> list:
    """The parts of a row's work, each answered with one letter a prompt."""
    import rows

    work, parts = row.work(tokenizer, repeat, True), []
    with contextlib.suppress(StopIteration):
        part = next(work)
        while True:
            parts.append(part)
            part = work.send(rows.Told([[65] for _ in part.ask.prompts]))
    return parts


def test_a_fused_tensor_is_taken_apart_as_it_was_put_together(bench):
    torch = pytest.importorskip("torch")
    from float_copy import taken_apart

    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    q, k, v = torch.rand(32, 5), torch.rand(16, 5), torch.rand(16, 5)
    apart = dict(taken_apart("layers.0.self_attn.qkv_proj.weight", torch.cat((q, k, v)), config))
    assert list(apart) == [f"layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert all(torch.equal(made, given) for made, given in zip(apart.values(), (q, k, v), strict=True))
    gate, up = dict(taken_apart("mlp.gate_up_proj.weight", torch.cat((q, q + 1)), config)).values()
    assert torch.equal(gate, q)
    assert torch.equal(up, q + 1)
