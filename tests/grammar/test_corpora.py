"""The corpora's figures, held to no worse than recorded: a seeded sample here, all of them in the proof run."""

import importlib.util
import json
import random
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import agentrt.grammar as grammar
from agentrt.errors import GrammarError
from agentrt.grammar.acceptance import accepts, walks
from agentrt.text import load_tokenizer

#: Recorded over the whole corpora. Refused schemas: those that need a document from the network, and those that
#: nothing satisfies; "checked" are the ones of which some keyword waits for the final check.
RECORDED = {
    "maskbench_sample.jsonl": {"network": 0, "unsatisfiable": 0, "refused": 0, "checked": 17},
    "suite_2020.jsonl": {"network": 22, "unsatisfiable": 11, "refused": 0, "checked": 82},
    "suite_2020_typed.jsonl": {"network": 17, "unsatisfiable": 12, "refused": 0, "checked": 82},
}


class Tally:
    """What a corpus came to."""

    def __init__(self):
        self.counts = {"network": 0, "unsatisfiable": 0, "refused": 0, "checked": 0, "handled": 0, "documents": 0}
        self.wrong = []
        self.milliseconds = []

    def refuse(self, row, error):
        assert error.pointer or error.keyword, f"a refusal names no place: {error}"
        kind = "network" if "nothing is fetched" in str(error) else "unsatisfiable" if "nothing can satisfy" in str(error) else "refused"
        self.counts[kind] += 1
        if kind == "unsatisfiable" and any(test["valid"] for test in row["tests"]):
            self.wrong.append((row["id"], "refused, but some document is valid"))


def run(rows, tokenizer, tries):
    tally = Tally()
    for row in rows:
        try:
            # The suite's group "format" holds that it is only an annotation; its groups "format:..." that it is asserted.
            spec = grammar.json_schema_spec(row["schema"], formats=row["split"] != "format")
            begun = time.perf_counter()
            compiled = grammar.compile(spec, tokenizer)
        except GrammarError as error:
            tally.refuse(row, error)
            continue
        tally.milliseconds.append(1e3 * (time.perf_counter() - begun))
        tally.counts["handled"] += 1
        tally.counts["checked"] += compiled.checked
        for test in row["tests"]:
            tally.counts["documents"] += 1
            _judge(tally, row, compiled, test, tries)
    return tally


def _judge(tally, row, compiled, test, tries):
    accepted = accepts(compiled, test["data"], row["schema"])
    if accepted != test["valid"]:
        tally.wrong.append((row["id"], "accepted" if accepted else "rejected", json.dumps(test["data"])[:200]))
    if not test["valid"] and not compiled.checked and walks(compiled, test["data"], row["schema"], tries):
        tally.wrong.append((row["id"], "the ledger says ENFORCED", json.dumps(test["data"])[:200]))


@pytest.mark.parametrize(("name", "count"), [("maskbench_sample.jsonl", 20), ("suite_2020.jsonl", 40), ("suite_2020_typed.jsonl", 40)])
def test_a_sample_of_the_corpus_has_no_wrong_verdict(name, count, read_corpus, byte_tokens):
    rows = [row for row in read_corpus(name) if len(json.dumps(row)) < 8_000]
    tally = run(random.Random(4).sample(rows, count), byte_tokens, 200)
    assert tally.wrong == []
    assert tally.counts["refused"] == 0


