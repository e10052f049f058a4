"""Constraints on three corpora of schemas, beside llguidance alone and outlines-core (and xgrammar, if it is installed): who handles
what, at which cost, how often wrongly; and how much of the corpora's own documents is forced.

    OMP_NUM_THREADS=1 python benchmarks/structured.py [--model smollm2-135m] [--sample 60] [--engines agentrt] [--json results.json]

The corpora are looked for in the folder that AGENTRT_CORPORA names (tests/grammar says which). A document counts as accepted if one
of its serialisations (orders of properties, spellings of numbers) walks to an accepting state and, for agentrt, passes the final
check. Schemas that need a document from the network are counted apart. Compiling is cut at 6 seconds. Times are of the thread's own work
(CPU), so that neighbours on the machine do not count; compiling to automata happens in another process, and is told as it is waited for.
A forced token is a forward pass saved, so the share of the one is the share of the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import outlines_core

import agentrt.grammar as grammar
from agentrt.backend import Tokenizer
from agentrt.errors import GrammarError
from agentrt.grammar.acceptance import accepts, serialisation
from agentrt.grammar.check import byte_tokenizer
from agentrt.grammar.cursor import GrammarCursor
from agentrt.grammar.llguidance_matcher import LlguidanceMatcher
from agentrt.grammar.separators import SEPARATORS
from agentrt.grammar.vocabulary import vocabulary_of
from agentrt.text import load_tokenizer

SEED = 0
SECONDS = 6.0
CORPORA = ("maskbench_sample.jsonl", "suite_2020.jsonl", "suite_2020_typed.jsonl")
Json = dict[str, Any]


@dataclass
class Tally:
    """What one engine made of one corpus."""

    corpus: str
    engine: str
    schemas: int = 0
    network: int = 0
    refused: int = 0
    crashed: int = 0
    handled: int = 0
    false_accepts: int = 0
    false_rejects: int = 0
    documents: int = 0
    forced: int = 0
    tokens: int = 0
    canonical: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def row(self) -> Json:
        asked = self.schemas - self.network
        return {
            "corpus": self.corpus,
            "engine": self.engine,
            "schemas": asked,
            "handled": f"{100 * self.handled / max(asked, 1):.1f}%",
            "refused": f"{100 * self.refused / max(asked, 1):.1f}%",
            "compile ms p50/p99": _spread(self.compile_ms),
            "mask us p50/p99": _spread(self.mask_us),
            "false accepts": self.false_accepts,
            "false rejects": self.false_rejects,
            "forced = passes saved": f"{100 * self.forced / self.tokens:.1f}%" if self.tokens else "-",
            "canonical": f"{100 * self.canonical / self.documents:.1f}%" if self.documents and self.tokens else "-",
            "network": self.network,
            "crashed": self.crashed,
        }


def _spread(values: list[float]) -> str:
    return f"{np.percentile(values, 50):.2f} / {np.percentile(values, 99):.1f}" if values else "-"


@dataclass
class Compiled:
    """One schema as one engine compiled it."""

    cursor: Callable[[], Any]  #: over single bytes
    over_tokens: Callable[[], GrammarCursor] | None  #: over the model's tokens
    accepts: Callable[[Any, Any], bool]


def walks(compiled: Any, document: Any, schema: Any) -> bool:
    return serialisation(compiled, document, schema, 3_000) is not None


class Agentrt:
    def __init__(self, tokenizer: Tokenizer, engine: str = "auto") -> None:
        self.name = "agentrt" if engine == "auto" else f"agentrt, {engine}"
        self._tokenizer, self._engine = tokenizer, engine
        self._clock = time.perf_counter if engine == "fsm" else time.thread_time

    def compile(self, row: Json) -> tuple[Compiled, float]:
        spec = grammar.json_schema_spec(row["schema"], engine=self._engine, formats=row["split"] != "format")  # type: ignore[arg-type]
        begun = self._clock()
        made = grammar.GrammarCache().compile(spec, self._tokenizer)
        seconds = self._clock() - begun
        if self._engine == "fsm" and made.engine != "fsm":
            raise GrammarError("not of the regular kind")
        single = grammar.compile(spec, byte_tokenizer())
        return Compiled(single.cursor, made.cursor, lambda document, schema: accepts(single, document, schema)), seconds


class Llguidance:
    def __init__(self, tokenizer: Tokenizer, lenient: bool) -> None:
        self.name = "llguidance, lenient" if lenient else "llguidance"
        self._tokens, self._bytes = vocabulary_of(tokenizer), vocabulary_of(byte_tokenizer())
        self._options = {**SEPARATORS, "lenient": lenient}

    def compile(self, row: Json) -> tuple[Compiled, float]:
        begun = time.thread_time()
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(row["schema"]), overrides=self._options)
        template = llguidance.LLMatcher(self._tokens.llguidance, text, log_level=0)
        seconds = time.thread_time() - begun
        if template.is_error():
            raise GrammarError(template.get_error().splitlines()[0])
        single = llguidance.LLMatcher(self._bytes.llguidance, text, log_level=0)

        def cursor() -> GrammarCursor:
            return GrammarCursor(LlguidanceMatcher(single), self._bytes)

        made = Compiled(cursor, lambda: GrammarCursor(LlguidanceMatcher(template), self._tokens), lambda d, s: walks(made, d, s))
        return made, seconds


# ---- outlines-core: compiled in a process that can be killed


def _outlines_process(pipe: Any, pieces: dict[bytes, list[int]], eos: int) -> None:
    vocabulary = outlines_core.Vocabulary(eos, pieces)
    single = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})
    while True:
        schema = pipe.recv()
        try:
            begun = time.perf_counter()
            pattern = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema), whitespace_pattern=" ?")
            outlines_core.Index(pattern, vocabulary)
            seconds = time.perf_counter() - begun
            index = outlines_core.Index(pattern, single)
            pipe.send((seconds, index.get_transitions(), index.get_final_states(), index.get_initial_state()))
        except BaseException as error:
            pipe.send(str(error)[:200])


class _TableCursor:
    def __init__(self, table: dict[int, dict[int, int]], finals: set[int], start: int) -> None:
        self._table, self._finals, self._states = table, finals, [start]

    def __len__(self) -> int:
        return len(self._states) - 1

    def advance(self, byte: int) -> bool:
        following = self._table.get(self._states[-1], {}).get(byte)
        if following is not None:
            self._states.append(following)
        return following is not None

    def rollback(self, count: int) -> None:
        del self._states[len(self._states) - count :]

    @property
    def accepting(self) -> bool:
        return self._states[-1] in self._finals


class OutlinesCore:
    name = "outlines-core"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces: dict[bytes, list[int]] = {}
        for token in range(tokenizer.vocab_size):
            text = tokenizer.token_bytes(token)
            if text and token not in tokenizer.eos_ids:
                self._pieces.setdefault(text, []).append(token)
        self._eos = tokenizer.eos_ids[0]
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_outlines_process, args=(other, self._pieces, self._eos), daemon=True)
        self._process.start()

    def compile(self, row: Json) -> tuple[Compiled, float]:
        self._pipe.send(row["schema"])
        if not self._pipe.poll(SECONDS + 1):
            self._process.kill()
            self._start()
            raise TimeoutError("compiling was cut")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise GrammarError(answer)
        seconds, table, finals, start = answer
        if seconds > SECONDS:
            raise TimeoutError("compiling was cut")
        made = Compiled(lambda: _TableCursor(table, set(finals), start), None, lambda d, s: walks(made, d, s))
        return made, seconds


class Xgrammar:
    """Only if it is installed."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        def compiler(one: Tokenizer) -> Any:
            pieces = [one.token_bytes(i) or b"" for i in range(one.vocab_size)]
            about = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=list(one.eos_ids))
            return xgrammar.GrammarCompiler(about, max_threads=1, cache_enabled=False)

        self._library, self._tokens, self._bytes = xgrammar, compiler(tokenizer), compiler(byte_tokenizer())

    def compile(self, row: Json) -> tuple[Compiled, float]:
        arguments = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}
        text = json.dumps(row["schema"])
        begun = time.thread_time()
        self._tokens.compile_json_schema(text, **arguments)
        seconds = time.thread_time() - begun
        single = self._bytes.compile_json_schema(text, **arguments)
        made = Compiled(lambda: _XgrammarCursor(self._library.GrammarMatcher(single)), None, lambda d, s: walks(made, d, s))
        return made, seconds


