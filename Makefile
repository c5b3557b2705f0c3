# Two commands set everything up: `make demo` and `make test`. Both build their own virtual environment.
PYTHON ?= $(notdir $(firstword $(shell command -v python3.11 || command -v python3.12) python3.11))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := .venv-newest

unexport PYTHONDONTWRITEBYTECODE # packages are compiled when they are first imported, once for all processes

.DEFAULT_GOAL := help
.PHONY: help demo test test-newest lint types docs wheel bench clean

help: ## print the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: install Python 3.11 or 3.12, or type make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade pip # today's installs twice as fast as that of Python 3.11
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY) ## the paper's synthetic experiment: a run folder and its report, in seconds
	rm -rf runs/demo
	$(BIN)/soseleto demo --out runs/demo

test: $(READY) ## all tests (those on the public data sets need SOSELETO_DATA)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-newest: ## all tests in .venv-newest, with the newest PyTorch, transformers and Lightning (downloads gigabytes)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(READY) ## ruff: style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

docs: $(READY) ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(READY) ## the wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

bench: $(READY) ## the benchmarks, beside plain PyTorch and other packages (minutes)
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/scaling.py --small
	$(BIN)/python benchmarks/data.py --jpegs 4000

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(NEWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
