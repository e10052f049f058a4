"""What a dtype costs in quality: perplexity on a text of our own, and how often the answers are those of float32.

For each model and dtype, one engine after the other:

- perplexity on `texts/quality.txt`, 1,000-odd tokens of prose and a little code;
- agreement: the share of positions, in that text and in float32's own greedy answers, at which the likeliest token is
  float32's;
- greedy answers: the share of answers that are float32's to the end, and how many tokens pass before the first difference.

A token at which float32's two best are nearly tied falls either way under any rounding, so greedy answers differ
sooner or later under every dtype; agreement is the fairer figure.

    python benchmarks/quality.py [--models smollm2-135m qwen2.5-coder-0.5b] [--dtypes int8 int4] [--out quality.json]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from agentrt import Engine, SamplingParams

TEXT = Path(__file__).parent / "texts" / "quality.txt"
TOKENS = 48
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about a lighthouse in fog.",
    "What is the capital of Norway, and what is it known for?",
    "Explain to a child what a prime number is.",
    "A train travels 180 km in 2 hours. How fast is it, and how long does it take for 450 km?",
    "Write a Python function that counts the vowels in a string.",
    "Name three differences between a frog and a toad.",
    "Give me a recipe for pancakes for two people.",
    "What happens when water freezes?",
    "Translate into French: The library closes at six o'clock.",
    "How do I reverse a list in Python without changing it?",
    "Summarise in one sentence: The ferry was late because of the storm, so we missed the train and walked.",
    "What should I pack for a week of hiking in the mountains?",
    "Who wrote Hamlet, and what is it about?",
    "Write an SQL query for the five customers with the most orders.",
    "Why do we have leap years?",
    "Tell me a joke about a baker.",
    "What is the difference between a stack and a queue?",
    "List the planets from the sun outwards.",
    "Write a polite letter that declines an invitation.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b"])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--out", type=Path, default=Path("quality.json"))
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}; {len(QUESTIONS)} questions, {TOKENS} tokens each")
    print(f"{'model':20}{'dtype':10}{'perplexity':>11}{'agreement':>11}{'same answers':>14}{'tokens to the first difference (median)':>41}")
    report: dict[str, Any] = {}
    for model in options.models:
        base = Measured(model, "float32", None)
        for dtype in ("float32", *options.dtypes):
            measured = base if dtype == "float32" else Measured(model, dtype, base)
            row = measured.against(base)
            report[f"{model}, {dtype}"] = row
            print(
                f"{model:20}{dtype:10}{row['perplexity']:11.3f}{row['agreement']:11.1%}{row['same_answers']:14.0%}{row['tokens_alike']:41.0f}",
                flush=True,
            )
    options.out.write_text(json.dumps(report, indent=2) + "\n")


class Measured:
    """What one engine says: the likeliest token everywhere, log-probabilities of the text, greedy answers."""

    def __init__(self, model: str, dtype: str, base: Measured | None) -> None:
        """Runs the engine; `base` holds the answers to follow, its own if None."""
        with Engine(model, dtype=dtype, process=False, prefix_cache=False) as engine:
            self.prompts = [engine.request([{"role": "user", "content": question}]).prompt_ids for question in QUESTIONS]
            greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            self.answers = [tuple(done.samples[0].token_ids) for done in engine.generate([list(ids) for ids in self.prompts], greedy)]
            followed = self.answers if base is None else base.answers
            text = engine.tokenize(TEXT.read_text(encoding="utf-8"))
            self.likeliest: list[int] = []
            losses = self._follow(engine, text, 0)
            for prompt, answer in zip(self.prompts, followed, strict=True):
                self._follow(engine, [*prompt, *answer], len(prompt))
        self.perplexity = math.exp(-statistics.fmean(losses))

    def against(self, base: Measured) -> dict[str, float]:
        """The figures, beside float32's."""
        agreed = [mine == theirs for mine, theirs in zip(self.likeliest, base.likeliest, strict=True)]
        alike = [_common(mine, theirs) for mine, theirs in zip(self.answers, base.answers, strict=True)]
        return {
            "perplexity": self.perplexity,
            "agreement": statistics.fmean(agreed),
            "same_answers": statistics.fmean(mine == theirs for mine, theirs in zip(self.answers, base.answers, strict=True)),
            "tokens_alike": statistics.median(alike),
        }

    def _follow(self, engine: Engine, ids: list[int], start: int) -> list[float]:
        """Notes the likeliest token at each place from `start` on; returns the given tokens' log-probabilities."""
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)
        scores = [token for token in engine.generate(ids, sampling).prompt_logprobs or () if token.logprob is not None]
        self.likeliest += [token.top[0][0] for token in scores]
        return [token.logprob for token in scores if token.logprob is not None]


def _common(mine: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


if __name__ == "__main__":
    main()
