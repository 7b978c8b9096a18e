# `make demo` and `make test` are all a new user needs: each sets up its own environment first.
# `make test-all` adds what is marked slow: kernels compiled for six GPUs, and the longest sweeps.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test workers; one torch thread each.
WORKERS ?= 2
MARKS ?= not slow

# `make unit` tests the newest versions that we claim, of constraints.txt; `make hf-oldest` these.
OLDEST_TRANSFORMERS := 5.14.0
OLDEST_SERVER := fastapi==0.115.0 uvicorn==0.30.0
OLDEST := build/transformers-$(OLDEST_TRANSFORMERS)
LM_EVAL := build/lm-eval
LM_EVAL_PACKAGES := 'lm_eval[hf,ruler]' scipy

.PHONY: setup demo test test-all lint types unit kernels hf-oldest lm-eval docs dist clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,train,browser]'
	touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/nsa train --config tiny --out runs/demo

test: lint types unit kernels

test-all:
	$(MAKE) test MARKS=
	$(MAKE) hf-oldest
	$(MAKE) docs

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

# An environment in the target's folder, beside the packages of .venv, which a line of a .pth file makes visible.
define venv_beside
	$(PYTHON) -m venv $(@D)
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$site')" > \
	    $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(1)
	touch $@
endef

$(OLDEST)/.ready: $(VENV)/.ready
	$(call venv_beside,transformers==$(OLDEST_TRANSFORMERS) $(OLDEST_SERVER))

hf-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest tests/hf tests/serving -m "not slow" -n $(WORKERS) --dist worksteal

# Not a part of test-all: lm-eval-harness brings 400 MB of packages that nothing else needs.
$(LM_EVAL)/.ready: $(VENV)/.ready
	$(call venv_beside,--constraint constraints.txt $(LM_EVAL_PACKAGES))

lm-eval: $(LM_EVAL)/.ready
	$(LM_EVAL)/bin/python -m pytest tests/evaluation/test_harness.py

# The site, in build/site: open index.html. A broken link is an error, and so is anything loaded from the network.
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# An sdist, and the wheel that it gives; tests/test_release.py installs such a wheel.
dist: setup
	rm -rf dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
