"""What `compare.py` measures: each row a piece of work that asks for answers and gets them, the same for every engine.

A row is a generator of asks. Each repeat draws other prompts (seeded, the same for all engines), so that no engine's cache holds what a
repeat calls cold. Prompts are token ids; between the turns of a chat the ids of the answer go back as they were.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from driver import Ask, Told

from agentrt.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prefix_reuse import few_shot_prompts
from tool_accuracy import corpus, right_calls

SMALL, LARGER = "smollm2-135m", "qwen2.5-coder-0.5b"
SEED = 7


@dataclass
class Part:
    """One ask of a row, whether it counts, and, once it is answered, what was told."""

    ask: Ask
    counts: bool = True
    texts: list[str] = field(default_factory=list)
    told: Told | None = None


Work = Generator[Part, Told, dict[str, Any] | None]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: What ``--only`` calls it.
        title: What the table says.
        model: Short name.
        unit: "tokens/s" or "s".
        goal: How many times as fast as the best peer we want to be.
        work: Makes the work of a repeat; what it returns stands in the table as a note.
        fresh: Each repeat is a new process, whose start counts.
    """

    name: str
    title: str
    model: str
    unit: str
    goal: float
    work: Callable[[Tokenizer, int, bool], Work]
    fresh: bool = False


def ask(tokenizer: Tokenizer, prompts: list[list[int]], max_tokens: int, schemas: list[dict[str, Any]] | None = None) -> Ask:
    return Ask(prompts, [tokenizer.decode(ids, skip_special=False) for ids in prompts], max_tokens, schemas)


@cache
def questions() -> list[str]:
    """GSM8K's questions, each with 5 worked ones before it; made-up ones where there are no corpora."""
    return few_shot_prompts(400)


def own_question(number: int) -> str:
    return questions()[number % len(questions())].rpartition("Question: ")[2].removesuffix("\nAnswer:")


