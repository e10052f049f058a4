"""An LLM judge with six branches: one text, read once, is marked for six things at the same time."""

from __future__ import annotations

import math

import agentrt

ESSAY = """The lighthouse is the oldest building of our town. It was built when ships still carried salt, and its keeper climbed two
hundred steps each evening to light the lamp. Today the lamp is electric, but the steps are the same, and on Sundays anyone
may climb them. From the top you see the whole bay, the ferry, and on clear days the mountains of the other shore. I think
that every visitor should go up once, for the view and for the quiet, and should thank the keeper on the way down."""

DIMENSIONS = {
    "clarity": "Is the text easy to follow?",
    "interest": "Does the text hold the reader's attention?",
    "grammar": "Is the text's grammar correct?",
    "detail": "Does the text give concrete details?",
    "structure": "Do the sentences follow each other in a good order?",
    "argument": "Does the text support its conclusion?",
}
MARKS = ["1", "2", "3", "4", "5"]


def mean_mark(branch: agentrt.State) -> float:
    """The mean of the marks, each weighted by how likely the model thought it: finer than the likeliest mark alone."""
    weights = [math.exp(score) for score in branch.get_meta_info("mark")["normalized_prompt_logprobs"]]
    return round(sum(int(mark) * weight for mark, weight in zip(MARKS, weights, strict=True)) / sum(weights), 2)


@agentrt.function
def judge(s, essay: str):
    s += agentrt.system("You are a strict but fair judge of essays. You give marks from 1 (bad) to 5 (excellent).")
    s += agentrt.user(essay)
    s += agentrt.assistant("I have read the essay. What shall I mark?")
    branches = s.fork(len(DIMENSIONS))
    for branch, question in zip(branches, DIMENSIONS.values(), strict=True):
        branch += agentrt.user(f"{question} Give a mark from 1 to 5.")
        branch += agentrt.assistant(["Mark: ", agentrt.select("mark", MARKS)])
    return dict(zip(DIMENSIONS, map(mean_mark, branches), strict=True))


def main() -> None:
    state = judge.run(ESSAY)
    for dimension, mark in state.ret_value.items():
        print(f"{dimension:10} {mark:.2f}")
    print(state.report())


if __name__ == "__main__":
    main()
