"""Parallel tool calls, of which one waits for approval: the program goes to disk meanwhile, and goes on from there.

    python examples/approval.py             # both halves, one after the other
    python examples/approval.py ask         # asks, and ends with the program on disk
    python examples/approval.py approve     # in another process, days later; or: deny
"""

from __future__ import annotations

import sys
from pathlib import Path

import agentrt

SAVED = Path("order.json")


@agentrt.tool
def check_stock(item: str) -> str:
    """Says how many pieces of an item are in stock."""
    return f"2 {item} left in stock"


@agentrt.tool(approve=True)
def order(item: str, pieces: int) -> str:
    """Orders pieces of an item from the supplier. Costs money."""
    return f"{pieces} {item} ordered, to arrive on Friday"


TOOLS = [check_stock, order]


@agentrt.function
def restock(s, request: str):
    s += agentrt.system("You run a shop. Make all the calls that are asked for at once, then say what came of them.")
    s += agentrt.user(request)
    s += agentrt.tool_call("calls", TOOLS, choice="required", max_tokens=100)


def ask(saved: Path) -> None:
    """Runs until a call waits for approval, and saves the program."""
    state = restock.run("Check the stock of lanterns, and order 12 lanterns.", temperature=0, stream=True)
    for call in state.wait_for_approval():
        print(f"waits for approval: {call.name}({call.arguments})")
    state.save(saved)
    state.cancel()
    print(f"saved in {saved.stat().st_size} bytes")


def decide(saved: Path, approved: bool) -> agentrt.State:
    """Loads the program, decides, and lets it go on: the body is not saved, so what follows is written here."""
    state = agentrt.resume(saved, tools=TOOLS)
    while state.wait_for_approval():
        (state.approve if approved else state.deny)()
    for call in state["calls"]:
        print(f"{call.name}: {call.text()}")
    state += agentrt.user("What came of it? Answer in one sentence.")
    state += agentrt.assistant(agentrt.gen("answer", max_tokens=40))
    print(state["answer"])
    print(state.report())
    return state


def main(arguments: list[str]) -> None:
    agentrt.set_default_backend(agentrt.Engine("qwen2.5-coder-0.5b"))
    if not arguments or arguments[0] == "ask":
        ask(SAVED)
    if not arguments or arguments[0] in ("approve", "deny"):
        decide(SAVED, approved=arguments[:1] != ["deny"])
        SAVED.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
