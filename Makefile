# Every target sets up what it needs: on a fresh machine `make demo` or `make test` is all there is.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: setup demo reproduce test check bench format clean

setup: $(VENV)/.installed  # a virtual environment with the package and all extras

# torch first and alone: its pin must be in place before anything else asks for a range of it.
$(VENV)/.installed: pyproject.toml constraints.txt tests/oracles.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r tests/oracles.txt
	touch $@

demo: setup  # rotated digits: MAP, BMA and ACNML side by side, in demo/report.html
	$(BIN)/acnml demo

reproduce: setup  # a study with its report: make reproduce STUDY=rotated-mnist ARGS="--preset full"
	$(BIN)/python -m studies $(STUDY) $(ARGS)

test: setup  # the test-suite and the doctests
	$(BIN)/python -m pytest

check: setup  # everything CI checks: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: setup  # what predictions cost on this machine, into docs/performance.md
	$(BIN)/python -m benchmarks

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
