# memfit: what can be done with a clone. `make` alone lists it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench accuracy

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with the command memfit in it

# torch first and by its own pin: otherwise the resolver may fetch a build for CUDA that nothing here needs.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("memfit needs Python 3.10 or newer: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: setup  ## predict real jobs on real cards, without a GPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: setup  ## run the test suite
	$(BIN)/python -m pytest -q -n auto --maxprocesses $(WORKERS) --dist loadfile

check: setup  ## ruff, mypy and the test suite
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(MAKE) --no-print-directory test

bench: setup  ## time the predictions
	$(BIN)/python -m benchmarks

accuracy: setup  ## compare predictions with measured runs: writes docs/accuracy.md
	$(BIN)/python -m accuracy.table
