"""Makes an environment for each client, at its newest version: installed together they would pull one another back by years.

Called by `make clients`. An environment that exists is brought up to date with ``--upgrade``; one that cannot be made is
told of, and the others are made all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent.parent / ".clients"


def python_of(name: str) -> Path:
    """The interpreter of a client's environment."""
    return ENVIRONMENTS / name / "bin" / "python"


def make(requirements: Path, *, upgrade: bool) -> bool:
    """Makes one environment; True if it is there afterwards."""
    folder = ENVIRONMENTS / requirements.stem
    done = folder / ".installed"
    if done.exists() and not upgrade:
        return True
    if not python_of(requirements.stem).exists():
        venv.create(folder, with_pip=True)
    command = [str(python_of(requirements.stem)), "-m", "pip", "install", "--quiet", "--upgrade", "--disable-pip-version-check", "-r", str(requirements)]
    installed = subprocess.run(command, check=False).returncode == 0
    if installed:
        done.touch()
    return installed


def main() -> int:
    """Makes the environments that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="clients; all of them if none is named")
    parser.add_argument("--upgrade", action="store_true", help="bring existing environments up to date")
    chosen = parser.parse_args()
    failed = []
    for requirements in sorted(HERE.glob("*.txt")):
        if not chosen.names or requirements.stem in chosen.names:
            print(f"{requirements.stem}: ", end="", flush=True)
            made = make(requirements, upgrade=chosen.upgrade)
            print("ready" if made else "could not be made", flush=True)
            failed += [] if made else [requirements.stem]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
