# `make demo` and `make test` are all a new user needs: each sets up its own environment first.
# `make test-all` adds what is marked slow: kernels compiled for six GPUs, and the longest sweeps.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test workers; one torch thread each.
WORKERS ?= 2
MARKS ?= not slow

.PHONY: setup demo test test-all lint types unit kernels clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,train]'
	touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/nsa train --config tiny --out runs/demo

test: lint types unit kernels

test-all:
	$(MAKE) test MARKS=

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest tests --ignore tests/kernels -m "$(MARKS)" -n $(WORKERS) --dist worksteal

# Triton's interpreter runs the kernels without a GPU; it is chosen when Triton is imported, hence a process of its own.
kernels: setup
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels -m "$(MARKS)" -n $(WORKERS) --dist worksteal

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
