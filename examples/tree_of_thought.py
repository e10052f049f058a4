"""Tree of thought: from the best nodes of each level grow several next steps, each is valued, and the best go on."""

from __future__ import annotations

import agentrt

TASK = "A farmer must bring a wolf, a goat and a cabbage over a river. The boat holds him and one of them. What does he do?"


def _grow(node: agentrt.State, step: int, width: int, max_tokens: int) -> list[agentrt.State]:
    """Children of a node: a step each, and how promising it is, as the log-probability of a yes."""
    children = node.fork(width)
    for child in children:
        child += agentrt.user(f"Say step {step} in one short sentence.")
        child += agentrt.assistant(agentrt.gen(f"step{step}", max_tokens=max_tokens, stop=[".", "\n"]))
        judge = child.copy()  # asks on a branch of its own, so that the question does not stay in the text
        judge += agentrt.user("Is this a good step? Answer yes or no.")
        judge += agentrt.assistant(agentrt.select("good", ["yes", "no"]))
        child["judge"] = judge
    return list(children)


def _value(child: agentrt.State) -> float:
    scores = child["judge"].get_meta_info("good")["normalized_prompt_logprobs"]
    return scores[0] - scores[1]


@agentrt.function
def tree_of_thought(s, task: str, depth: int = 2, width: int = 3, keep: int = 1, max_tokens: int = 20):
    s += agentrt.system("You solve puzzles step by step.")
    s += agentrt.user(task)
    s += agentrt.assistant("I will go step by step.")
    best, nodes = [s], 0
    for step in range(1, depth + 1):
        grown = [child for node in best for child in _grow(node, step, width, max_tokens)]
        nodes += len(grown)
        best = sorted(grown, key=_value, reverse=True)[:keep]
    return nodes, [best[0][f"step{step}"].strip() for step in range(1, depth + 1)]


def main() -> None:
    state = tree_of_thought.run(TASK, seed=1, temperature=0.8)
    nodes, steps = state.ret_value
    print(f"{nodes} thoughts, and the best line of them:")
    for number, step in enumerate(steps, 1):
        print(f"  {number}. {step}")
    print(state.report())


if __name__ == "__main__":
    main()
