"""agentrt beside other engines: the same work, model and threads, in one run, in turns; one table.

    python benchmarks/compare.py [--quick] [--only one eight] [--peers openvino vllm] [--json compare.json]
    python benchmarks/compare.py --show compare.json

Each engine runs in a process of its own, is frozen while another is asked, and gives two short answers when it wakes. Peers are installed into environments of their own on first
use (`.clients`; minutes, and several gigabytes for vLLM); one that cannot be installed or started is left out by name, with the reason.
Each has its prefix cache on, and the arithmetic that suits the processor; peers that cannot read the GGUF get a copy of
the same weights that they can: floats, or 8 bits for a kind of 5 that one of them lacks.
Every repeat asks all engines, one after the other, before the next one begins (but one that is far behind only once); the table has medians,
and the ratio to the best peer.
With ``--json``, rows that the file has from earlier runs stay, so that a long comparison can be made row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from agentrt.hub import ModelFiles, resolve_model
from agentrt.text import load_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from driver import CannotError, Setting, Told
from environments import ENVIRONMENTS, LLAMACPP, OPENVINO, OURS, VLLM, CrashedError, Environment, PeerError
from float_copy import float_copy
from gguf_copy import readable_gguf
from process import EngineProcess
from rows import ROWS, SEED, Row, ask, missing

HERE = Path(__file__).resolve().parent
CONTEXT, KV_BYTES = 2560, 2 << 30
FAR_BEHIND = 5  # an engine that took so many times as long as the fastest is asked once only


@dataclass(frozen=True)
class Contestant:
    """An engine to be compared: where it is installed, its driver, and which copy of the weights it needs, if it cannot read the GGUF."""

    name: str
    environment: Environment
    driver: str
    copy: Literal["", "floats", "readable"] = ""

    def setting(self, model: ModelFiles, threads: int, dtype: str) -> Setting:
        folder = float_copy(model) if self.copy == "floats" else model.folder
        gguf = readable_gguf(model) if self.copy == "readable" else model.gguf
        return Setting(str(gguf), str(folder), threads, CONTEXT, KV_BYTES, dtype)

    def start(self, setting: Setting) -> EngineProcess:
        """Installs it if need be and starts it.

        Raises:
            PeerError: It cannot be had here; says why.
        """
        command = [str(self.environment.python()), str(HERE / "peers" / self.driver)]
        ENVIRONMENTS.mkdir(exist_ok=True)
        log = ENVIRONMENTS / f"compare-{self.name}.log"
        try:
            return EngineProcess(self.name, command, setting, log, self.environment.variables())
        except CrashedError:
            if not self.environment.rebuild():
                raise
            return EngineProcess(self.name, command, setting, log, self.environment.variables())


OURSELVES = Contestant("agentrt", OURS, "agentrt_driver.py")
PEERS = {
    peer.name: peer
    for peer in (
        Contestant("openvino", OPENVINO, "openvino_driver.py", copy="readable"),
        Contestant("vllm", VLLM, "vllm_driver.py", copy="floats"),
        Contestant("llamacpp", LLAMACPP, "llamacpp_driver.py"),
        Contestant("guidance", LLAMACPP, "guidance_driver.py"),
        Contestant("transformers", OURS, "transformers_driver.py", copy="floats"),
    )
}


@dataclass(frozen=True)
class Measured:
    """What one engine took for one repeat of a row."""

    seconds: float
    tokens: int
    computed: int | None
    passes: int | None
    peak_bytes: int
    note: dict[str, Any] | None


def measure(row: Row, engine: EngineProcess, tokenizer: Any, repeat: int, quick: bool) -> Measured:
    """Does a row's work once on an engine."""
    work, seconds, tokens = row.work(tokenizer, repeat, quick), 0.0, 0
    costs: list[Told] = []
    engine.forget_peak()
    try:
        part = next(work)
        while True:
            took, told = engine.ask(part.ask)
            if part.counts:
                seconds, tokens = seconds + took, tokens + _generated(told, tokenizer)
                costs.append(told)
            part = work.send(told)
    except StopIteration as end:
        note = end.value
    return Measured(seconds, tokens, _total(costs, "computed"), _total(costs, "passes"), engine.peak_bytes(), note)


def _generated(told: Told, tokenizer: Any) -> int:
    answers = told.answers if told.answers is not None else [tokenizer.encode(text) for text in told.texts or ()]
    return sum(map(len, answers))


def _total(costs: Sequence[Told], name: str) -> int | None:
    counts = [getattr(told, name) for told in costs]
    return None if None in counts else sum(counts)


