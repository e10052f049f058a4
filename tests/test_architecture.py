"""The import table of docs/architecture.md holds, and the torch-free rooms are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
#: What every room below them may import.
CONTRACTS = {"errors", "config", "request", "backend"}
#: What each contract may import.
BETWEEN_CONTRACTS = {"errors": set(), "config": {"errors"}, "request": {"errors"}, "backend": {"errors", "request"}}
ALL = "all"


def room_table() -> dict[str, tuple[set[str] | str, str]]:
    """Room -> (rooms it may import, its torch column), read from the document."""
    rows = {}
    for line in (CHECKOUT / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            allowed: set[str] | str = ALL if cells[2].startswith("all") else set(re.findall(r"[a-z]+", cells[2].split("(")[0].split(";")[0]))
            for room in re.findall(r"`(\w+)`", cells[0]):
                rows[room] = (allowed, cells[3])
    return rows


TABLE = room_table()


def sources() -> list[tuple[str, Path]]:
    """(room, file) of every module."""
    files = [(path.relative_to(CHECKOUT / "agentrt").parts[0].removesuffix(".py"), path) for path in (CHECKOUT / "agentrt").rglob("*.py")]
    files += [(name, path) for name in ("kernels", "schemas") for path in (CHECKOUT / name).rglob("*.py")]
    return [(room, path) for room, path in files if room != "__init__"]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of agentrt that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "agentrt" else [node.module or ""]
    return {name.split(".")[1] for name in names if name.startswith("agentrt.")}


def test_every_room_is_in_the_table():
    assert {room for room, _ in sources()} <= set(TABLE)


@pytest.mark.parametrize("room", sorted(TABLE))
def test_a_room_imports_only_what_the_table_allows(room):
    allowed, _ = TABLE[room]
    if allowed == ALL:
        return
    allowed = BETWEEN_CONTRACTS[room] if room in CONTRACTS else set(allowed) | CONTRACTS | {room}
    for owner, path in sources():
        if owner == room:
            # backends/hosts.py alone starts the engine.
            also = {"engine"} if path.name == "hosts.py" and room == "backends" else set()
            wrong = imported_rooms(path) - allowed - also - {"__version__"}
            assert not wrong, f"{path} imports {sorted(wrong)}; {room} may import {sorted(allowed)}"


def test_the_torch_free_rooms_leave_torch_out():
    modules = []
    for room, path in sources():
        if TABLE[room][1].startswith("no") and path.name != "__main__.py":
            parts = path.relative_to(CHECKOUT).with_suffix("").parts
            name = ".".join(parts if parts[0] == "agentrt" else ("agentrt", *parts)).removesuffix(".__init__")
            modules.append(name)
    modules += ["agentrt", "agentrt.backends.local", "agentrt.runtime", "agentrt.backends.door"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    assert 'transformers' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_public_names_are_these():
    import agentrt

    for name in agentrt.__all__:
        assert getattr(agentrt, name) is not None, name
    typed = set(re.findall(r"import \w+ as (\w+)", (CHECKOUT / "agentrt" / "__init__.py").read_text()))
    assert typed - set(agentrt.__all__) <= {"_backend"}, "a name for editors that is not public"
    assert set(agentrt.__all__) - typed == {"__version__"}, "a public name that editors do not see"
