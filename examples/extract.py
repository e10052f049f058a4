"""Documents into pydantic models, streamed: the fields appear as they are written, and the end is a validated value."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

import agentrt

DOCUMENTS = [
    "Invoice 1187 from Holm & Daughters, for two bicycle tyres. Total: 48 euros, to be paid in 30 days.",
    "Receipt 52. Lindqvist's bakery: three rye loaves. Total: 12 euros, paid in cash. Thank you!",
]


class Paper(BaseModel, extra="forbid"):
    kind: Literal["invoice", "receipt"]
    number: int = Field(ge=0, le=99999)
    seller: str = Field(max_length=40)
    total_euros: int = Field(ge=0, le=9999)


@agentrt.function
def extract(s, document: str):
    s += agentrt.system("Read the paper and write down its kind, number, seller and total as JSON.")
    s += agentrt.user(document)
    s += agentrt.assistant(agentrt.gen("paper", type=Paper, temperature=0))


def main() -> None:
    for document in DOCUMENTS:
        print(f"> {document}")
        state = extract.run(document, stream=True)
        for partial in state.partial_iter("paper"):
            print("  ...", partial, flush=True)
        print("  ", repr(state["paper"]))
        print(f"   ({state.report()})")


if __name__ == "__main__":
    agentrt.set_default_backend(agentrt.Engine("qwen2.5-coder-0.5b"))
    main()
