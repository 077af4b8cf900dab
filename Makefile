# Everything that README and CI run. Each target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
MODEL ?= gemma3-tiny
# Tests that need no compiled vLLM.
MODELLESS := tests/unit tests/property tests/engine
# The laws get their full number of examples on the other version.
EXAMPLES_033 ?= 200
# Given on the command line, these reach tools/setup.sh through the environment.

.PHONY: setup demo bench-lookup test test-tp mutants test-upstream lint format lock clean

setup:
	@bash tools/setup.sh

demo: setup
	@$(PY) -m benchmarks.demo --model $(MODEL)

# What a store lookup costs, stock beside ours; wants a quiet machine.
bench-lookup: setup
	@$(PY) -m benchmarks.lookup_cost

test: setup
	$(PY) -m pytest $(MODELLESS)
	$(PY) -m pytest -m "not quiet" tests/packaging tests/e2e
	@echo "The same without model execution on vLLM 0.33.0:"
	JUNCTIONS_EXAMPLES=$(EXAMPLES_033) PYTHONPATH=.cache/runtime-0.33.0 \
	  $(PY) -m pytest $(MODELLESS)

# Two ranks keep two cores busy: on a machine with no more, Mooncake's transfers
# between them stall now and then, so this is no part of `make test`.
test-tp: setup
	$(PY) -m pytest -m quiet tests/e2e

test-upstream: setup
	$(PY) -m tools.upstream

# Plants bugs in copies of the package; the tests have to catch every one.
mutants: setup
	$(PY) -m tools.mutations

lint: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy -p vllm.junctions

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lock:
	bash tools/lock.sh

clean:
	rm -rf .venv .cache build *.egg-info benchmarks/results/*.json benchmarks/results/*.png
