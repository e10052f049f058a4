"""Constraints on three corpora of schemas, beside llguidance alone and outlines-core (and xgrammar, if it is installed): who handles
what, at which cost, how often wrongly; and how much of the corpora's own documents is forced.

    OMP_NUM_THREADS=1 python benchmarks/structured.py [--model smollm2-135m] [--sample 60] [--engines agentrt] [--only batches] [--json results.json]

The corpora are looked for in the folder that AGENTRT_CORPORA names (tests/grammar says which). A document counts as accepted if one
of its serialisations (orders of properties, spellings of numbers) walks to an accepting state and, for agentrt, passes the final
check. Schemas that need a document from the network are counted apart. Compiling is cut at 3 seconds. Times are of the thread's own work
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
SECONDS = 3.0
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
            "forced": f"{100 * self.forced / self.tokens:.1f}%" if self.tokens else "-",
            "canonical": f"{100 * self.canonical / self.documents:.1f}%" if self.documents and self.tokens else "-",
            "network": self.network,
            "hung or crashed": self.crashed,
        }


def _spread(values: list[float]) -> str:
    return f"{np.percentile(values, 50):.2f} / {np.percentile(values, 99):.1f}" if values else "-"


@dataclass
class Compiled:
    """One schema as one engine compiled it."""

    cursor: Callable[[], Any]  #: over single bytes
    over_tokens: Callable[[], GrammarCursor] | None  #: over the model's tokens, in this process
    accepts: Callable[[Any, Any], bool]
    mask_us: list[float] = field(default_factory=list)  #: what `accepts` measured on its way


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


# ---- the others: each in a process of its own, which can be killed and may crash

#: A cursor over single bytes, and one over the model's tokens, of a schema that was compiled in so many seconds.
Made = tuple[float, Callable[[], Any], Callable[[], Any]]


class Apart:
    """An engine in another process; where that takes too long or dies, the next schema gets a fresh one."""

    def __init__(self, name: str, make: Callable[[Tokenizer], Callable[[str], Made]], model: str | None) -> None:
        self.name, self._make, self._model = name, make, model
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._make, self._model), daemon=True)
        self._process.start()
        other.close()
        self._answer(60)  # ready

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError("it takes too long")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise GrammarError(answer)
        return answer

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
            return self._answer(SECONDS + 1)
        except (TimeoutError, EOFError, OSError):
            self._process.kill()
            self._process.join()
            self._start()
            raise

    def compile(self, row: Json) -> tuple[Compiled, float]:
        seconds: float = self._ask("compile", row["schema"])
        microseconds: list[float] = []

        def judge(document: Any, schema: Any) -> bool:
            accepted, masks = self._ask("judge", document, schema)
            microseconds.extend(masks)
            return bool(accepted)

        return Compiled(lambda: None, None, judge, microseconds), seconds


def _serve(pipe: Any, make: Callable[[Tokenizer], Callable[[str], Made]], model: str | None) -> None:
    tokenizer = load_tokenizer(model)
    compile_schema, made = make(tokenizer), None
    pipe.send(None)
    while True:
        try:
            kind, *request = pipe.recv()
        except EOFError:
            return
        try:
            if kind == "compile":
                made = compile_schema(json.dumps(*request))
                pipe.send(made[0])
            else:
                assert made is not None
                pipe.send(_judged(made, *request, tokenizer))
        except BaseException as error:
            pipe.send(str(error)[:200])


def _judged(made: Made, document: Any, schema: Any, tokenizer: Tokenizer) -> tuple[bool, list[float]]:
    """Whether the document is taken, and what the masks cost on the way through it."""
    text = serialisation(Compiled(made[1], None, None), document, schema, 3_000)  # type: ignore[arg-type]
    tally = Tally("", "")
    if text is not None:
        follow(tally, made[2](), text, tokenizer)
    return text is not None, tally.mask_us


def outlines_core_engine(tokenizer: Tokenizer) -> Callable[[str], Made]:
    """Its own conversion of schemas to patterns; an index of the tokens, and one of the bytes to walk."""
    pieces: dict[bytes, list[int]] = {}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and token not in tokenizer.eos_ids:
            pieces.setdefault(text, []).append(token)
    tokens = outlines_core.Vocabulary(tokenizer.eos_ids[0], pieces)
    single = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})

    def compile_schema(schema: str) -> Made:
        begun = time.perf_counter()
        pattern = outlines_core.json_schema.build_regex_from_schema(schema, whitespace_pattern=" ?")
        index = outlines_core.Index(pattern, tokens)
        seconds = time.perf_counter() - begun
        table = outlines_core.Index(pattern, single)
        return seconds, lambda: _GuideCursor(table, 257), lambda: _GuideCursor(index, tokenizer.vocab_size)

    return compile_schema


class _GuideCursor:
    """One sequence's way through an index of outlines-core's."""

    def __init__(self, index: Any, size: int) -> None:
        self._guide, self._taken = outlines_core.Guide(index, max_rollback=100_000), 0
        self._mask = np.zeros((size + 31) // 32, dtype=np.int32)

    def __len__(self) -> int:
        return self._taken

    def forced(self) -> list[int]:
        return []

    def allowed(self) -> Any:
        self._guide.write_mask_into(self._mask.ctypes.data, self._mask.size, self._mask.itemsize)
        return self._mask

    def advance(self, token: int) -> bool:
        taken = bool(self._guide.accepts_tokens([token]))
        if taken:
            self._guide.advance(token, return_tokens=False)
        self._taken += taken
        return taken

    def rollback(self, count: int) -> None:
        if count:
            self._guide.rollback_state(count)
            self._taken -= count

    @property
    def accepting(self) -> bool:
        return bool(self._guide.is_finished())


def xgrammar_engine(tokenizer: Tokenizer) -> Callable[[str], Made]:
    """With fixed separators, as the others, and open objects, as JSON Schema has them."""
    import xgrammar

    def compiler(one: Tokenizer) -> Any:
        pieces = [one.token_bytes(i) or b"" for i in range(one.vocab_size)]
        about = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=list(one.eos_ids))
        return xgrammar.GrammarCompiler(about, max_threads=1, cache_enabled=False)

    tokens, single = compiler(tokenizer), compiler(byte_tokenizer())
    arguments = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}

    def compile_schema(schema: str) -> Made:
        begun = time.thread_time()
        compiled = tokens.compile_json_schema(schema, **arguments)
        seconds = time.thread_time() - begun
        table = single.compile_json_schema(schema, **arguments)
        return seconds, lambda: _XgrammarCursor(table, 257), lambda: _XgrammarCursor(compiled, tokenizer.vocab_size)

    return compile_schema


class _XgrammarCursor:
    """One sequence's way through a grammar of xgrammar's."""

    def __init__(self, compiled: Any, size: int) -> None:
        import xgrammar

        self._matcher, self._taken = xgrammar.GrammarMatcher(compiled), 0
        self._mask = xgrammar.allocate_token_bitmask(1, size)

    def __len__(self) -> int:
        return self._taken

    def forced(self) -> list[int]:
        return []

    def allowed(self) -> Any:
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask

    def advance(self, token: int) -> bool:
        taken = bool(self._matcher.accept_token(token))
        self._taken += taken
        return taken

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._taken -= count

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_completed())


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
        tally.mask_us += compiled.mask_us
    return tally


def _judge(tally: Tally, compiled: Compiled, row: Json, test: Json, tokenizer: Tokenizer) -> None:
    try:
        accepted = compiled.accepts(test["data"], row["schema"])
    except Exception:  # the process of an engine that hangs or crashes on it
        accepted = False
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
    """Which engine is faster, for so many documents of one closed schema at once: compiling, and the masks and advances of all their steps.

    The first time every state is new; the later times (the fastest of five) the grammar is known. No model runs, and nothing is forced.
    """
    schema = {"type": "object", "properties": CLOSED, "required": list(CLOSED), "additionalProperties": False}
    told = []
    for size in (1, 32, 256):
        for engine in ("llguidance", "fsm"):
            spec = grammar.json_schema_spec(schema, engine=engine)  # type: ignore[arg-type]
            begun = time.perf_counter()
            compiled = grammar.GrammarCache().compile(spec, tokenizer)
            compiling = time.perf_counter() - begun
            first, *later = [written(compiled, tokenizer, size) for _ in range(6)]
            steps = len(tokenizer.encode(DOCUMENT))
            times = {
                "compile": compiling,
                "a step, the first time": first / steps,
                "a step, later": min(later) / steps,
                "first documents, all": compiling + first,
                "later documents, all": min(later),
            }
            told.append({"documents at once": size, "engine": compiled.engine, **{f"{name}, ms": f"{1e3 * one:.2f}" for name, one in times.items()}})
    return told


def written(compiled: grammar.CompiledGrammar, tokenizer: Tokenizer, size: int) -> float:
    """Seconds that masks and advances take while so many sequences write the document, each some steps behind the one before it."""
    ids = tokenizer.encode(DOCUMENT)
    cursors = [compiled.cursor() for _ in range(size)]
    places = [number % len(ids) for number in range(size)]
    for cursor, place in zip(cursors, places, strict=True):
        for token in ids[:place]:
            cursor.advance(token)
    out, seconds = np.zeros((size, vocabulary_of(tokenizer).words), dtype=np.int32), 0.0
    for _ in ids:
        begun = time.perf_counter()
        grammar.fill_masks(cursors, out)
        for number, cursor in enumerate(cursors):
            cursor.advance(ids[places[number]])
        seconds += time.perf_counter() - begun
        places = [place + 1 for place in places]
        for number, place in enumerate(places):
            if place == len(ids):
                cursors[number], places[number] = compiled.cursor(), 0
    return seconds


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
    parser.add_argument("--only", choices=["corpora", "batches"], default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).parents[2] / "shared" / "data"))
    tokenizer = load_tokenizer(arguments.model)
    makers: dict[str, Callable[[], Any]] = {
        "agentrt": lambda: Agentrt(tokenizer),
        "agentrt, fsm": lambda: Agentrt(tokenizer, "fsm"),
        "llguidance": lambda: Llguidance(tokenizer, False),
        "llguidance, lenient": lambda: Llguidance(tokenizer, True),
        "outlines-core": lambda: Apart("outlines-core", outlines_core_engine, arguments.model),
    }
    if importlib.util.find_spec("xgrammar"):
        makers["xgrammar"] = lambda: Apart("xgrammar", xgrammar_engine, arguments.model)
    wanted = () if arguments.only == "batches" else arguments.engines.split(",")
    engines = [make() for name, make in makers.items() if any(part in name for part in wanted)]
    grammar.compile(grammar.json_schema_spec({}), tokenizer)  # the tokenizer's tables, made once a process
    rows: list[Json] = []
    for corpus in () if arguments.only == "batches" else CORPORA:
        schemas = _read(folder / "structured" / corpus)
        if arguments.sample:
            schemas = random.Random(SEED).sample(schemas, min(arguments.sample, len(schemas)))
        rows += [measure(engine, corpus, schemas, tokenizer).row() for engine in engines]
    if arguments.only != "batches":
        rows.append(tool_calls(folder, tokenizer).row())
    print(f"seed {SEED}; vocabulary of {tokenizer.vocab_size:,}; Python {platform.python_version()}; {platform.processor() or platform.machine()}\n")
    batch = [] if arguments.only == "corpora" else batches(tokenizer)
    for table in filter(None, (rows, batch)):
        show(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"corpora": rows, "batches": batch}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