def far_behind(results: Mapping[str, list[Measured] | str], name: str) -> bool:
    """Whether an engine was so slow that asking it again would tell nothing, and take minutes."""
    told, all_told = results[name], [one.seconds for each in results.values() if not isinstance(each, str) for one in each]
    return bool(told) and not isinstance(told, str) and told[0].seconds > FAR_BEHIND * min(all_told)


class Comparison:
    """The engines on one model, started when first needed, each frozen unless it is asked."""

    def __init__(self, model: str, contestants: Sequence[Contestant], args: argparse.Namespace) -> None:
        self._files = resolve_model(model)
        self._tokenizer = load_tokenizer(str(self._files.folder))
        self._contestants, self._quick, self._threads, self._dtype = contestants, args.quick, args.threads, args.dtype
        self.left_out: dict[str, str] = {}
        self.about: dict[str, str] = {}

    def run(self, rows: Sequence[Row], repeats: int) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yields each row with its results, one an engine."""
        lasting = [row for row in rows if not row.fresh]
        if lasting:
            with self._started() as engines:
                for row in lasting:
                    yield row, self._in_turns(row, engines, repeats)
        for row in rows:
            if row.fresh:
                yield row, self._starts(row, repeats)

    @contextmanager
    def _started(self) -> Iterator[dict[str, EngineProcess]]:
        with ExitStack() as stack:
            engines = {}
            for contestant in self._contestants:
                engine = self._start(contestant)
                if engine is None:
                    continue
                stack.callback(engine.close)
                engines[contestant.name] = engine
            yield engines

    def _start(self, contestant: Contestant) -> EngineProcess | None:
        engine = None
        try:
            engine = contestant.start(contestant.setting(self._files, self._threads, self._dtype))
            with engine.awake():
                self._warm_up(engine)
        except PeerError as error:
            if engine is not None:
                engine.close()
            self.left_out[contestant.name] = str(error)
            print(f"{contestant.name} with {self._files.name} is left out: {error}", file=sys.stderr, flush=True)
            return None
        self.about[contestant.name] = engine.about
        return engine

    def _warm_up(self, engine: EngineProcess) -> None:
        """Two short answers, so that no row pays for what an engine does only once, or for having been frozen."""
        prompts = [self._tokenizer.encode(text) for text in ("Water boils at", "The capital of France is")]
        try:
            engine.ask(ask(self._tokenizer, prompts, 8))
        except CannotError:
            engine.ask(ask(self._tokenizer, prompts, 8, [{"type": "boolean"}] * 2))

    def _in_turns(self, row: Row, engines: dict[str, EngineProcess], repeats: int) -> dict[str, Any]:
        results: dict[str, Any] = {name: [] for name in engines} | self.left_out
        for repeat in range(repeats):
            for name, engine in list(engines.items()):
                if isinstance(results[name], str) or far_behind(results, name):
                    continue
                try:
                    with engine.awake():
                        self._warm_up(engine)  # others had the processor's caches, and while frozen it may have lost memory to them
                        results[name].append(measure(row, engine, self._tokenizer, repeat, self._quick))
                except CannotError as error:
                    results[name] = str(error)
                except PeerError as error:
                    results[name] = str(error)
                    engines.pop(name).close()
        return results

    def _starts(self, row: Row, repeats: int) -> dict[str, Any]:
        """From the start of a process to its first token."""
        results: dict[str, Any] = {contestant.name: [] for contestant in self._contestants}
        for repeat in range(repeats):
            for contestant in self._contestants:
                before = results[contestant.name]
                if isinstance(before, str) or far_behind(results, contestant.name):
                    continue
                results[contestant.name] = self._one_start(row, contestant, repeat, before)
        return results

    def _one_start(self, row: Row, contestant: Contestant, repeat: int, before: list[Measured]) -> list[Measured] | str:
        contestant.environment.python()
        setting, begun = contestant.setting(self._files, self._threads, self._dtype), time.perf_counter()
        try:
            engine = contestant.start(setting)
        except PeerError as error:
            return str(error)
        try:
            ready = time.perf_counter() - begun
            told = measure(row, engine, self._tokenizer, repeat, self._quick)
            return [*before, Measured(ready + told.seconds, told.tokens, told.computed, told.passes, told.peak_bytes, None)]
        except (CannotError, PeerError) as error:
            return str(error)
        finally:
            self.about[contestant.name] = engine.about
            engine.close()


# ---- the table


def summary(row: Row, results: Mapping[str, list[Measured] | str]) -> dict[str, Any]:
    """The row's figures: medians for each engine, or why it has none, and each one's speed as a multiple of the best peer's."""
    engines: dict[str, Any] = {}
    for name, told in results.items():
        if isinstance(told, str) or not told:
            engines[name] = {"left_out": told or "not asked"}
            continue
        middle = sorted(told, key=lambda one: one.seconds)[len(told) // 2]
        value = statistics.median(one.tokens / one.seconds if row.unit == "tokens/s" else one.seconds for one in told)
        engines[name] = asdict(middle) | {"value": value, "all_seconds": [one.seconds for one in told]}
        engines[name]["peak_bytes"] = max(one.peak_bytes for one in told)
    faster = max if row.unit == "tokens/s" else min
    peers = [figures["value"] for name, figures in engines.items() if name != OURSELVES.name and "value" in figures]
    best = faster(peers) if peers else None
    for figures in engines.values():
        if "value" in figures and best is not None:
            figures["of_best_peer"] = figures["value"] / best if row.unit == "tokens/s" else best / figures["value"]
    return {"title": row.title, "unit": row.unit, "goal": row.goal, "engines": engines}


def markdown(figures: Mapping[str, Any]) -> str:
    """The table, one line a row and engine, with what was left out beneath it."""
    lines = [
        "| work | engine | result | times the best peer | tokens computed | forward passes | peak memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    without: list[str] = []
    for row in figures["rows"].values():
        title = row["title"]
        for name, told in row["engines"].items():
            if "left_out" in told:
                without.append(f"{row['title']}: {name} ({told['left_out']})")
                continue
            lines.append(_line(title, name, told, row))
            title = ""
    about = [f"- {name}: {what}" for name, what in figures["about"].items()]
    left_out = [f"- left out: {reason}" for reason in [*without, *figures["left_out"]]]
    return "\n".join([figures["machine"], "", *lines, "", *about, *left_out])


def _line(title: str, name: str, told: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    value = f"{told['value']:.0f} tokens/s" if row["unit"] == "tokens/s" else f"{told['value']:.2f} s"
    if told["note"]:
        value += f", {told['note']['right']} of {told['note']['of']} right"
    ratio = f"{told['of_best_peer']:.2f}" if "of_best_peer" in told else "?"
    if name == OURSELVES.name:
        value, ratio = f"**{value}**", f"**{ratio}** (goal {row['goal']:g})"
    counts = [f"{told[each]:,}" if told[each] is not None else "?" for each in ("computed", "passes")]
    return f"| {title} | {name} | {value} | {ratio} | {counts[0]} | {counts[1]} | {told['peak_bytes'] / 2**20:,.0f} MiB |"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = set(next((line.split() for line in lines if line.startswith("flags")), []))
    units = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if name in flags]
    return f"{model}, {os.cpu_count()} cores, {' '.join(units)}; seed {SEED}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small work, once")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, help="3 unless told otherwise; 1 with --quick")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="auto", help="arithmetic of agentrt")
    parser.add_argument("--json", type=Path, help="put the figures into this file, beside the rows that it has")
    parser.add_argument("--show", type=Path, help="show such a file, and measure nothing")
    return parser


