# Everything a newcomer types. Needs Python 3.11, git and make; pip's own index settings apply.
#
#   make run            set up, fetch the model, ask two questions about a real document
#   make test           set up with the test tools, then all tests
#   make serve          the daemon in the foreground; MODEL=/path/to/folder serves another model
#   TORCH_SPEC=...      what to install as torch, such as torch==2.13.0+cpu

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_SPEC ?= $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
BUF_VERSION := 1.75.0
# Kernels are interpreted and compiled by the tests; a torch with a GPU brings its own.
TRITON_VERSION := 3.6.0
MODEL ?=
# Once a worker is lost the run ends: xdist hands a new one files that are done already, and waits for ever.
PYTEST_ARGS ?= -n auto --dist loadfile --max-worker-restart 0
BENCH_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PROTOS := $(wildcard proto/downcore/v1/*.proto)

.PHONY: setup run serve model test lint format bench proto campaign clean

setup: $(VENV)/.dev

run: $(VENV)/.runtime
	$(VENV)/bin/downcore demo

serve: $(VENV)/.runtime
	exec $(VENV)/bin/downcore serve $(if $(MODEL),--model "$(MODEL)") $(SERVE_ARGS)

model: $(VENV)/.runtime
	$(VENV)/bin/downcore model fetch

test: $(VENV)/.dev model
	DOWNCORE_REQUIRE_MODEL=1 $(PY) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	@if command -v npx >/dev/null; then \
	  cd proto && npx --yes @bufbuild/buf@$(BUF_VERSION) lint && echo "buf lint passed"; \
	else echo "buf lint left out: there is no npx"; fi

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.bench model
	$(VENV)/bin/downcore bench $(BENCH_ARGS)

proto: $(VENV)/.dev
	$(PY) -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

# make campaign NAME runs tests/campaigns/NAME.py in full; it writes its figures to tests/campaigns/results.
ifeq (campaign,$(firstword $(MAKECMDGOALS)))
CAMPAIGN := $(word 2,$(MAKECMDGOALS))
ifneq (,$(CAMPAIGN))
.PHONY: $(CAMPAIGN)
$(CAMPAIGN): ; @:
endif
endif
campaign: $(VENV)/.dev model
	@test -f "tests/campaigns/$(CAMPAIGN).py" || { echo "usage: make campaign NAME, one of:" \
	  $$(ls tests/campaigns 2>/dev/null | sed -n 's/^\([a-z].*\)\.py$$/\1/p'); exit 2; }
	$(PY) -m tests.campaigns.$(CAMPAIGN)

clean:
	rm -rf $(VENV) build dist

# One stamp for each set of packages: the second time, make has nothing to do.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "there is no python3 on the path"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; set PYTHON"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# All pins but torch's, which TORCH_SPEC may differ from.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	@grep -v '^torch==' constraints.txt > $@

$(VENV)/.runtime: pyproject.toml $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt "$(TORCH_SPEC)"
	$(PIP) install -c $(VENV)/constraints.txt hatchling
	$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e ".[dev]"
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) install --no-deps triton==$(TRITON_VERSION)
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e ".[bench]"
	@touch $@