class _XgrammarCursor:
    def __init__(self, matcher: Any) -> None:
        self._matcher, self._taken = matcher, 0

    def __len__(self) -> int:
        return self._taken

    def advance(self, byte: int) -> bool:
        taken = bool(self._matcher.accept_token(byte))
        self._taken += taken
        return taken

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._taken -= count

    @property
    def accepting(self) -> bool:
        ends = bool(self._matcher.accept_token(256))
        if ends:
            self._matcher.rollback(1)
        return ends


# ---- measuring


def measure(engine: Any, corpus: str, rows: list[Json], tokenizer: Tokenizer) -> Tally:
    tally = Tally(corpus, engine.name)
    for row in rows:
        tally.schemas += 1
        try:
            compiled, seconds = engine.compile(row)
        except GrammarError as error:
            network = "nothing is fetched" in str(error) or "localhost" in str(error) or row["split"] == "refRemote"
            tally.network += network
            tally.refused += not network
            continue
        except Exception:
            tally.crashed += 1
            continue
        tally.handled += 1
        tally.compile_ms.append(1e3 * seconds)
        for test in row["tests"]:
            _judge(tally, compiled, row, test, tokenizer)
    return tally


def _judge(tally: Tally, compiled: Compiled, row: Json, test: Json, tokenizer: Tokenizer) -> None:
    accepted = compiled.accepts(test["data"], row["schema"])
    tally.false_accepts += accepted and not test["valid"]
    tally.false_rejects += test["valid"] and not accepted
    if accepted and test["valid"] and compiled.over_tokens is not None:
        text = serialisation(compiled, test["data"], row["schema"])  # type: ignore[arg-type]
        if text is not None:
            follow(tally, compiled.over_tokens(), text, tokenizer)


