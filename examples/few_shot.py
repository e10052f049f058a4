"""Few-shot questions over a batch: the examples are computed once, for all questions together."""

from __future__ import annotations

import agentrt

SHOTS = """Sort each message that a town library gets: opening, loan, event or complaint.

Message: At what time do you close on Friday?
Kind: opening

Message: I would like to keep this novel for two more weeks.
Kind: loan

Message: Is there a reading for children on Saturday?
Kind: event

Message: Somebody has torn the last page out of my favourite book.
Kind: complaint

"""
MESSAGES = [
    "Are you open on Sunday?",
    "Can I borrow three books at once?",
    "Who reads at the poetry evening?",
    "The heating in the reading room does not work again.",
    "May I renew my atlas?",
    "When do the doors open tomorrow?",
]


@agentrt.function
def sort_message(s, message: str):
    s += SHOTS
    s += f"Message: {message}\nKind:"
    s += agentrt.select("kind", [" opening", " loan", " event", " complaint"])
    return s["kind"].strip()


def main() -> None:
    states = sort_message.run_batch([{"message": message} for message in MESSAGES])
    prompt = reused = 0
    for message, state in zip(MESSAGES, states, strict=True):
        print(f"{state.ret_value:10} {message}")
        totals = state.report().values["totals"]
        prompt, reused = prompt + totals["prompt_tokens"], reused + totals["cached_tokens"]
    print(f"{reused} of {prompt} prompt tokens reused")


if __name__ == "__main__":
    main()
