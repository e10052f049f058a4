"""Real clients, unmodified, each in an environment of its own, against a live server on the model whose calls make sense."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent / "clients"
ENVIRONMENTS = HERE.parent.parent / ".clients"
CLIENTS = sorted(path.stem for path in HERE.glob("*.txt"))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS)
def test_the_client_works_unmodified(client, calling_server):
    python = ENVIRONMENTS / client / "bin" / "python"
    if not (ENVIRONMENTS / client / ".installed").exists():
        pytest.skip(f"no environment for {client}; `make clients` makes it")
    model = calling_server.service.names[0]
    command = [str(python), str(HERE / f"{client}_client.py"), calling_server.url, model]
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | quiet
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment, check=False)
    assert done.returncode == 0, f"{client} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1].startswith("ok"), done.stdout


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_the_lines_on_the_page_print_what_it_says(page, calling_server):
    """A block of Python that asks port 8000, and what it prints: in the comment that ends it, or in the block after it."""
    text = (HERE.parent.parent / page).read_text()
    blocks = [(code, after) for code, after in re.findall(r"```python\n(.*?)```(?:\s*```\n(.*?)```)?", text, re.DOTALL) if ":8000/v1" in code]
    if not blocks:
        pytest.skip(f"{page} asks no server")
    for code, after in blocks:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code.replace("http://127.0.0.1:8000", calling_server.url), {})
        assert said.getvalue().strip() == (after.strip() or code.rstrip().rpartition("  # ")[2])