def earlier_figures(file: Path | None, quick: bool) -> dict[str, Any]:
    """What the file has from earlier runs.

    Raises:
        PeerError: Its rows are of other work.
    """
    if file is None or not file.exists():
        return {"about": {}, "rows": {}}
    told = json.loads(file.read_text())
    if told["quick"] != quick:
        raise PeerError(f"{file} has rows {'with' if told['quick'] else 'without'} --quick, which are other work; give another file")
    return {"about": told["about"], "rows": told["rows"]}


def compare(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measures the rows that were asked for, and keeps each as soon as it is there."""
    contestants = [OURSELVES, *(PEERS[name] for name in args.peers)]
    chosen = [ROWS[name] for name in args.only]
    figures["left_out"] += [f"{row.title}: {missing(row)}" for row in chosen if missing(row)]
    chosen = [row for row in chosen if not missing(row)]
    for model in dict.fromkeys(row.model for row in chosen):
        comparison = Comparison(model, contestants, args)
        for row, results in comparison.run([row for row in chosen if row.model == model], args.repeats or (1 if args.quick else 3)):
            figures["rows"] |= {row.name: summary(row, results)}
            figures["rows"] = {name: figures["rows"][name] for name in ROWS if name in figures["rows"]}  # in the table's order
            figures["about"] |= comparison.about
            if args.json:
                args.json.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that engines that are frozen do not stay
    if args.show:
        figures = json.loads(args.show.read_text())
    else:
        figures = {"machine": f"{machine()}; {args.threads} threads", "quick": args.quick, "left_out": []}
        try:
            figures |= earlier_figures(args.json, args.quick)
        except PeerError as error:
            parser.error(str(error))
        compare(args, figures)
    Console(soft_wrap=True).print(markdown(figures), markup=False, highlight=False)


if __name__ == "__main__":
    main()
