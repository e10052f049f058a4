"""An LLM judge with six branches: one text, read once, is marked for six things at the same time."""

from __future__ import annotations

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
MARKS = ["poor", "fair", "good", "excellent"]


@agentrt.function
def judge(s, essay: str):
    s += agentrt.system(
        "You are a strict but fair judge of essays. You call each quality poor, fair, good or excellent."
    )
    s += agentrt.user(essay)
    s += agentrt.assistant("I have read the essay. What shall I mark?")
    branches = s.fork(len(DIMENSIONS))
    for branch, question in zip(branches, DIMENSIONS.values(), strict=True):
        branch += agentrt.user(f"{question} Is this poor, fair, good or excellent?")
        branch += agentrt.assistant(
            ["This is ", agentrt.select("mark", MARKS, choices_method="unconditional_likelihood_normalized")]
        )
    branches.join()
    return dict(zip(DIMENSIONS, s["mark"], strict=True))


def main() -> None:
    state = judge.run(ESSAY)
    for dimension, mark in state.ret_value.items():
        print(f"{dimension:10} {mark}")
    print(state.report())


if __name__ == "__main__":
    main()