def follow(tally: Tally, cursor: GrammarCursor, text: str, tokenizer: Tokenizer) -> bool:
    """Walks `text` as a model would that wants to write it: what is forced is appended, the rest is the tokenizer's choice.

    Whether that was possible; if not, nothing of it is counted.
    """
    left, ids, wanted, forced, microseconds = text.encode(), [], list(tokenizer.encode(text)), 0, []
    while left:
        run = cursor.forced()
        if not run:
            begun = time.thread_time()
            cursor.allowed()
            microseconds.append(1e6 * (time.thread_time() - begun))
        tokens = run or wanted[:1]
        for token in tokens:
            piece = tokenizer.token_bytes(token) or b""
            if not piece or not left.startswith(piece) or not cursor.advance(token):
                return False
            left = left[len(piece) :]
        forced += len(run)
        ids += tokens
        same = wanted[: len(tokens)] == tokens
        wanted = wanted[len(tokens) :] if same else vocabulary_of(tokenizer).tokenize(left)
    tally.documents += 1
    tally.forced += forced
    tally.tokens += len(ids)
    tally.mask_us += microseconds
    tally.canonical += ids == tokenizer.encode(text)
    return True


def tool_calls(folder: Path, tokenizer: Tokenizer) -> Tally:
    """The right calls of the tool corpus, under `required`."""
    tally = Tally("bfcl_tools.jsonl", "agentrt, tools")
    for row in _read(folder / "bfcl_tools.jsonl"):
        tally.schemas += 1
        spec = grammar.tools_spec(row["tools"], tool_choice="required")
        assert spec is not None
        begun = time.thread_time()
        compiled = grammar.GrammarCache().compile(spec, tokenizer)
        tally.compile_ms.append(1e3 * (time.thread_time() - begun))
        tally.handled += 1
        text = "\n".join(_calls(row))
        if not compiled.verify(text):  # a few of the corpus' answers are not what their own tools ask for
            tally.false_rejects += not follow(tally, compiled.cursor(), text, tokenizer)
    return tally


def _calls(row: Json) -> Iterator[str]:
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
    for answer in row["answers"]:
        for name, allowed in answer.items():
            arguments = _in_order(_first_of(allowed), parameters.get(name, {}))
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            yield f"<tool_call>\n{call}\n</tool_call>"


def _first_of(allowed: Any) -> Any:
    """The first of the values that the corpus allows, in an object and in those inside it; what may be left out is."""
    if isinstance(allowed, list):
        return [_first_of(part) for part in allowed]
    if not isinstance(allowed, dict):
        return allowed
    return {key: _first_of(values[0]) for key, values in allowed.items() if values and "" not in values}


