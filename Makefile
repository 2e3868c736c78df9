# Needs Python 3.10+ and make. `make` alone lists the targets.
#   make test PYTHON=python3.12 VENV=.venv-3.12     another interpreter, in its own environment

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
PROMPT  ?= Tom has 3 boxes with 12 pencils each and gives away 9 pencils. How many are left? Think step by step.

PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed
DEV     := $(VENV)/.dev
DOCS    := $(VENV)/.docs
BUSY    := $(VENV)/.installing
PIP     := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests start many processes. They start faster if Python keeps what it compiled.
unexport PYTHONDONTWRITEBYTECODE
# Two pytest workers share two cores, so each gets one thread.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# The files with tests on real weights. pytest need not import the others.
REAL    := $(shell grep -rl "mark\.real" tests --include='test_*.py')
# The folders of `make check`.
QUICK   := $(addprefix tests/,core rules conformance engine drafters models mutants)

.DEFAULT_GOAL := help
# One target after the other, but the checks without tests run side by side (`static`).
ifneq ($(SIDE_BY_SIDE),yes)
.NOTPARALLEL:
endif
.PHONY: help demo install docs weights test check nightly static everything real-all lint format types layers unit coverage quick real mutants conformance pagetools models clean FORCE

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

demo: $(STAMP)  ## install, fetch SmolLM2-135M, generate with and without drafts, compare
	@echo "[4/4] Generate with and without drafts. The first run fetches SmolLM2-135M (93 MB) and compiles the CPU kernels."
	@$(VENV)/bin/paceline generate "$(PROMPT)" --chat --draft eagle --gamma 4 --max-new-tokens 96 --compare

install: $(STAMP)  ## make .venv and install Paceline, pinned by constraints.txt

docs: $(DOCS)  ## build the site into build/site; a broken link or anchor fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet && echo "build/site/index.html"

# With --keep-going a failure does not hide what comes after it, and the exit status is still non-zero.
test: $(DEV)  ## everything CI runs
	@$(MAKE) --no-print-directory --keep-going static unit real

check: $(DEV)  ## the quick part
	@$(MAKE) --no-print-directory --keep-going static quick

nightly: $(DEV)  ## everything, with full products and large samples, and the mutants
	@$(MAKE) --no-print-directory --keep-going everything real-all mutants

everything: $(DEV)
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not real" --durations=20 --durations-min=5

real-all: $(DEV) weights
	$(PY) -m pytest -m real --durations=5 --durations-min=2 $(REAL)

static: $(DEV)  ## lint, format, types and layers, side by side
	@$(MAKE) --no-print-directory --keep-going --jobs=$(WORKERS) --output-sync=target SIDE_BY_SIDE=yes lint format types layers

lint: $(DEV)  ## ruff check, the word list of docs/glossary.md, and the types of the playground's page
	$(VENV)/bin/ruff check .
	$(PY) tools/check_words.py
	$(PY) tools/check_page.py

format: $(DEV)  ## ruff format --check
	$(VENV)/bin/ruff format --check .

types: $(DEV)  ## mypy
	$(VENV)/bin/mypy

layers: $(DEV)  ## import-linter: imports point down only
	$(VENV)/bin/lint-imports

unit: $(DEV)  ## every test that needs no weights
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not real and not nightly" --durations=10 --durations-min=2

coverage: $(DEV)  ## the same, showing what no test touches
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not real and not nightly" --cov --cov-report=term


quick: $(DEV)  ## the tests of `make check`: of every test the first case
	$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) --quick $(QUICK)

real: $(DEV) weights  ## the tests on SmolLM2, alone and with all threads
	$(PY) -m pytest -m "real and not nightly" --durations=5 --durations-min=2 $(REAL)

mutants: $(DEV)  ## each small wrong change of tests/mutants must fail its named test
	$(ONE_THREAD) $(PY) -m tests.mutants

# The private environments of the tools are kept below build/third-party. Name some: make conformance SUITES="vllm litellm".
conformance: $(DEV)  ## other people's clients and test suites on our server (docs/conformance-suites.md)
	$(ONE_THREAD) $(PY) -m tests.third_party $(SUITES)

pagetools:  ## fetch what checks the playground's page: typescript and axe-core (npm, 25 MB)
	npm install --no-save --no-package-lock --ignore-scripts --silent --prefix build/page typescript@5.9.3 axe-core@4.14.1

models: $(DEV)  ## try every class of transformers, tiny (20 minutes); writes docs/models.md
	$(ONE_THREAD) $(PY) -m tests.models.survey

weights: $(STAMP)  ## fetch SmolLM2-135M into the cache
	@$(PY) -c 'import paceline; paceline.load("smollm2-135m")'

clean:  ## remove the environment and every cache of the tree (not the weights)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# If PYTHON is given and differs from the interpreter of the environment, make the environment again.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(PY)),)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell $(PY) -V 2>&1))
$(STAMP): FORCE
endif
endif
endif

# $(BUSY) marks an install that did not end: the next one starts again from nothing. setuptools is installed first, pinned,
# so that the build of the package fetches nothing unpinned.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Paceline needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another with PYTHON=python3.11.")'
	@if [ -e $(BUSY) ] || [ "$$($(PYTHON) -V 2>&1)" != "$$($(PY) -V 2>&1)" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    echo "[1/4] Make the environment $(VENV) ($$($(PYTHON) -V))."; \
	    rm -rf $(VENV) && mkdir -p $(VENV) && touch $(BUSY) && $(PYTHON) -m venv $(VENV); \
	fi
	@touch $(BUSY)
	@echo "[2/4] Install torch, transformers and numba. This takes one to five minutes."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e .
	@echo "[3/4] Paceline is installed: $(VENV)/bin/paceline."
	@rm -f $(BUSY) $(DEV) $(DOCS) && touch $@

# Development tools. Triton runs the CUDA kernels in its interpreter here. It is not a dependency: it is large (180 MB), torch
# for CUDA brings its own, and other systems have none (the tests that need it are then skipped).
$(DEV): $(STAMP)
	@echo "Install the development tools."
	@$(PIP) --no-build-isolation -e '.[dev]'
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(PIP) --no-deps triton==3.6.0; fi
	@touch $@

$(DOCS): $(STAMP)
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@
