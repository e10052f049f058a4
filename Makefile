# The project's commands. `make demo` and `make test` are all that a newcomer needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Everything that shares the cores keeps to its own: one thread a test process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test quick proof clients lint bench clean

demo: $(STAMP)
	@$(BIN)/agentrt demo

test: $(STAMP) clients
	@$(BIN)/agentrt models fetch --quiet smollm2-135m qwen2.5-coder-0.5b
	$(PYTEST) -n 2 --dist loadfile -m "not proof"

quick: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not proof and not model"

proof: $(STAMP) clients
	@$(BIN)/agentrt models fetch --quiet smollm2-135m qwen2.5-coder-0.5b
	$(PYTEST) --timeout 3600

# Each client of the server in an environment of its own; a test whose client could not be had is skipped by name.
clients: $(STAMP)
	-@$(BIN)/python tests/clients/make_environments.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python .ci/strict_rooms.py | xargs $(BIN)/mypy --strict

bench: $(STAMP)
	$(BIN)/python benchmarks/prefix_reuse.py

# One environment for everything; made anew when pyproject.toml changes.
$(STAMP): pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing agentrt into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
