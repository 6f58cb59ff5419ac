# `make demo` trains a small agent; `make test` tests everything that takes no more than seconds.
# TORCH_INDEX=URL chooses another package index for torch (for instance one with CPU builds).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SOURCES := model sandbox envs rewards rl conf tests benchmarks

.PHONY: demo test test-slow test-all check bench coverage docs clean

demo: $(VENV)/.installed
	@sh scripts/need_sandbox.sh
	$(BIN)/temper train experiment=calc $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not benchmark $(shell sh scripts/docker_marker.sh) $(shell sh scripts/gvisor_marker.sh)" $(ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not gpu and not benchmark $(shell sh scripts/docker_marker.sh) $(shell sh scripts/gvisor_marker.sh)" $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow and not gpu and not benchmark $(shell sh scripts/docker_marker.sh) $(shell sh scripts/gvisor_marker.sh)" $(ARGS)

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
	$(BIN)/python -m coverage run -m pytest -m "not gpu and not benchmark $(shell sh scripts/docker_marker.sh) $(shell sh scripts/gvisor_marker.sh)" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=85

docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/docs $(ARGS)

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .coverage*

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
