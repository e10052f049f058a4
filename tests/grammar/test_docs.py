"""The essays' code runs as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["structured_output.md", "jump_forward.md"])
def test_the_code_of_the_essay_runs(name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    scope = {"__name__": "essay"}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)
