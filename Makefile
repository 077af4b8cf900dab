# Everything that README and CI run. Each target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
MODEL ?= gemma3-tiny
# Tests that need no compiled vLLM.
MODELLESS := tests/unit tests/property tests/fuzz tests/engine
LAWS := tests/property
MINUTES ?= 30
# Examples of each law on this version and the other; of "never worse" 1,000 on both.
EXAMPLES_032 ?= 500
EXAMPLES_033 ?= 200
NEVER_WORSE := tests/property/test_never_worse.py
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

.PHONY: setup demo bench-gsm8k bench-ttft bench-lookup bench-load test test-modelless test-parts \
  test-laws test-033 test-033-never-worse test-e2e test-e2e-apart test-e2e-shared \
  test-e2e-waiting \
  test-tp mutants fuzz soak test-upstream dashboard lint format lock clean

setup:
	@bash tools/setup.sh

demo: setup
	@$(PY) -m benchmarks.demo --model $(MODEL) $(if $(PATCHED),--patched) \
	  $(if $(DECLARED),--declared)

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

# What recording traffic costs a step; how long a plan of a million requests takes; and
# whether plans predict what real servers count.
.PHONY: bench-record bench-plan bench-plan-check
bench-record: setup
	@$(PY) -m benchmarks.record_cost

bench-plan: setup
	@$(PY) -m benchmarks.plan_cost

bench-plan-check: setup
	@$(PY) -m benchmarks.plan_check

# What predicted tails cost a request, and are worth on made-up traffic, kind by kind.
TRAFFIC ?= documents chats branching-chats agents editing-agents tool-calls unrelated mixture
.PHONY: bench-placement
bench-placement: setup
	@$(PY) -m benchmarks.placement_cost
	@for kind in $(TRAFFIC); do \
	  $(PY) -m benchmarks.trace_replay --traffic $$kind --intervals 16384 \
	    --json benchmarks/results/placement.$$kind.json \
	    --picture benchmarks/results/placement.$$kind.png $(TRACE_ARGS) || exit; \
	done

# Many documents with two questions each: stock, junctions, predicted and declared tails.
DOCUMENTS ?= 8
.PHONY: bench-documents
bench-documents: setup
	@$(PY) -m benchmarks.many_documents --documents $(DOCUMENTS)

# What a store lookup costs, stock beside ours; wants a quiet machine.
bench-lookup: setup
	@$(PY) -m benchmarks.lookup_cost

# What a load from the store costs, straight into KV blocks beside landing memory.
bench-load: setup
	@$(PY) -m benchmarks.load_cost

test: test-modelless
	$(MAKE) test-e2e

# Each of the four keeps one core busy, so two at a time; what they print comes when
# they end. The longest come first.
test-modelless: setup
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target \
	  test-parts test-laws test-033 test-033-never-worse

test-laws: setup
	$(PY) -m pytest $(NEVER_WORSE)
	JUNCTIONS_EXAMPLES=$(EXAMPLES_032) $(PY) -m pytest $(LAWS) --ignore=$(NEVER_WORSE)

test-parts: setup
	$(PY) -m pytest $(filter-out $(LAWS),$(MODELLESS)) tests/packaging

test-033-never-worse: setup
	@echo "On vLLM 0.33.0:"
	PYTHONPATH=.cache/runtime-0.33.0 $(PY) -m pytest $(NEVER_WORSE)

# Tools, benchmarks, test bed and decoders know nothing of the vLLM that is imported.
OF_ONE_VERSION := $(addprefix --ignore=tests/unit/,tools benchmarks testbed)
test-033: setup
	@echo "The same without model execution on vLLM 0.33.0:"
	JUNCTIONS_EXAMPLES=$(EXAMPLES_033) PYTHONPATH=.cache/runtime-0.33.0 \
	  $(PY) -m pytest -m "not slow" $(filter-out tests/fuzz,$(MODELLESS)) \
	  --ignore=$(NEVER_WORSE) $(OF_ONE_VERSION)

# A start is three imports of vLLM one after another, so parts side by side: tests that
# start what they need, those that share servers, and those that wait for Mooncake. Ten
# servers at most, 18 GiB: one part after the other where there is less.
E2E_JOBS ?= $(shell awk '/MemAvailable/ {print 1 + 2 * ($$2 > 20e6)}' /proc/meminfo)
APART := $(addprefix tests/e2e/test_,demo.py faults.py settings.py soak.py)
WAITING := tests/e2e/test_late_transfers.py
test-e2e: setup
	@$(MAKE) --no-print-directory --jobs=$(or $(E2E_JOBS),1) --keep-going \
	  --output-sync=target test-e2e-apart test-e2e-shared test-e2e-waiting

test-e2e-apart: setup
	$(PY) -m pytest -m "not quiet" $(APART)

test-e2e-shared: setup
	$(PY) -m pytest -m "not quiet" tests/e2e $(addprefix --ignore=,$(APART) $(WAITING))

test-e2e-waiting: setup
	$(PY) -m pytest $(WAITING)

# Two ranks keep two cores busy: on a machine with no more, Mooncake's transfers
# between them stall now and then, so this is no part of `make test`.
test-tp: setup
	$(PY) -m pytest -m quiet tests/e2e

# The two-instance tests REPEATS times beside a busy process; counts what retries hide.
REPEATS ?= 30
.PHONY: e2e-repeat
e2e-repeat: setup
	$(PY) -m tools.repeat_e2e --runs $(REPEATS)

# BOTH=1: all tests on stock too, not only those that do not pass with the hooks on.
test-upstream: setup
	$(PY) -m tools.upstream $(if $(BOTH),--both)

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

# The in-tree series: as a branch in TREE (default: copies of the released sources,
# one a version, below .cache/) and as files in patches/.
.PHONY: patches
patches: setup
	@$(PY) -m tools.series $(if $(TREE),--tree "$(TREE)") \
	  $(if $(VERSION),--version $(VERSION)) $(if $(WITHOUT),--without $(WITHOUT))

# The patched vLLM of each version, without the overlay; EXAMPLES of each law. With
# EACH=1 vLLM's suites on each commit alone instead.
.PHONY: test-patched
test-patched: setup
	$(PY) -m tools.series.check --examples $(or $(EXAMPLES),1000) \
	  $(if $(EACH),--parts) $(ONLY)

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
