"""What all tests share: corpora from outside the project, and the default model where it is cached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that needs it is skipped where there is none."""
    folder = Path(os.environ.get("AGENTRT_CORPORA", CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}; set AGENTRT_CORPORA")
    return folder
