# Every target installs what it needs: on a fresh machine `make demo` or `make test` is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo playground page reproduce test rest fuzz lint types check bench format docs numbers release-check clean

help:  # list the targets
	@grep -hE '^[a-z-]+:.*# ' $(MAKEFILE_LIST) | awk -F ':.*# ' '{printf "make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  # create a virtual environment with the package and all extras

# torch comes first: its pin must be in place before another package asks for a range of versions.
$(VENV)/.light: pyproject.toml constraints.txt tests/oracles.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps -r tests/oracles.txt
	touch $@

$(VENV)/.installed: $(VENV)/.light tests/laplace.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r tests/laplace.txt
	touch $@

demo: setup  # acnml.calibrate and its rivals on rotated digits; writes demo/report.html
	$(BIN)/python -m studies demo

playground: page  # draw digits in a browser and see what three methods say; needs Node.js 20 and npm
	$(BIN)/python -m playground.server

page: setup playground/node_modules/.installed  # train the playground's network and build its page
	$(BIN)/python -m playground
	cd playground && npm run build

playground/node_modules/.installed: playground/package.json playground/package-lock.json
	@command -v npm > /dev/null || { echo "The playground needs Node.js 20.19, 22.12 or newer, with npm."; exit 1; }
	cd playground && npm ci
	touch $@

reproduce: setup  # run a study: make reproduce STUDY=rotated-mnist ARGS="--preset full"
	$(BIN)/python -m studies $(STUDY) $(ARGS)

test: $(VENV)/.light  # test the library; installs only what that needs
	$(BIN)/python -m pytest

# The site and the playground are tested as they are built. Without npm, the playground's tests are skipped.
rest: setup docs $(if $(shell command -v npm),page)
	$(BIN)/python -m pytest tests/integrations tests/site tests/studies src studies

N ?= 10000
fuzz: setup  # generated networks, files, inputs and settings: make fuzz N=10000 ARGS="--first 5000"
	$(BIN)/python -m fuzz --cases $(N) $(ARGS)

lint: setup  # check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  # check types
	$(BIN)/mypy

check: test lint types rest release-check  # everything that CI runs: the library, then format, lint, types and all extras

format: setup  # format the code and fix lint where possible
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  # measure the cost of predictions; updates docs/performance.md
	$(BIN)/python -m benchmarks

docs: setup  # build the documentation site, with warnings as errors; writes build/docs/index.html
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs

numbers: setup  # write current numbers and tables from docs/results into the pages
	$(BIN)/python docs/_ext/results.py

release-check: setup  # build, check, install and try what a release would publish, without publishing it
	$(BIN)/python .ci/release_check.py

clean:  # remove the virtual environment, the caches, the demo and the playground's page
	rm -rf $(addprefix playground/,node_modules build dist model)
	rm -rf $(VENV) build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
