# Two commands need nothing but Python 3.11 and make:  make demo   make test
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
# One thread a process: tests run in two processes, and small products gain nothing from more.
WORKERS ?= 2

.PHONY: demo test compiled lint nightly fuzz docs browser clean help

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: $(VENV)/installed  ## set up, and run the main job on an embedded default
	$(BIN)/tnfn demo --out demo

# The report is tested in a real browser. Where there is none and none can be installed, those
# tests are skipped and say so.
browser:         ## Chromium, for the tests of the report
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no Chromium here: the report's browser tests will be skipped"

# Many tests start `tnfn`, which takes two thirds of the time where its modules are compiled.
compiled: $(VENV)/installed
	@$(BIN)/python -m compileall -q src tests benchmarks tools

test: compiled browser  ## set up, and run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25

lint: $(VENV)/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

nightly: compiled browser  ## the slow checks too
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'nightly or not nightly'

fuzz: $(VENV)/installed  ## 5,000 damaged inputs of every command
	$(BIN)/python tests/fuzz/fuzz.py --inputs 5000

docs: $(VENV)/installed  ## the documentation, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:           ## what make wrote
	rm -rf $(VENV) site demo
