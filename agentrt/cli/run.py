"""``agentrt run FILE``: runs a file of programs as Python would, and writes the report of every program that it ran.

It watches which runs begin; it changes nothing about them. Invariant: the reports are written also where the file fails, and
the file's own error is what the caller sees.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrt import backend as backends
from agentrt.cli.start import start_engine
from agentrt.errors import UserError
from agentrt.lang.recording import report_of
from agentrt.lang.run import Run
from agentrt.observe.report import joined

#: What is not the file's own output goes to standard error.
console = Console(stderr=True)


def run(
    file: str | Path,
    arguments: Sequence[str] = (),
    *,
    model: str | None = None,
    report: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Runs the file as ``__main__``, then sums up what its programs reused.

    Args:
        file: A Python file.
        arguments: What it finds in ``sys.argv`` after its name.
        model: Model of the default backend; None leaves the choice to the file.
        report: Where to write the report as a page.
        trace: Where to write the report as JSON (``program_report.json`` among the schemas).

    Raises:
        UserError: There is no such file.
        BaseException: Whatever the file fails with.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no file {str(file)!r} to run", param="file")
    engine = None if model is None else start_engine(model)
    if engine is not None:
        backends.set_default_backend(engine)
    with _watched() as runs:
        try:
            _run_as_main(path, arguments)
        finally:
            _sum_up(path.stem, runs, report, trace)
            if engine is not None:
                backends.set_default_backend(None)
                engine.close()


def _run_as_main(path: Path, arguments: Sequence[str]) -> None:
    argv, modules = sys.argv, sys.path.copy()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, modules


@contextmanager
def _watched() -> Iterator[list[Run]]:
    """Collects the runs that begin inside the block, in the order in which they do."""
    runs: list[Run] = []
    make = Run.__init__

    def watched(self: Run, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        runs.append(self)

    Run.__init__ = watched  # type: ignore[method-assign]
    try:
        yield runs
    finally:
        Run.__init__ = make  # type: ignore[method-assign]


def _sum_up(name: str, runs: Sequence[Run], report: Path | None, trace: Path | None) -> None:
    if not runs:
        console.print(f"{name} ran no program, so there is nothing to report", highlight=False)
        return
    whole = joined([report_of(one) for one in runs], program=name, began=[one.began for one in runs])
    console.print(str(whole), highlight=False, markup=False)
    for path, text in ((report, whole.to_html), (trace, whole.to_json)):
        if path is not None:
            Path(path).write_text(text(), encoding="utf-8")
            console.print(f"written: {path}", highlight=False, markup=False)
