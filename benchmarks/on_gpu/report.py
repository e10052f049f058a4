"""Lines of the table, and the time that is left for more of them; it knows nothing of what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Line:
    """One row of the table.

    Attributes:
        section, what: Of it.
        value, unit: What was measured; None: it failed or was left out.
        floor: What the GPU cannot beat, in the same unit.
        note: In words.
    """

    section: str
    what: str
    value: float | None
    unit: str = ""
    floor: float | None = None
    note: str = ""


@dataclass(slots=True)
class Report:
    """Lines so far, and the time that is left."""

    until: float
    lines: list[Line] = field(default_factory=list)

    @contextmanager
    def section(self, name: str, what: str, *, needs: float = 0.0) -> Iterator[Callable[..., None]]:
        """Runs one measurement: its failure is a line of the table, and with less than `needs` seconds left it is skipped."""

        def add(value: float, unit: str, floor: float | None = None, note: str = "", what: str = what) -> None:
            self.lines.append(Line(name, what, value, unit, floor, note))
            print(f"{name}: {what}: {value:.4g} {unit} {note}", flush=True)

        try:
            if time.monotonic() + needs > self.until:
                raise TimeoutError("no time left")
            yield add
        except Exception as error:  # every failure is a result here
            self.lines.append(Line(name, what, None, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"))
            print(f"{name}: {what}: {self.lines[-1].note}", flush=True)


def table(lines: list[Line]) -> str:
    """Floors are times or errors that less is better than, or rates that more is better than."""
    text = [f"{'':64}{'measured':>12} {'':9}{'floor':>11}{'of floor':>10}"]
    for line in lines:
        name = f"{line.section}: {line.what}"[:63]
        if line.value is None:
            text.append(f"{name:64}{line.note}")
            continue
        share = ""
        if line.floor and line.value and line.unit != "error":
            share = f"{line.floor / line.value if line.unit == 'us' else line.value / line.floor:9.0%}"
        floor = "" if line.floor is None else f"{line.floor:11.4g}"
        text.append(f"{name:64}{line.value:12.4g} {line.unit:9}{floor:>11}{share:>10} {line.note}".rstrip())
    return "\n".join(text)
