# Every target sets itself up on a fresh machine: it needs python3 (3.10 or newer) and a package index, nothing else.
#
#   make demo        train a small GPT through three failures, then two tasks that share six nodes
#   make demo-sharded  train a GPT sharded with FSDP2 through a failure
#   make demo-moe    train a GPT with experts divided among workers, by megatron-core, through a failure
#   make quick       lint, types and the tests that only compute: under three minutes on two cores
#   make test        all tests but those marked chaos, which repeat its scenarios with other faults
#   make long        the tests marked chaos, about an hour
#   make matrix      Lightning's features under ddp and unicron, in worlds of one and two and with kills: the differences
#   make conformance  short scripts under Lightning's strategies and unicron in one process: the differences
#   make conformance-pairs conformance-triples  the same scripts in two and in three processes, under ddp and unicron
#   make zoo         models of other packages, with a kill in each
#   make chaos       200 random faults, seeded
#   make cross       random scripts under random histories of deaths, beside the same without: make cross [MINUTES=10] [SEED=0]
#   make gpu         the acceptance kit of docs/gpu.md, on a machine with a GPU: make gpu [WHEELS=folder] [ITEMS=K1,K2] [BUDGET=480]
#   make bench       the figures in the README, measured here
#   make experiments what failures would cost: benchmarks/experiments/results.md, simulated
#   make docs        the documents as a site, with an API reference: build/site
#   make lint types docs-check wheel-check
#   make setup       the environment that all targets share: make setup [TORCH=2.14.1], the version of torch
#   make import-cost what `import torch` costs more with this package installed
PYTHON ?= python3
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
FAULTS ?= 200
MINUTES ?= 10
SEED ?= 0
PYTEST_ARGS ?=
CASES ?=
WHEELS ?=
ITEMS ?=
BUDGET ?=
TORCH ?=
COMPUTING := $(addprefix tests/,planner cli coordinator data simulate faults detection) $(wildcard tests/test_*.py)
# These start processes; their limits of time are generous (the fault tests pass at a load of ten).
# They run in this order: the longest modules first, then those whose tests are distributed one by one, so that none is
# left alone at the end; see spread in tests/conftest.py.
STARTING := $(addprefix tests/,demo examples cross loop strategies megatron joins matrix launcher node callbacks local_cluster fsdp system)
NONE_PICKED = $(if $(PYTEST_ARGS),|| test $$? = 5)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# -qq: what an index on this machine warns of is no concern of this project; errors are shown.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# Read by tests/conftest.py, which prints the time since then at the end of each run of pytest.
export MAKE_STARTED := $(shell date +%s)

.PHONY: help setup demo demo-sharded demo-moe quick test long matrix conformance conformance-pairs conformance-triples zoo docs gpu chaos cross bench experiments import-cost lint types docs-check wheel-check clean

help:
	@sed -n 's/^#   //p' Makefile

# torch comes first and by its plain name: a CPU wheel that the machine offers is taken; named together with the rest, pip
# may fetch the CUDA build instead.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=...") if sys.version_info < (3, 10) else None'
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	@$(PIP) setuptools wheel -c $(CONSTRAINTS)
	@$(PIP) "$$(grep '^torch==' $(CONSTRAINTS))"
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $@

setup: $(READY)

demo: $(READY)
	@$(BIN)/python -m unicron_lightning.demo

demo-sharded: $(READY)
	@$(BIN)/python examples/fsdp_gpt.py --demo

demo-moe: $(READY)
	@$(BIN)/python -c 'import megatron.core' 2> /dev/null || $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[megatron]'
	@$(BIN)/python examples/moe_gpt.py --demo

quick: lint types
	@$(BIN)/python -m pytest -q -m "not chaos and not zoo and not processes" -n auto $(COMPUTING) $(PYTEST_ARGS)

# Tests that compute first, on all cores; those that start processes, and wait for them nearly half of the time, three at
# a time; then those with signals and limits of time, two at a time.
# Where PYTEST_ARGS picks tests, a half may have none: pytest's status 5.
test: $(READY)
	@$(BIN)/python -m compileall -q unicron_lightning hydra_plugins tests  # a thousand processes follow
	@$(BIN)/python -m pytest -m "not chaos and not zoo" -n auto $(COMPUTING) $(PYTEST_ARGS) $(NONE_PICKED)
	@$(BIN)/python -m pytest -m "not chaos and not zoo" -n 3 --dist loadscope --no-loadscope-reorder $(STARTING) $(PYTEST_ARGS) $(NONE_PICKED)
	@$(BIN)/python -m pytest -m "not chaos and not zoo" -n 2 --dist loadscope $(patsubst %,--ignore=%,$(COMPUTING) $(STARTING)) $(PYTEST_ARGS) $(NONE_PICKED)

long: $(READY)
	@$(BIN)/python -m pytest -m chaos -n 2 --dist loadscope $(PYTEST_ARGS)

matrix: $(READY)
	@$(BIN)/python benchmarks/parity.py $(CASES)

conformance: $(READY)
	@$(BIN)/python -c 'import jsonargparse, tensorboardX' 2> /dev/null || $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[conformance]'
	@$(BIN)/python benchmarks/scenarios.py $(CASES)

conformance-pairs: $(READY)
	@$(MAKE) --no-print-directory conformance CASES="--world 2 $(CASES)"

conformance-triples: $(READY)
	@$(MAKE) --no-print-directory conformance CASES="--world 3 $(CASES)"

zoo: $(READY)
	@$(BIN)/python -c 'import peft, transformers' 2> /dev/null || $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[zoo]'
	@$(BIN)/python -m pytest -m zoo tests/zoo $(PYTEST_ARGS)

cross: $(READY)
	@$(BIN)/python benchmarks/crossing.py --minutes $(MINUTES) --seed $(SEED)

chaos: $(READY)
	@$(BIN)/python benchmarks/chaos.py --faults $(FAULTS)

# With WHEELS nothing is fetched: the machine's own python3 has torch with CUDA, the folder the rest.
gpu: $(if $(WHEELS),,$(READY))
	@WHEELS="$(WHEELS)" ITEMS="$(ITEMS)" BUDGET="$(BUDGET)" PYTHON="$(if $(WHEELS),$(PYTHON),$(BIN)/python)" .ci/gpu-kit $(PYTEST_ARGS)

bench: $(READY)
	@$(BIN)/python benchmarks/run.py

experiments: $(READY)
	@$(BIN)/python benchmarks/experiments/document.py

import-cost: $(READY)
	@$(BIN)/python benchmarks/import_cost.py

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy
	@MYPYPATH=tests:. $(BIN)/mypy --config-file tests/mypy.ini $$(find tests -name '*.py')

docs-check: $(READY)
	@$(BIN)/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

# A site needs all its pages below one folder; links between documents and to sources stay as they are.
docs: $(READY)
	@$(BIN)/python -c 'import mkdocs, mkdocstrings, material' 2> /dev/null || $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[docs]'
	@rm -rf build/site-source && mkdir -p build/site-source
	@cp -r --dereference *.md docs unicron_lightning deploy conf benchmarks examples tests build/site-source/
	@find build/site-source -name __pycache__ -prune -exec rm -r {} +
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/docs/index.html"

wheel-check: $(READY)
	@PYTHON=$(BIN)/python .ci/wheel-check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
