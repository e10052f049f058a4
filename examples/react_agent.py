"""A ReAct agent with real tools: a calculator, a folder of notes, an SQLite database, and an MCP server as a subprocess.

python examples/react_agent.py            # all 20 questions at once, and the score
python examples/react_agent.py --live 3   # three of them one after another, as they come
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import operator
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import mcp
from pydantic import BaseModel

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

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
BOOKS = [
    ("Winter Harbour", "Ada Moreau", 1931, 2), ("The Glass Orchard", "Ada Moreau", 1938, 5), ("The Salt Road", "Ivo Petrov", 1958, 4),
    ("A Map of Rain", "Ivo Petrov", 1963, 1), ("Nine Lanterns", "Ivo Petrov", 1970, 3), ("Bread and Bells", "Tove Dahl", 1985, 6),
    ("The Quiet Ferry", "Tove Dahl", 1992, 2), ("Stone Weather", "Lin Osei", 2004, 5),
]  # fmt: skip


class Answer(BaseModel):
    answer: int | float | str


@agentrt.tool
def calculator(expression: str) -> float:
    """Computes an arithmetic expression of numbers.

    Args:
        expression: Numbers, operators and all the brackets of the question.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, ast.Pow(), right) if abs(value(right)) <= 64:
                return value(left) ** value(right)
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(operand))
        raise agentrt.ToolRetry("only numbers, + - * / ** and brackets are understood")

    try:
        return value(ast.parse(expression.replace("^", "**"), mode="eval").body)
    except SyntaxError as error:
        raise agentrt.ToolRetry(f"{expression!r} is no arithmetic expression") from error


@agentrt.tool
def search_notes(query: str) -> str:
    """Searches the notes about the town: its people, animals, buildings and events.

    Args:
        query: The question's own words.
    """
    words = set(re.findall(r"\w+", query.lower()))
    notes = [path.read_text().strip() for path in sorted((HOME / "notes").glob("*.md"))]
    return max(notes, key=lambda note: len(words & set(re.findall(r"\w+", note.lower()))))


@agentrt.tool
def query_database(sql: str) -> list[tuple]:
    """Runs SQL on the database of books, a table books(title, author, year, copies).

    Args:
        sql: One SELECT. Count with COUNT(*), add with SUM(copies).
    """
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE books(title TEXT, author TEXT, year INTEGER, copies INTEGER)")
    database.executemany("INSERT INTO books VALUES (?, ?, ?, ?)", BOOKS)
    database.execute("PRAGMA query_only = ON")
    return database.execute(sql).fetchall()


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
