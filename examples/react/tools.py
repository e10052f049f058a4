"""The agent's own tools: a calculator, a search over the folder of notes, and a database made on the spot."""

from __future__ import annotations

import ast
import operator
import re
import sqlite3
from pathlib import Path

import agentrt

NOTES = Path(__file__).parent / "notes"
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
    notes = [path.read_text().strip() for path in sorted(NOTES.glob("*.md"))]
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