def _in_order(value: Any, schema: Json) -> Any:
    """The value with its properties in the order in which the schema has them, the others after them."""
    if isinstance(value, list):
        return [_in_order(part, schema.get("items", {})) for part in value]
    if not isinstance(value, dict):
        return value
    named = schema.get("properties", {})
    return {key: _in_order(value[key], named.get(key, {})) for key in sorted(value, key=[*named, *value].index)}


#: A closed schema, which both engines take, and a document of it, over which the positions of a batch are spread.
CLOSED = {name: {"enum": [f"{name} one", f"{name} two"]} for name in ("alpha", "beta", "gamma")} | {"text": {"type": "string", "maxLength": 40}}
DOCUMENT = '{"alpha": "alpha one", "beta": "beta two", "gamma": "gamma one", "text": "the quick brown fox"}'


def batches(tokenizer: Tokenizer) -> list[Json]:
    """What a batch of masks costs on both engines: to compile, the first time, afterwards (the fastest of twenty) one by one, as the engine does, and together."""
    schema = {"type": "object", "properties": CLOSED, "required": list(CLOSED), "additionalProperties": False}
    ids, told = tokenizer.encode(DOCUMENT), []
    for engine in ("llguidance", "fsm"):
        spec = grammar.json_schema_spec(schema, engine=engine)  # type: ignore[arg-type]
        for size in (1, 32, 256):
            begun = time.perf_counter()
            compiled = grammar.GrammarCache().compile(spec, tokenizer)
            compiling = time.perf_counter() - begun
            cursors = [compiled.cursor() for _ in range(size)]
            for number, cursor in enumerate(cursors):
                for token in ids[: number * 7 % len(ids)]:
                    cursor.advance(token)
            out = np.zeros((size, vocabulary_of(tokenizer).words), dtype=np.int32)
            first, *later = [_timed(lambda cursors=cursors: [cursor.allowed() for cursor in cursors]) for _ in range(21)]
            together = [_timed(lambda cursors=cursors, out=out: grammar.fill_masks(cursors, out)) for _ in range(21)]
            times = {"compile": compiling, "first time": first, "one by one": min(later), "together": min(together)}
            told.append({"masks": size, "engine": compiled.engine, **{f"{name}, ms": f"{1e3 * one:.3f}" for name, one in times.items()}})
    return told


def _timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _read(path: Path) -> list[Json]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def show(rows: list[Json]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--sample", type=int, default=None, help="schemas of each corpus, drawn with the seed; all by default")
    parser.add_argument("--engines", default="", help="only engines whose name contains one of these, such as agentrt,llguidance")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).parents[2] / "shared" / "data"))
    tokenizer = load_tokenizer(arguments.model)
    makers: dict[str, Callable[[], Any]] = {
        "agentrt": lambda: Agentrt(tokenizer),
        "agentrt, fsm": lambda: Agentrt(tokenizer, "fsm"),
        "llguidance": lambda: Llguidance(tokenizer, False),
        "llguidance, lenient": lambda: Llguidance(tokenizer, True),
        "outlines-core": lambda: OutlinesCore(tokenizer),
    }
    if importlib.util.find_spec("xgrammar"):
        makers["xgrammar"] = lambda: Xgrammar(tokenizer)
    engines = [make() for name, make in makers.items() if any(part in name for part in arguments.engines.split(","))]
    grammar.compile(grammar.json_schema_spec({}), tokenizer)  # the tokenizer's tables, made once a process
    rows = []
    for corpus in CORPORA:
        schemas = _read(folder / "structured" / corpus)
        if arguments.sample:
            schemas = random.Random(SEED).sample(schemas, min(arguments.sample, len(schemas)))
        rows += [measure(engine, corpus, schemas, tokenizer).row() for engine in engines]
    rows.append(tool_calls(folder, tokenizer).row())
    print(f"seed {SEED}; vocabulary of {tokenizer.vocab_size:,}; Python {platform.python_version()}; {platform.processor() or platform.machine()}\n")
    batch = batches(tokenizer)
    show(rows)
    show(batch)
    if arguments.json:
        arguments.json.write_text(json.dumps({"corpora": rows, "batches": batch}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
