# Everything a developer does, with only Python 3.11 or newer, pip and make. `make` alone lists the targets.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
# Bits may depend on the number of threads; one per worker also keeps the workers from crowding each other out.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help setup demo check lint types test test-slow mutants evidence

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo '  PYTHON=python3.12 picks the interpreter of .venv; WORKERS=4 and ARGS="-k fedseq" go to pytest'

setup: $(READY)  ## create .venv with the pinned dependencies (again only when they changed)

demo: $(READY)  ## a small federation on this machine, start to end
	@$(BIN)/python -m fedrelay.demo

check: lint types test  ## what must pass before a commit: lint, types, test

lint: $(READY)  ## style and formatting (ruff)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(READY)  ## static types of src (mypy, strict)
	@$(BIN)/mypy

test: $(READY)  ## the tests and the doctests, without the slow ones
	@$(PYTEST) $(ARGS)

test-slow: $(READY)  ## the slow tests only
	@$(PYTEST) -m slow $(ARGS)

mutants: $(READY)  ## break the source one place at a time: does a test notice?
	@$(BIN)/python tests/mutants.py

evidence: $(READY)  ## run the benchmarks and write what they found
	@$(BIN)/python benchmarks/evidence.py

# torch comes first and alone: a wheel chosen by pip's own settings (a CPU build, say) is then kept by what follows.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>&1) || found="not there"; \
	  echo "fedrelay needs Python 3.11 or newer; $(PYTHON) is $$found. Try: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@echo "installing $$(grep '^torch==' constraints.txt) into .venv (large; the rest follows)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
