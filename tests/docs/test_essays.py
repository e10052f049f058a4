"""Every block of the pages on the cache and the scheduler runs, in order, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["pages", "radix_cache", "one_rule", "scheduling"])
def test_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{page}.md has no block of Python"
    names: dict[str, object] = {"__name__": page}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {number + 1}", "exec"), names)
