"""A chat of many turns: each turn finds everything before it, its own answers included, in the cache."""

from __future__ import annotations

import agentrt

TURNS = ["Name one animal that makes honey.", "And one that eats it?", "Which of the two is bigger?"]


@agentrt.function
def chat(s, turns: list[str], max_tokens: int = 40):
    s += agentrt.system("You are a friendly guide. Answer in one short sentence.")
    for number, turn in enumerate(turns):
        s += agentrt.user(turn)
        s += agentrt.assistant(agentrt.gen(f"answer{number}", max_tokens=max_tokens))


def main() -> None:
    state = chat.run(TURNS, temperature=0, stream=True)
    for number, turn in enumerate(TURNS):
        print(f"> {turn}")
        for piece in state.text_iter(f"answer{number}"):
            print(piece, end="", flush=True)
        usage = state.get_meta_info(f"answer{number}")
        print(f"\n  ({usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them reused)")


if __name__ == "__main__":
    main()
