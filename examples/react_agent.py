"""A ReAct agent with real tools: a calculator, a folder of notes, an SQLite database, and an MCP server as a subprocess.

python examples/react_agent.py            # all 20 questions at once, and the score
python examples/react_agent.py --live 3   # three of them one after another, as they come
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import mcp
from pydantic import BaseModel
from react.tools import calculator, query_database, search_notes

import agentrt

HOME = Path(__file__).parent / "react"
MODEL = "qwen2.5-coder-0.5b"
QUESTIONS = json.loads((HOME / "questions.json").read_text())

INSTRUCTIONS = """You answer questions about a small town. First call one tool, as in these examples:
"Who is the baker of the town?" -> search_notes, query "baker of the town"
"How old is the clock tower?" -> search_notes, query "clock tower old"
"Who wrote the book 'Red Snow'?" -> query_database, sql "SELECT author FROM books WHERE title = 'Red Snow'"
"How many books did Kim Bo write?" -> query_database, sql "SELECT COUNT(*) FROM books WHERE author = 'Kim Bo'"
"How many copies are there in total?" -> query_database, sql "SELECT SUM(copies) FROM books"
"What is (3 + 4) * 12?" -> calculator, expression "(3 + 4) * 12"
"How many km are 3 miles?" -> convert_units, value 3, from_unit "mile", to_unit "km"
Then write the number or name from the tool's result as the answer."""


class Answer(BaseModel):
    answer: int | float | str


@agentrt.function
def react(s, question: str, tools: list, on_event=None):
    s += agentrt.system(INSTRUCTIONS)
    s += agentrt.user(question)
    s += agentrt.agent_loop(
        "answer",
        tools,
        max_steps=4,
        choice="required",
        parallel=False,
        output_type=Answer,
        max_tokens=80,
        on_event=on_event,
    )
    return s["answer"].answer


@asynccontextmanager
async def all_tools() -> AsyncIterator[list]:
    """The three tools above, and those of the MCP server, which runs as long as the block does."""
    server = mcp.StdioServerParameters(command=sys.executable, args=[str(HOME / "mcp_server.py")])
    async with mcp.Client(server) as client:
        loop = asyncio.get_running_loop()
        yield [calculator, search_notes, query_database, *agentrt.mcp_tools(client, await client.list_tools(), loop)]


def show(event: agentrt.AgentEvent) -> None:
    match event.kind:
        case "call":
            print(f"  {event.call.name}({json.dumps(event.call.arguments)})", flush=True)
        case "result":
            print(f"  = {event.call.text()}", flush=True)
        case "answer":
            print(f"  {event.text}", flush=True)


def right(item: dict, answer: object) -> bool:
    return any(
        re.search(rf"(?<![\w.]){re.escape(known)}(?!\w)", str(answer), re.IGNORECASE) for known in item["answers"]
    )


async def live(questions: list[dict], **options) -> list[agentrt.State]:
    """One question after another, each step as it comes."""
    states = []
    async with all_tools() as tools:
        for item in questions:
            print(f"> {item['question']}", flush=True)
            states.append(await react.arun(item["question"], tools, show, temperature=0, **options))
    return states


async def score(questions: list[dict]) -> int:
    """All questions at once; how many answers are right."""
    async with all_tools() as tools:
        asked = [{"question": item["question"], "tools": tools} for item in questions]
        states = await asyncio.to_thread(react.run_batch, asked, temperature=0, return_exceptions=True)
    answers = [str(state) if isinstance(state, Exception) else state.ret_value for state in states]
    for item, answer in zip(questions, answers, strict=True):
        print("right" if right(item, answer) else "WRONG", "|", item["question"], "|", answer)
    count = sum(map(right, questions, answers))
    print(f"{count} of {len(questions)} right")
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=0, help="so many questions, one after another")
    count = parser.parse_args().live
    agentrt.set_default_backend(agentrt.Engine(MODEL))
    asyncio.run(live(QUESTIONS[4 :: len(QUESTIONS) // count][:count]) if count else score(QUESTIONS))