def at_once(count: int) -> Callable[[Tokenizer, int, bool], Work]:
    def work(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
        first = repeat * count
        chats = [[{"role": "user", "content": own_question(first + number)}] for number in range(count)]
        yield Part(ask(tokenizer, [tokenizer.encode_chat(chat) for chat in chats], 16 if quick else 64))
        return None

    return work


def long_prompt(tokenizer: Tokenizer, repeat: int) -> list[int]:
    ids = tokenizer.encode(f"Problems, set {repeat}.\n\n" + "\n\n".join(own_question(40 * repeat + number) for number in range(40)))
    return ids[:1990]


def cold(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    yield Part(ask(tokenizer, [long_prompt(tokenizer, repeat) + tokenizer.encode("\n\nThe first answer is")], 1))
    return None


def cached(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    prompt = long_prompt(tokenizer, 100 + repeat)
    yield Part(ask(tokenizer, [prompt + tokenizer.encode("\n\nThe first answer is")], 1), counts=False)
    yield Part(ask(tokenizer, [prompt + tokenizer.encode("\n\nThe second answer is")], 1))
    return None


def few_shot(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    count = 8 if quick else 32
    chosen = [f"Set {repeat}.\n\n{questions()[(repeat * count + number) % len(questions())]}" for number in range(count)]
    yield Part(ask(tokenizer, [tokenizer.encode(question) for question in chosen], 16 if quick else 64))
    return None


def chats(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    count, turns, tokens = (4, 2, 16) if quick else (8, 4, 48)
    system = {"role": "system", "content": f"You are tutor {repeat}, patient and brief. You explain one step at a time."}

    def begun(number: int) -> list[int]:
        return tokenizer.encode_chat([system, {"role": "user", "content": own_question(10 * repeat + number)}])

    prompts = [begun(number) for number in range(count)]
    for turn in range(turns):
        told = yield Part(ask(tokenizer, prompts, tokens))
        said = told.answers or [tokenizer.encode(text) for text in told.texts or ()]
        follow = ("And what is the next step?", "Why is that so?", "Check it another way.")[turn % 3]
        between = tokenizer.encode(f"<|im_end|>\n<|im_start|>user\n{follow}<|im_end|>\n<|im_start|>assistant\n", special=True)
        prompts = [prompt + answer + between for prompt, answer in zip(prompts, said, strict=True)]
    return None


def branches(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    count, tokens = (8, 16) if quick else (16, 40)
    trunk = tokenizer.encode(f"Thoughts, set {repeat}.\n\n" + "\n\n".join(own_question(20 * repeat + number) for number in range(20)))[:600]
    yield Part(ask(tokenizer, [trunk + tokenizer.encode(f"\n\nApproach {number + 1}:") for number in range(count)], tokens))
    return None


def closed(schema: Any) -> Any:
    """A schema whose objects take no other properties than those it names: some engines read every schema so, which would make theirs the smaller work."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        shut["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        shut.setdefault("additionalProperties", False)
    return shut


def call_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """One call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": closed(tool["function"]["parameters"])},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def tool_calls(every: int, count: int, count_quick: int, tokens: int) -> Callable[[Tokenizer, int, bool], Work]:
    """Calls for requests that want exactly one; each repeat begins elsewhere among them, unless it takes them all."""

    def work(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
        wanting_one = [row for row in corpus(None, "all") if len(row["answers"]) == 1][::every]
        first = repeat * count if count < len(wanting_one) else 0
        rows = [wanting_one[(first + number) % len(wanting_one)] for number in range(count_quick if quick else count)]
        salt = [{"role": "system", "content": f"You call tools. Session {repeat}."}] if repeat else []  # so that none finds another's prompts
        prompts = [tokenizer.encode_chat([*salt, *row["messages"]], tools=row["tools"]) for row in rows]
        told = yield Part(ask(tokenizer, prompts, tokens, [call_schema(row["tools"]) for row in rows]))
        texts = told.texts or [tokenizer.decode(ids) for ids in told.answers or ()]
        right = sum(_is_right(text, row["answers"]) for text, row in zip(texts, rows, strict=True))
        return {"right": right, "of": len(rows)}

    return work


def _is_right(text: str, answers: list[dict[str, Any]]) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    return isinstance(call, dict) and right_calls([call], answers)


def first_token(tokenizer: Tokenizer, repeat: int, quick: bool) -> Work:
    yield Part(ask(tokenizer, [tokenizer.encode(f"Once upon a time, {random.Random(repeat).randrange(1000)} years ago,")], 1))
    return None


ROWS = {
    row.name: row
    for row in (
        Row("one", "1 at once, 64 tokens", SMALL, "tokens/s", 2, at_once(1)),
        Row("eight", "8 at once, 64 tokens", SMALL, "tokens/s", 2, at_once(8)),
        Row("thirty-two", "32 at once, 64 tokens", SMALL, "tokens/s", 2, at_once(32)),
        Row("cold", "2,000-token prompt, cold", SMALL, "s", 2, cold),
        Row("cached", "2,000-token prompt, cached", SMALL, "s", 2, cached),
        Row("few-shot", "5-shot GSM8K, 32 questions", SMALL, "s", 3, few_shot),
        Row("chats", "8 chats of 4 turns", SMALL, "s", 3, chats),
        Row("branches", "16 branches of one 600-token prompt", SMALL, "s", 3, branches),
        Row("tools", "32 tool calls under schemas", SMALL, "s", 3, tool_calls(1, 32, 8, 96)),
        Row("start", "start to first token", SMALL, "s", 2, first_token, fresh=True),
        Row("tools-larger", f"87 tool calls, {LARGER}", LARGER, "s", 3, tool_calls(3, 87, 12, 200)),
    )
}

#: Rows whose prompts come from a corpus that may be absent.
NEEDS = {"tools": "bfcl_tools.jsonl", "tools-larger": "bfcl_tools.jsonl"}


def missing(row: Row) -> str | None:
    """Which corpus a row lacks, or None."""
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    file = NEEDS.get(row.name)
    return f"no {file} in the folder that AGENTRT_CORPORA names" if file and not (folder / file).exists() else None
