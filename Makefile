# make serve    install, fetch the default model, start a cluster of one prefill and one decode worker (ARGS="--port 9000")
# make test     install with the test tools, then ruff, mypy and pytest
# make install  the first half of both
# make chaos    workers and connections fail under load for twenty minutes (TANDEM_CHAOS_S=seconds); report in benchmarks/results/chaos.md
# make clean    forget the environment and every cache in this folder
#
# Needs Python 3.11 or newer (PYTHON=... names another one) and nothing else; everything goes into .venv.

.DEFAULT_GOAL := help
.PHONY: help install serve test chaos clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The default build of torch brings gigabytes of CUDA. A machine without an NVIDIA GPU gets the CPU build, from wherever pip
# finds it: its configured indexes, and PyTorch's own if that answers.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_INDEX = $(shell command -v nvidia-smi >/dev/null 2>&1 || { \
	$(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' 2>/dev/null && \
	echo --extra-index-url $(TORCH_CPU_INDEX); })

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed

serve: install
	@exec $(BIN)/tandem serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest $(ARGS)

chaos: $(VENV)/.installed-test
	TANDEM_CHAOS_S=$${TANDEM_CHAOS_S:-1200} $(BIN)/pytest -s tests/integration/test_chaos.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Tandem needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@echo "==> a fresh environment in $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "==> packages (minutes the first time)"
	$(PIP) install --editable . $(TORCH_INDEX)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "==> test tools"
	$(PIP) install --editable '.[test]' $(TORCH_INDEX)
	@touch $@
