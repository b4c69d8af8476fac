# Any python >= 3.11 and < 3.13; the first of these that is one.
PYTHON ?= $(shell for p in python3.11 python3 python3.12; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# Extra arguments for pip. Where the default index has only CUDA builds of torch, give PyTorch's CPU wheel index here:
# make setup PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
PYTEST := $(PY) -m pytest -q
STAMP := $(if $(wildcard $(VENV)/.setup-gpu),$(VENV)/.setup-gpu,$(VENV)/.setup-cpu)

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu demo test test-slow test-compile test-gpu gpu-check bench figures clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install for CPU into .venv from the lock file (about 4 minutes)

$(VENV)/.setup-cpu: requirements/cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; give make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into $(VENV) (a few minutes, silent unless something fails)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps -r requirements/cpu.txt
	@$(PY) -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || { $(PY) -m pip uninstall -qqy torch; \
		echo "torch is not a CPU build; run make setup PIP_ARGS=\"--extra-index-url URL\" with PyTorch's CPU wheel index"; exit 1; }
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

setup-gpu: $(VENV)/.setup-gpu  ## Install for CUDA into .venv: vLLM with its CUDA torch

$(VENV)/.setup-gpu: requirements/gpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; give make PYTHON=/path/to/python3.11"; exit 1; }
	@test ! -e $(VENV)/.setup-cpu || { echo "$(VENV) holds the CPU install; remove it first or give make setup-gpu VENV=DIR"; exit 1; }
	@echo "installing into $(VENV) (several minutes, silent unless something fails)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements/gpu.txt
	@$(PIP) --no-deps -e .
	@touch $@

demo: $(STAMP)  ## Run the main job on the embedded model, to a finished figure
	$(PY) run.py experiment=demo
	$(PY) -m analysis demo

test: $(STAMP)  ## Run the CPU tests (10 minutes at most)
	$(PYTEST) -m "not slow and not gpu and not compile"

# pytest's status 5 says that no test carries the mark yet; every other failure stays one.
test-slow: $(STAMP)  ## Run the long tests: engines, soak (45 minutes at most)
	$(PYTEST) -m "slow and not gpu" || [ $$? -eq 5 ]

test-compile: $(STAMP)  ## Compile the Triton kernels for sm_80 and sm_90; needs no GPU
	env -u TRITON_INTERPRET $(PYTEST) -m compile || [ $$? -eq 5 ]

test-gpu: $(STAMP)  ## Run the tests that need a CUDA device
	$(PYTEST) -m gpu

gpu-check: $(STAMP)  ## Check and time the Triton ops on a CUDA device, into outputs/bench
	$(PY) -m kernels.gpu_check

bench: $(STAMP)  ## Measure TTFT, selection and ops into outputs/bench
	$(PY) run.py runner=bench

figures: $(STAMP)  ## Draw every figure whose cells are in outputs/
	$(PY) -m analysis figures --log

clean:  ## Remove caches and build leftovers; .venv and outputs/ stay
	rm -rf build *.egg-info .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
