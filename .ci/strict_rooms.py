"""Prints the files that are type-checked strictly: every module of a room that docs/architecture.md calls torch-free."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def torch_free_rooms() -> list[str]:
    """Rooms whose torch column says no."""
    rooms: list[str] = []
    for line in (CHECKOUT / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`") and cells[3].startswith("no"):
            rooms += re.findall(r"`(\w+)`", cells[0])
    return rooms


if __name__ == "__main__":
    for room in torch_free_rooms():
        for path in (CHECKOUT / "agentrt" / room, CHECKOUT / "agentrt" / f"{room}.py", CHECKOUT / room):
            if path.exists() and (path.suffix == ".py" or any(path.glob("*.py"))):
                print(path.relative_to(CHECKOUT))
