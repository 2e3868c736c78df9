# Only Python 3.10+ and make are assumed. `make` alone lists the targets.
#   make test PYTHON=python3.12 VENV=.venv-3.12     another interpreter, in an environment of its own

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
PROMPT  ?= Tom has 3 boxes with 12 pencils each and gives away 9 pencils. How many are left? Think step by step.

PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed
TRITON  := $(VENV)/.triton
BUSY    := $(VENV)/.installing
PIP     := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
# Two pytest workers on two cores: one thread each, or they fight.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo install weights test check lint format types layers unit coverage quick real models clean FORCE

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

demo: $(STAMP)  ## install, fetch SmolLM2-135M, generate plainly and speculatively, compare
	$(VENV)/bin/paceline generate "$(PROMPT)" --chat --draft eagle --gamma 4 --max-new-tokens 96 --compare

install: $(STAMP)  ## make .venv and install everything, pinned by constraints.txt

# With --keep-going a failure does not hide what comes after it, and the exit status is still non-zero.
test: install  ## everything CI runs
	@$(MAKE) --no-print-directory --keep-going lint format types layers unit real

check: install  ## the quick part
	@$(MAKE) --no-print-directory --keep-going lint format types layers quick

lint: $(STAMP)  ## ruff check
	$(VENV)/bin/ruff check .

format: $(STAMP)  ## ruff format --check
	$(VENV)/bin/ruff format --check .

types: $(STAMP)  ## mypy
	$(VENV)/bin/mypy

layers: $(STAMP)  ## import-linter: imports point down only
	$(VENV)/bin/lint-imports

unit: $(TRITON)  ## every test that needs no weights
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not real" --durations=10 --durations-min=2

coverage: $(TRITON)  ## the same, showing what no test touches
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not real" --cov --cov-report=term

quick: $(STAMP)  ## the tests of `make check`
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not slow and not real"

real: weights  ## the tests on SmolLM2, alone and with all threads
	$(PY) -m pytest -m real --durations=5 --durations-min=2

models: $(STAMP)  ## try every class of transformers, tiny (20 minutes); writes docs/models.md
	$(ONE_THREAD) $(PY) -m tests.models.survey

weights: $(STAMP)  ## fetch SmolLM2-135M into the cache
	$(PY) -c 'import paceline; paceline.load("smollm2-135m")'

clean:  ## remove the environment and every cache in the tree (not the weights)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# A PYTHON asked for by name that is not the one inside the environment: make the environment again.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(PY)),)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell $(PY) -V 2>&1))
$(STAMP): FORCE
endif
endif
endif

# An install that was cut off leaves $(BUSY) behind and starts from nothing next time; a whole environment is kept and
# brought up to date. setuptools comes first, pinned, so that nothing is fetched unpinned to build the package itself.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Paceline needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another with PYTHON=python3.11.")'
	@if [ -e $(BUSY) ] || [ "$$($(PYTHON) -V 2>&1)" != "$$($(PY) -V 2>&1)" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    rm -rf $(VENV) && mkdir -p $(VENV) && touch $(BUSY) && echo "$(PYTHON) -m venv $(VENV)" && $(PYTHON) -m venv $(VENV); \
	fi
	@touch $(BUSY)
	$(PIP) --quiet setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	@rm -f $(BUSY) && touch $@

# The kernels for CUDA devices are interpreted in tests. Not among the dependencies: it is large (180 MB to fetch), torch
# for CUDA brings its own, and there is none for other systems (the tests that want it are then skipped).
$(TRITON): $(STAMP)
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(PIP) --quiet --no-deps triton==3.6.0; fi
	@touch $@
