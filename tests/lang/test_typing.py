"""What an editor and a strict type checker see of a user's program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = '''
import agentrt as sgl
from pydantic import BaseModel


class City(BaseModel):
    name: str


@sgl.tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@sgl.function
def capital(s: sgl.State, country: str, *, loud: bool = False) -> str:
    s += f"The capital of {country} is" + sgl.gen("city", max_tokens=8, stop=["."])
    with s.user():
        s += sgl.select("z", ["a", "b"], choices_method=sgl.greedy_token_selection)
    forks = s.fork(3)
    forks += lambda i: f"{i}"
    forks.join()
    return str(s["city"]) + forks.first(1, where=lambda f: f["z"] == "a")[0].text()


@sgl.function
async def native(s: sgl.AsyncState, country: str) -> str:
    s += sgl.system("a") + sgl.user(country) + sgl.assistant([sgl.gen("city", type=City)])
    s += sgl.tool_call("calls", [add])
    async for piece in s.text_iter("city"):
        print(piece)
    return str(await s["city"])


@sgl.function(num_api_spec_tokens=3)
def outer(s: sgl.State) -> str:
    return capital(s, "Spain")


async def main() -> None:
    reveal_type(await native.arun("France"))


reveal_type(capital.run)
reveal_type(capital.run("France", temperature=0, backend=sgl.ScriptedBackend("x")))
reveal_type(capital.run_batch([{"country": "France"}]))
reveal_type(capital.run_batch([{"country": "France"}], generator_style=True))
'''

REVEALED = [
    "agentrt.lang.state.State",
    "def (country: str, *, loud: bool =) -> agentrt.lang.state.State",
    "agentrt.lang.state.State",
    "list[agentrt.lang.state.State]",
    "typing.Iterator[agentrt.lang.state.State]",
]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "agentrt" / "py.typed").is_file()
    assert '"agentrt" = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_a_users_program_is_clean_under_mypy_strict_and_run_keeps_the_programs_signature(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    alone = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]  # without torch's own types it is ten times as fast
    quiet = ["--no-error-summary", "--allow-subclassing-any", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", "--strict", *alone, *quiet, str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [wanted in what for wanted, what in zip(REVEALED, found, strict=True)] == [True] * len(REVEALED), found