def written_calls(row, tokenizer, rng):
    """What a model of random weights calls, with a leaning towards ends; None if it was cut."""
    compiled = grammar.compile(grammar.tools_spec(row["tools"], tool_choice="required", parallel=False), tokenizer)
    cursor, text = compiled.cursor(), bytearray()
    while not cursor.finished and len(text) < 1500:
        run = cursor.forced()
        if not run:
            allowed = [int(t) for t in np.flatnonzero(np.unpackbits(cursor.allowed().view(np.uint8), bitorder="little")) if t not in tokenizer.eos_ids]
            ends = [t for t in allowed if set(tokenizer.token_bytes(t)) & set(b'"}],')]
            run = [rng.choice(ends if ends and rng.random() < 0.6 else allowed)]
        for token in run:
            assert cursor.advance(token)
            text += tokenizer.token_bytes(token)
    return (compiled, text.decode()) if cursor.finished else None


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.proof)])
def test_every_finished_call_parses_validates_and_names_an_offered_tool(count, corpora, trained_tokens):
    with (corpora / "bfcl_tools.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:count]
    rng, finished = random.Random(5), 0
    for row in rows:
        result = written_calls(row, trained_tokens, rng)
        if result is None:
            continue
        finished += 1
        compiled, text = result
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        parameters = {t["function"]["name"]: t["function"]["parameters"] for t in row["tools"]}[call["name"]]
        assert compiled.verify(text) == [] or compiled.checked
        assert jsonschema.Draft202012Validator(parameters).is_valid(call["arguments"]) or compiled.checked
    assert finished > 0.7 * len(rows)


def same_masks(row, tokenizer, states):
    """Follows the row's valid documents on both engines; how many places were compared, None if the automaton does not take it."""
    try:
        fast, slow = (grammar.compile(grammar.json_schema_spec(row["schema"], engine=engine), tokenizer) for engine in ("fsm", "llguidance"))
    except GrammarError:
        return None
    if fast.engine != "fsm" or fast.nbytes > states * tokenizer.vocab_size / 8:
        return None
    places = 0
    for test in row["tests"]:
        left, right = fast.cursor(), slow.cursor()
        for token in tokenizer.encode(json.dumps(test["data"], ensure_ascii=False)[:400]) if test["valid"] else ():
            assert (left.allowed() == right.allowed()).all(), (row["id"], test["data"])
            assert left.advance(token) == right.advance(token), (row["id"], test["data"])
            places += 1
    return places


@pytest.mark.parametrize("count", [24, pytest.param(None, marks=pytest.mark.proof)])
def test_both_engines_give_the_same_masks_over_the_corpora(count, read_corpus, trained_tokens):
    rows = read_corpus("maskbench_sample.jsonl") + read_corpus("suite_2020_typed.jsonl")
    if count:
        rows = random.Random(6).sample([row for row in rows if len(json.dumps(row)) < 3_000], count)
    compared = [places for row in rows if (places := same_masks(row, trained_tokens, 4_000)) is not None]
    assert len(compared) > len(rows) // 6
    assert sum(compared) > 3 * len(compared)


@pytest.mark.model
@pytest.mark.slow
def test_the_forced_share_is_no_worse_than_recorded(corpora):
    """On the corpora's own documents, in the default model's tokens: a forced token is a forward pass saved, and all is canonical."""
    path = Path(__file__).parents[2] / "benchmarks" / "structured.py"
    benchmark = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("structured_benchmark", path))
    sys.modules[spec.name] = benchmark  # its dataclasses look themselves up there
    spec.loader.exec_module(benchmark)
    tokenizer = load_tokenizer()
    calls = benchmark.tool_calls(corpora, tokenizer)
    kinds = benchmark.measure(benchmark.Agentrt(tokenizer), "maskbench_sample.jsonl", benchmark._read(corpora / "structured" / "maskbench_sample.jsonl"), tokenizer)
    assert calls.canonical == calls.documents >= 290
    assert kinds.canonical == kinds.documents >= 270
    assert (calls.false_rejects, kinds.false_rejects, kinds.false_accepts, kinds.refused, kinds.crashed) == (0, 0, 0, 0, 0)
    assert calls.forced > 0.67 * calls.tokens
    assert kinds.forced > 0.27 * kinds.tokens


@pytest.mark.proof
@pytest.mark.parametrize("name", RECORDED)
def test_the_whole_corpus_is_no_worse_than_recorded(name, read_corpus, byte_tokens):
    rows = read_corpus(name)
    tally = run(rows, byte_tokens, 3_000)
    assert tally.wrong == []
    for kind, figure in RECORDED[name].items():
        assert tally.counts[kind] <= figure, (kind, tally.counts)
    assert tally.counts["handled"] + tally.counts["network"] + tally.counts["unsatisfiable"] == len(rows)
    assert tally.counts["unsatisfiable"] <= 0.05 * (len(rows) - tally.counts["network"])
