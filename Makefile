# Everything that README and CI run. Each target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
MODEL ?= gemma3-tiny
# Tests that need no compiled vLLM.
MODELLESS := tests/unit tests/property tests/fuzz tests/engine
MINUTES ?= 30
# The laws get their full number of examples on the other version.
EXAMPLES_033 ?= 200
# Inputs for each target of the coverage-guided fuzzer.
RUNS ?= 100000
# Given on the command line, these reach tools/setup.sh through the environment.

# For `make bench-gsm8k`: the data set's files (fetched where there are none), how many
# questions and shots, and the longest answer.
GSM8K ?= $(wildcard ../shared/data/gsm8k/test.jsonl)
GSM8K_SHOTS ?= $(wildcard ../shared/data/gsm8k/train_head64.jsonl)
QUESTIONS ?= 200
SHOTS ?= 10
MAX_TOKENS ?= 96
DTYPE ?= float32
ARMS ?= none stock junctions
GSM8K_JSON ?= benchmarks/results/gsm8k.json

.PHONY: setup demo bench-gsm8k bench-ttft bench-lookup bench-load \
  test test-tp mutants fuzz soak \
  test-upstream dashboard lint format lock clean

setup:
	@bash tools/setup.sh

demo: setup
	@$(PY) -m benchmarks.demo --model $(MODEL)

bench-gsm8k: setup
	@$(PY) -m benchmarks.gsm8k_shared_prefix --arms $(ARMS) --dtype $(DTYPE) \
	  $(if $(GSM8K),--dataset $(GSM8K)) --questions $(QUESTIONS) \
	  $(if $(GSM8K_SHOTS),--shots-from $(GSM8K_SHOTS)) --shots $(SHOTS) \
	  --max-tokens $(MAX_TOKENS) --json $(GSM8K_JSON)

bench-ttft: setup
	@$(PY) -m benchmarks.ttft_speedup

# TRACE=path; what else there is says `python -m benchmarks.trace_replay --help`.
.PHONY: bench-trace
bench-trace: setup
	@$(PY) -m benchmarks.trace_replay $(if $(TRACE),"$(TRACE)") $(TRACE_ARGS)

# What a store lookup costs, stock beside ours; wants a quiet machine.
bench-lookup: setup
	@$(PY) -m benchmarks.lookup_cost

# What a load from the store costs, straight into KV blocks beside landing memory.
bench-load: setup
	@$(PY) -m benchmarks.load_cost

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

# Two instances on one store, random traffic, resets and faults, all checked.
soak: setup
	$(PY) -m benchmarks.soak --minutes $(MINUTES)

fuzz: setup
	$(PY) -m pip install --quiet -r requirements/fuzz.txt
	$(PY) -m tools.fuzz decoder -runs=$(RUNS)
	$(PY) -m tools.fuzz config -runs=$(RUNS)

# Writes dashboards/junctions.json; a test compares the file with what this makes.
dashboard: setup
	$(PY) -m tools.dashboard

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
	rm -rf .venv .cache build *.egg-info benchmarks/results/*.json benchmarks/results/*.jsonl \
	  benchmarks/results/*.png
