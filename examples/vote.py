"""A vote with an early stop: many branches answer, and once two agree the others are cancelled."""

from __future__ import annotations

from collections import Counter

import agentrt

QUESTION = "Is a whale a fish or a mammal? Explain in one short sentence, then decide."


@agentrt.function
def vote(s, question: str, voters: int = 6, enough: int = 2, max_tokens: int = 24):
    s += agentrt.system("You know a lot about nature, and answer briefly.")
    s += agentrt.user(question)
    branches = s.fork(voters)
    for branch in branches:
        branch += agentrt.assistant(
            [
                agentrt.gen("reason", max_tokens=max_tokens, stop="\n"),
                "\nSo it is a ",
                agentrt.select("verdict", ["fish", "mammal"]),
            ]
        )
    votes: Counter[str] = Counter()

    def agreed(branch: agentrt.State) -> bool:
        votes[branch["verdict"]] += 1
        return votes.most_common(1)[0][1] >= enough

    branches.first(1, where=agreed)
    return votes


def main() -> None:
    state = vote.run(QUESTION, seed=3, temperature=0.8)
    votes = state.ret_value
    winner, count = votes.most_common(1)[0]
    print(f"{winner}: {count} of {votes.total()} votes counted, 6 asked; the rest were cancelled")
    print(state.report())


if __name__ == "__main__":
    main()
