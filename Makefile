# make serve    install, fetch the default model, start a cluster of one prefill and one decode worker (ARGS="--port 9000")
# make test     install with the test tools, then ruff, mypy and the quick tests: twelve minutes on two cores is the goal, twenty with AVX2 alone
# make test-all   the same, then the slow tests (make test-slow) and the long ones (make test-long): 80 minutes, and more than 99 with AVX2 alone
# make install  the first half of both: .venv with the package versions of requirements.lock
# make lint     ruff and mypy
# make format   ruff rewrites what it can
# make unit     the unit tests alone, slow ones included
# make coverage   which lines of the product the unit and fault tests run; worker processes are not counted
# make unit-newest  the same on the newest Python that is installed and that all dependencies support
# make docs     draw the pictures and the module map anew, check every link, and build the site into build/site
# make update   renew requirements.lock: the newest versions that the ranges in pyproject.toml allow
# make chaos    workers, connections and nodes fail under load: twenty minutes (TANDEM_CHAOS_S=seconds), then half an hour of nodes
# make bench    all benchmarks in parts that resume, on an idle machine: hours (ARGS="--list", "--peer-env DIR --traces DIR")
# make bench-smoke   this tree beside the commit where its branch left main (ARGS=COMMIT for another): about five minutes
# make results  write the tables of results in README and docs anew
# make clean    forget the environment and every cache in this folder; what `make bench` has done stays, in .bench
#
# Needs Python 3.11 or newer (PYTHON=... names another one), for the tests curl too, and nothing else; everything goes into .venv.
# To run some tests only, call .venv/bin/pytest with their names.

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-long test-all coverage lint format unit unit-newest docs update chaos bench bench-smoke results clean
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

# Versions that were tested. Where torch comes from (CPU or CUDA build) stays open, and so does what the CUDA build brings: its
# packages, and a version of triton that fits it. nvidia-ml-py is none of these.
LOCK := requirements.lock
NEWEST_PYTHON ?= $(shell for python in python3.14 python3.13 python3.12; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed

serve: install
	@exec $(BIN)/tandem serve $(ARGS)

# Tests of parts share the cores. Clusters have them to themselves, for their leases and steps are of real time.
UNIT := -n 2 --dist loadfile tests/unit
PARTS := $(UNIT) tests/fault
CLUSTERS := tests/integration tests/gpu

test: lint
	$(BIN)/pytest $(PARTS) -m "not slow" $(ARGS)
	$(BIN)/pytest $(CLUSTERS) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest $(PARTS) -m "slow and not long" $(ARGS)
	$(BIN)/pytest $(CLUSTERS) -m "slow and not long" $(ARGS)

test-long: $(VENV)/.installed-test
	$(BIN)/pytest $(CLUSTERS) -m long $(ARGS)

test-all: test
	$(MAKE) test-slow
	$(MAKE) test-long

coverage: $(VENV)/.installed-test
	$(BIN)/pytest $(PARTS) --cov $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(VENV)/.installed-test
	$(BIN)/pytest $(UNIT) $(ARGS)

unit-newest:
	@test -n "$(NEWEST_PYTHON)" || { echo "no Python newer than 3.11 is installed; name one with NEWEST_PYTHON=..." >&2; exit 1; }
	$(MAKE) unit PYTHON=$(NEWEST_PYTHON) VENV=.venv-newest

docs: $(VENV)/.installed-test
	$(BIN)/python docs/badges.py
	$(BIN)/python docs/data_path.py
	$(BIN)/python docs/sequences.py
	$(BIN)/python docs/throughput_chart.py
	$(BIN)/python docs/module_map.py
	$(BIN)/python -m deploy.grafana.build
	$(BIN)/python -m deploy.kubernetes.build
	$(BIN)/pytest tests/unit/test_docs.py tests/unit/test_prose.py $(ARGS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> build/site/index.html; to read and search it: $(PYTHON) -m http.server --directory build/site"

update: | $(BIN)/python
	rm -rf build/update
	$(PYTHON) -m venv build/update
	build/update/bin/python -m pip --disable-pip-version-check install '.[test]' $(TORCH_INDEX)
	build/update/bin/python -m pip --disable-pip-version-check freeze --exclude tandem \
		| sed -nE 's/^([A-Za-z0-9._-]+==[^+ ]+)(\+[^ ]+)?$$/\1/p' | grep -viE '^(nvidia-[^m]|cuda|triton)' | LC_ALL=C sort -f > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf build/update

chaos: $(VENV)/.installed-test
	TANDEM_CHAOS_S=$${TANDEM_CHAOS_S:-1200} TANDEM_NODE_FAULTS_SCALE=$${TANDEM_NODE_FAULTS_SCALE:-0.4} \
		$(BIN)/pytest -s tests/integration/test_chaos.py tests/integration/test_node_faults.py tests/integration/test_scarce.py $(ARGS)

bench: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks $(ARGS)

bench-smoke: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.against --smoke $(ARGS)

results: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.pages

clean:
	rm -rf $(VENV) .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Tandem needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@echo "==> a fresh environment in $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Where the system's Python was upgraded, the environment's leads nowhere, and the one that takes its place has no packages.
.PHONY: $(shell test -x $(BIN)/python || echo $(VENV)/.installed)

$(VENV)/.installed: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "==> packages (minutes the first time)"
	$(PIP) install --constraint $(LOCK) --editable . $(TORCH_INDEX)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "==> test tools"
	$(PIP) install --constraint $(LOCK) --editable '.[test]' $(TORCH_INDEX)
	@touch $@
