"""The select step: scores every choice exactly and appends the best.

Each choice's own tokens, and only they, are scored by the model after the prompt's ids; the prompt is one shared prefix
of all these requests. It generates nothing. Invariant: the same scores pick the same choice, ties going to the first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrt.errors import RequestError, UserError
from agentrt.lang import ir
from agentrt.lang.run import check_complete
from agentrt.request import Completion, SamplingParams

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch
    from agentrt.lang.items import Item

Waits = Generator[Future[Any], Any, Any]


@dataclass(frozen=True, slots=True)
class Scored:
    """One choice: its text, its ids, the log-probability of each id after the prompt and, if needed, without it."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return sum(self.logprobs) / max(len(self.logprobs), 1)

    @property
    def gain(self) -> float:
        """By how much the prompt raises the choice's log-probability, per token."""
        return (sum(self.logprobs) - sum(self.unconditional)) / max(len(self.logprobs), 1)


def select_best(branch: Branch, item: Item) -> Waits:
    """Runs a select node."""
    node: ir.Select = item.node
    if not branch.run.backend.capabilities.logprobs:
        yield from _ask_for_one(branch, item)
        return
    ids, _ = branch.prompt()
    encode = branch.run.tokenizer.encode
    choices = [tuple(encode(choice)) for choice in node.choices]
    scored_ids = yield from _score(branch, item, [(ids + choice, len(ids)) for choice in choices])
    bare: list[tuple[float, ...]] = [()] * len(choices)
    if node.method == "unconditional_likelihood_normalized":
        bos = branch.run.tokenizer.bos_id
        start = () if bos is None else (bos,)
        bare = yield from _score(branch, item, [(start + choice, len(start)) for choice in choices])
    scored = [Scored(*parts) for parts in zip(node.choices, choices, scored_ids, bare, strict=True)]
    best = choose(scored, node.method, node.temperature, branch.seed(item))
    _append(branch, item, scored, best)


def _score(branch: Branch, item: Item, prompts: list[tuple[tuple[int, ...], int]]) -> Waits:
    """Scores each prompt from its place on; returns the log-probabilities, a tuple per prompt."""
    began = branch.run.clock()
    requests = []
    for ids, start in prompts:
        requests.append(branch.request(ids, _scoring_from(start), parts=len(prompts)))
    waiting = [branch.submit(request) for request in requests]
    found: list[tuple[float, ...]] = []
    known_ids = branch.known_ids
    for request, asking, (ids, start) in zip(requests, waiting, prompts, strict=True):
        completion: Completion = check_complete((yield asking))
        branch.known_ids = min(known_ids, start)
        branch.record(item, "select", request, completion.usage, began, "scored")
        known_ids = start  # the first of them has computed what they share
        found.append(_own(completion, ids, start))
    return found


@lru_cache(maxsize=256)
def _scoring_from(start: int) -> SamplingParams:
    """Parameters that generate nothing and score the prompt from a place on."""
    return SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start)


def _own(completion: Completion, ids: tuple[int, ...], start: int) -> tuple[float, ...]:
    scores = completion.prompt_logprobs
    if (
        scores is None
        or len(scores) != len(ids) - start
        or any(s.token_id != i for s, i in zip(scores, ids[start:], strict=True))
    ):
        raise RequestError(f"the backend gave no scores for the {len(ids) - start} tokens from place {start} on")
    return tuple(0.0 if score.logprob is None else score.logprob for score in scores)


def choose(scored: list[Scored], method: ir.ChoicesMethod, temperature: float, seed: int) -> int:
    """Returns the number of the best choice; above temperature 0 it is drawn by the scores, with the seed."""
    if method == "greedy_token_selection":
        return _greedy(scored)
    scores = [choice.gain if method == "unconditional_likelihood_normalized" else choice.mean for choice in scored]
    if temperature <= 0:
        return scores.index(max(scores))
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    return random.Random(seed).choices(range(len(scored)), weights)[0]


def _greedy(scored: list[Scored]) -> int:
    """Follows the likeliest next token among the choices; where some have ended, the one with the best mean is taken."""
    left = list(range(len(scored)))
    place = 0
    while len(left) > 1:
        going = [i for i in left if len(scored[i].ids) > place]
        if len(going) < len(left):  # a choice that ended is a whole answer; its rivals only begin with it
            break
        best = max(scored[i].logprobs[place] for i in going)
        token = next(scored[i].ids[place] for i in going if scored[i].logprobs[place] == best)
        left = [i for i in going if scored[i].ids[place] == token]
        place += 1
    return max(left, key=lambda i: (scored[i].mean, -i))


def _append(branch: Branch, item: Item, scored: list[Scored], best: int) -> None:
    choice = scored[best]
    branch.transcript.add_choice(choice.ids, choice.logprobs)
    branch.feed.push(choice.text)
    branch.known_ids = len(branch.transcript)
    variable = item.variable
    if variable is not None:
        variable.push(choice.text)
        variable.settle(choice.text, _meta(item.node.method, scored, best))


def _meta(method: ir.ChoicesMethod, scored: list[Scored], best: int) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "choice": best,
        "choices_method": method,
        "normalized_prompt_logprobs": [choice.mean for choice in scored],
        "input_token_logprobs": [[(p, i, None) for p, i in zip(c.logprobs, c.ids, strict=True)] for c in scored],
    }
    if method == "unconditional_likelihood_normalized":
        meta["normalized_unconditional_prompt_logprobs"] = [c.gain for c in scored]
        meta["unconditional_token_logprobs"] = [
            [(p, i, None) for p, i in zip(c.unconditional, c.ids, strict=True)] for c in scored
        ]
    return meta


def _ask_for_one(branch: Branch, item: Item) -> Waits:
    """For a backend without log-probabilities: constrained to the choices where it can, else the choice that the answer begins."""
    from agentrt.lang.generate import ask

    node: ir.Select = item.node
    constrained = "choices" in branch.run.backend.capabilities.grammars
    own: dict[str, Any] = (
        {"choices": list(node.choices)} if constrained else {"max_tokens": max(map(len, node.choices)) + 8}
    )
    sampling = branch.run.sampling.params(
        {**own, "temperature": node.temperature, "n": 1}, typed=constrained, seed=lambda: branch.seed(item)
    )
    completion: Completion = yield from ask(branch, item, sampling, None, kind="select")
    text = completion.text.strip()
    found = [choice for choice in node.choices if text.startswith(choice.strip()) and choice.strip()]
    if not found:
        raise UserError(
            f"this backend gives no log-probabilities, and the model answered {text[:60]!r}, which begins with none of {list(node.choices)}",
            param="choices",
        )
    choice = max(found, key=len)
    branch.feed.push(choice)
    if item.variable is not None:
        item.variable.push(choice)
        item.variable.settle(choice, {"choice": node.choices.index(choice), "choices_method": "asked"})
