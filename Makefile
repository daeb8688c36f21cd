# `make demo` and `make test` need only Python >= 3.11 and make: the first call creates .venv and installs constraints.txt into it.

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PYTEST_ARGS ?=

DEMO_TIERS := --tier dram:1GiB --tier 'file:demo-results?size=1GiB'
DEMO_COMMAND := load-vs-recompute qwen3-0.6b --measure $(DEMO_TIERS) --tokens 256,1024,4096,16384

# Three quarters of the demo's prefixes fit into no single small tier, so each one is asked.
DEMO_REPLAY := replay demo --limit 20 --pairs 4 --arm recompute --arm hbm@hbm=20MiB \
	--arm hbm+dram@hbm=20MiB+dram=32MiB --arm hbm+dram+file@hbm=20MiB+dram=32MiB+file

GPU_PLANS := h2d d2h duplex page-sweep layouts overlap contention

.PHONY: demo test check samples gpu clean install

## demo: this machine's own memory and file bandwidth, load against recompute on them, then a replay on the built-in engine
demo: $(INSTALLED)
	@mkdir -p demo-results
	$(BIN)/kvbench $(DEMO_COMMAND) --out demo-results/load-vs-recompute.json --html demo-results/load-vs-recompute.html
	$(BIN)/kvbench $(DEMO_REPLAY) --out demo-results/replay.json --html demo-results/replay.html

## test: the whole test suite
test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

## check: formatter, linter, strict types, import contracts, then exactly `make test`
check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(MAKE) test

## samples: make sample_reports/ again; fails on purpose when a file changed, so that nobody commits it unread
samples: $(INSTALLED)
	$(BIN)/python sample_reports/regenerate.py

## gpu: tests/live, the transfer plans and the demo on this host's GPU, results into sample_reports/gpu/
gpu: $(INSTALLED)
	@nvidia-smi -L 2>/dev/null || { echo "make gpu: no NVIDIA GPU on this host (nvidia-smi does not run); nothing was run"; exit 1; }
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make gpu: the torch in $(VENV) cannot use the GPU (a CPU build?); nothing was run"; exit 1; }
	$(BIN)/pytest -m live tests/live
	@mkdir -p demo-results sample_reports/gpu
	$(BIN)/kvbench $(DEMO_COMMAND) --out sample_reports/gpu/load-vs-recompute.json
	@echo "recorded load-vs-recompute: kvbench $(DEMO_COMMAND)" > sample_reports/gpu/commands.txt
	@for plan in $(GPU_PLANS); do \
	  $(BIN)/kvbench probe $$plan --set time=2s --set total=40s --out sample_reports/gpu/$$plan.json > /dev/null || exit 1; \
	  echo "recorded $$plan: kvbench probe $$plan --set time=2s --set total=40s" >> sample_reports/gpu/commands.txt; \
	done
	$(BIN)/python sample_reports/regenerate.py sample_reports/gpu || true
	@cat sample_reports/gpu/load-vs-recompute.txt
	@for plan in $(GPU_PLANS); do echo; head -40 sample_reports/gpu/$$plan.txt; done

## clean: everything that make and the tools left behind, .venv included
clean:
	rm -rf $(VENV) build dist demo-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kvbench tests sample_reports -name __pycache__ -prune -exec rm -rf {} +

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 on PATH; install one, or say which: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv"; exit 1; }
	@echo "Installing kvbench and its tested dependencies into $(VENV) (torch is among them: the first time takes minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,torch,plot,s3,redis,etcd,mooncake,nixl]' -c constraints.txt
	@touch $@
