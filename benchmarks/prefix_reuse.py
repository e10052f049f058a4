"""What reuse is worth on the default model: first token cold against cached, few-shot prompts, tokens/s beside transformers.

    python benchmarks/prefix_reuse.py [--quick] [--out prefix_reuse.json]

Everything is measured in one run, in turns, so that the ratios hold on a noisy machine; absolute figures are this machine's.
The few-shot questions are GSM8K's where a folder of corpora is at hand (AGENTRT_CORPORA), else ones that this script makes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentrt
from agentrt import Engine, SamplingParams
from agentrt.hub import resolve_model

SEED = 7


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    started = time.perf_counter()
    deltas = engine.stream(prompt, SamplingParams(max_tokens=1, temperature=0))
    next(deltas)
    seconds = time.perf_counter() - started
    list(deltas)
    return seconds


def cold_and_cached(engine: Engine, repeats: int) -> dict[str, float]:
    """First token of a 2,048-token prefix and a 16-token question, without and with the prefix in the tree."""
    rng = random.Random(SEED)
    cold, cached = [], []
    for _ in range(repeats):
        prefix = [rng.randrange(1000, 40_000) for _ in range(2048)]
        cold.append(first_token_seconds(engine, [*prefix, *(rng.randrange(1000, 40_000) for _ in range(16))]))
        cached.append(first_token_seconds(engine, [*prefix, *(rng.randrange(1000, 40_000) for _ in range(16))]))
        engine.flush_cache()
    pairs = [a / b for a, b in zip(cold, cached, strict=True)]
    return {"cold_s": statistics.median(cold), "cached_s": statistics.median(cached), "ratio": statistics.median(pairs)}


def few_shot_prompts(count: int) -> list[str]:
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    shots, questions = _gsm8k(folder) if (folder / "gsm8k_fewshot_16.jsonl").exists() else _made_up()
    head = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in shots[:5])
    return [f"{head}Question: {question}\nAnswer:" for question in questions[:count]]


def _gsm8k(folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    return [(s["question"], s["answer"]) for s in lines("gsm8k_fewshot_16.jsonl")], [q["question"] for q in lines("gsm8k_test_400.jsonl")]


def _made_up() -> tuple[list[tuple[str, str]], list[str]]:
    rng = random.Random(SEED)

    def problem() -> tuple[str, str]:
        boxes, apples, eaten = rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 5)
        question = (
            f"A shop has {boxes} boxes of apples, with {apples} apples in each box. Over the day the people who work there eat "
            f"{eaten} of the apples and sell none. How many apples are left in the shop in the evening?"
        )
        total = boxes * apples
        return question, f"There are {boxes} times {apples} = {total} apples. After {eaten} are eaten, {total - eaten} are left. #### {total - eaten}"

    return [problem() for _ in range(8)], [problem()[0] for _ in range(400)]


def few_shot(engine: Engine, questions: int, tokens: int) -> dict[str, float]:
    engine.flush_cache()
    before = engine.stats()
    started = time.perf_counter()
    completions = engine.generate(few_shot_prompts(questions), SamplingParams(max_tokens=tokens, temperature=0, stop="\n\nQuestion:"))
    seconds = time.perf_counter() - started
    prompt = sum(c.usage.prompt_tokens for c in completions)
    cached = sum(c.usage.cached_tokens for c in completions)
    computed = engine.stats()["computed_tokens"] - before["computed_tokens"]
    return {"questions": questions, "prompt_tokens": prompt, "cached_share": cached / prompt, "computed_tokens": computed, "seconds": seconds}


def throughput(engine: Engine, at_once: int, tokens: int) -> float:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(64)] for _ in range(at_once)]
    engine.flush_cache()
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    return at_once * tokens / (time.perf_counter() - started)


class Reference:
    """transformers.generate on the same weights, in the same dtype, with the same threads."""

    def __init__(self, threads: int) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        folder = resolve_model().folder
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config)
        self._model = self._model.to_empty(device="cpu").eval()
        self._load({k: v for k, v in load_file(folder / "model.safetensors").items()}, config)

    def _load(self, weights: dict[str, Any], config: Any) -> None:
        """Splits our converted file's fused tensors."""
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        split = {}
        for name, tensor in weights.items():
            if "qkv_proj" in name:
                for part, rows in zip("qkv", tensor.split([heads * dim, kv * dim, kv * dim]), strict=True):
                    split[name.replace("qkv_proj", f"{part}_proj")] = rows
            elif "gate_up_proj" in name:
                for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    split[name.replace("gate_up_proj", f"{part}_proj")] = rows
            else:
                split[name] = tensor
        split.setdefault("lm_head.weight", split["model.embed_tokens.weight"])
        self._model.load_state_dict(split, strict=False)
        self._model.tie_weights()
        rotary = self._model.model.rotary_emb  # not in the file: made anew, since the model began without memory
        self._model.model.rotary_emb = type(rotary)(config=config)

    def throughput(self, at_once: int, tokens: int) -> float:
        torch = self._torch
        rng = random.Random(SEED)
        ids = torch.tensor([[rng.randrange(1000, 40_000) for _ in range(64)] for _ in range(at_once)])
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return at_once * tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and tokens")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    repeats, tokens, questions = (2, 16, 8) if args.quick else (5, 64, 32)
    out = Console()
    with Engine(dtype="float32") as engine:
        figures: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "engine": f"agentrt {agentrt.__version__}, {engine.capabilities.model}, {engine.facts.dtype}, {engine.facts.threads} threads",
            "seed": SEED,
            "first_token": cold_and_cached(engine, repeats),
            "few_shot": few_shot(engine, questions, tokens),
        }
        reference = Reference(engine.facts.threads)
        rates: dict[int, list[tuple[float, float]]] = {1: [], 8: [], 32: []}
        for _ in range(max(repeats // 2, 1)):
            for at_once, pairs in rates.items():
                pairs.append((throughput(engine, at_once, tokens), reference.throughput(at_once, tokens)))
        figures["tokens_per_s"] = {
            at_once: {
                "agentrt": statistics.median(a for a, _ in pairs),
                "transformers": statistics.median(b for _, b in pairs),
                "ratio": statistics.median(a / b for a, b in pairs),
            }
            for at_once, pairs in rates.items()
        }
    show(out, figures)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


def show(out: Console, figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['engine']}\n{figures['machine']}, seed {figures['seed']}", title_justify="left", box=None, pad_edge=False)
    for column in ("what", "value", "beside", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    first, shots = figures["first_token"], figures["few_shot"]
    table.add_row("first token after 2,064 prompt tokens, cold / cached", f"{first['cold_s']:.3f} s", f"{first['cached_s']:.3f} s", f"{first['ratio']:.1f}")
    table.add_row(
        f"{shots['questions']} few-shot questions at once: share of prompt tokens from the cache", f"{shots['cached_share']:.1%}", f"{shots['seconds']:.1f} s", ""
    )
    for at_once, rate in figures["tokens_per_s"].items():
        table.add_row(
            f"output tokens/s, {at_once} at once, beside transformers.generate", f"{rate['agentrt']:.1f}", f"{rate['transformers']:.1f}", f"{rate['ratio']:.2f}"
        )
    out.print(table, highlight=False)


if __name__ == "__main__":
    main()
