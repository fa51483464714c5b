# Every target makes or refreshes the virtual environment by itself.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More than cores: most tests wait for a server most of the time.
WORKERS ?= 4
# A worker begins with three seconds of imports, and then its tests wait half of the time.
QUICK_WORKERS ?= 6
PIP := PYTHONWARNINGS=ignore $(BIN)/pip install -qq --no-build-isolation
PACKAGES := brokers circuit cli consumer core dlq idempotency outbox retry sagas spark_jobs testing tracing
# Importing `outbox` from the root would make a second copy of holdfast.outbox.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Whatever the environment says: hundreds of programs are started, and none should be compiled anew.
export PYTHONDONTWRITEBYTECODE :=

# The editable install is a tree of links, so it is refreshed when a file comes or goes.
FILES := $(shell find $(PACKAGES) -name '*.py' -o -name '*.sql' -o -name 'py.typed' -o -name 'vectors.json' | LC_ALL=C sort)
PRINT := $(shell { cat pyproject.toml; echo $(FILES); } | cksum | cut -d' ' -f1)
BASE := $(VENV)/base-$(PRINT)
DEV := $(VENV)/dev-$(PRINT)

.PHONY: help demo quick test check bench chaos clean servers spark-dist

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Holdfast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel

$(BASE): | $(VENV)/bin/python
	@rm -f $(VENV)/base-*
	$(PIP) -e .
	@rm -rf *.egg-info  # stale metadata beside the tests would shadow the installed one
	@touch $@

$(DEV): $(BASE)
	@rm -f $(VENV)/dev-*
	$(PIP) -e '.[dev]'
	@rm -rf *.egg-info
	@touch $@

demo: $(BASE) ## the main job on SQLite alone: nothing lost, nothing twice
	@$(BIN)/python examples/demo.py

servers: $(DEV) ## install the real servers that the tests start
	@$(BIN)/python tests/servers/install.py

quick: $(DEV) ## the tests that need no server and start no programs
	$(if $(wildcard /dev/shm/.),TMPDIR=/dev/shm) \
	  $(BIN)/python -m pytest -m "not chaos" --quick -n $(QUICK_WORKERS) --dist worksteal $(ARGS)

test: $(DEV) servers ## install everything, start the real servers, run every test
	$(BIN)/python -m pytest -m "not chaos" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(DEV) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(DEV) servers ## measure against peers and raw floors (ONLY=core,redis for some)
	$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY))

chaos: $(DEV) servers ## the long fault runs, and an hour of work beside them
	$(BIN)/python -m pytest -m chaos --timeout 3600 -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

spark-dist: $(DEV) ## build what a Spark cluster needs: wheel, zip, job file, packed environment
	@$(BIN)/python deploy/spark/build.py

clean: ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .logs
