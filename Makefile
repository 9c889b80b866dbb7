# Everything a developer or a first user types. `make help` lists it.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup run demo test check format docs bench bench-engine bench-fleet bench-assembly bench-matching bench-moving bench-observe bench-reuse bench-peers bench-prefix bench-serve bench-policies bench-responses bench-semantic bench-tiers bench-codecs bench-dashboard bench-retention bench-retention-oneshot bench-gateway bench-planner bench-weights test-fleet soak soak-tier bench-tenants soak-sim screenshots lock clean

help:  ## Show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## Make the virtual environment with everything pinned in requirements.lock

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

run: setup  ## Fetch the default model (once), serve it, print the address; Ctrl-C stops
	$(BIN)/ostinato serve

demo: setup  ## Hold a three-turn conversation through the openai client and show what was reused
	$(BIN)/python examples/demo.py

test: setup  ## Run all tests
	$(BIN)/python -m pytest -n auto --dist loadfile -q

check: setup  ## Format, lint, import rules, types, docs, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python -m cogapp --check -P README.md docs/*.md
	$(MAKE) docs
	$(MAKE) test

format: setup  ## Format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m cogapp -r -P README.md docs/*.md

docs: setup  ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

bench: bench-engine bench-prefix bench-serve bench-tiers bench-codecs bench-policies  ## Run all benchmarks; results go to benchmarks/results

bench-engine: setup  ## Steps with many sequences in them, and the pause between tokens under load
	$(BIN)/python benchmarks/engine.py

bench-prefix: setup  ## Prefix reuse against plain transformers
	$(BIN)/python benchmarks/prefix.py

bench-tiers: setup  ## The shared tier: bandwidth, restart, what it costs
	$(BIN)/python benchmarks/tiers.py

bench-codecs: setup  ## KV in fewer bits: size, speed, and what it does to answers
	$(BIN)/python benchmarks/codecs.py

bench-retention: setup  ## What a KV budget does to answers, method by method; in parts of 20 minutes
	$(BIN)/python benchmarks/retention.py

bench-retention-oneshot: setup  ## What methods keep that drop once, knowing all; what uneven budgets gain; 10 minutes
	$(BIN)/python benchmarks/retention_oneshot.py

soak-tier: setup  ## Five minutes of eight processes on one shared tier, with kills, quotas and purges
	rm -rf build/soak && $(BIN)/python tests/kv/tiers/soak.py build/soak --seconds 300

bench-tenants: setup  ## What a tenant can tell of others by the clock; what quotas cost
	$(BIN)/python benchmarks/tenants.py

soak: setup  ## Ten minutes of mixed traffic through an engine with a tier; is memory flat?
	$(BIN)/python benchmarks/soak.py

test-fleet: setup  ## A router before three real workers, one of them killed under load
	OSTINATO_FLEET_TESTS=1 $(BIN)/python -m pytest -q tests/gateway/test_fleet.py

bench-weights: setup  ## Linear layers in eight bits: speed, and what it does to answers
	$(BIN)/python benchmarks/weights.py

bench-policies: setup  ## Eviction policies on recorded traces, against the optimum
	$(BIN)/python benchmarks/policies.py

soak-sim: setup  ## Two hours of mixed traffic with faults in the simulator: memory stays flat
	$(BIN)/python benchmarks/soak_sim.py

bench-fleet: setup  ## A fleet: routed by prefix against taking turns, simulated on recorded traffic
	$(BIN)/python benchmarks/fleet.py $(FLEET_OPTIONS)

bench-planner: setup  ## Vendors' prompt caches: planned breakpoints against none, and against the optimum
	$(BIN)/python benchmarks/planner.py

bench-gateway: setup  ## What the gateway adds to requests and events, beside LiteLLM's proxy; its memory
	$(BIN)/python benchmarks/gateway.py

bench-assembly: setup  ## One more turn of a long conversation, and agent sessions, to token ids
	$(BIN)/python benchmarks/assembly.py

bench-matching: setup  ## Finding what came back elsewhere in a prompt, among ten million tokens
	$(BIN)/python benchmarks/matching.py

bench-moving: setup  ## Moving the KV of 4,096 tokens, against copying it
	$(BIN)/python benchmarks/moving.py

bench-observe: setup  ## What metrics and trace cost; /metrics with 1,000 prompt names
	$(BIN)/python benchmarks/observe.py

bench-reuse: setup  ## KV moved from elsewhere: quality, method by method, and time to the first token; in parts of 20 minutes
	$(BIN)/python benchmarks/reuse.py

bench-responses: setup  ## What a kept answer takes; calls that a thousand equal requests make
	$(BIN)/python benchmarks/responses.py

bench-dashboard: setup  ## What the dashboard costs, and how large its picture of the tree is
	$(BIN)/python benchmarks/dashboard.py

screenshots: setup  ## Make the pictures of docs/tour.md (two minutes; needs Chromium)
	$(BIN)/python tests/dashboard/screenshots.py

bench-semantic: setup  ## What the semantic cache serves, and what it serves wrongly
	$(BIN)/python benchmarks/semantic.py

bench-serve: setup  ## What the server adds to the engine
	$(BIN)/python benchmarks/serve.py

bench-peers: setup  ## vLLM, transformers and KVBoost over HTTP, each installed in build/peers
	$(BIN)/python benchmarks/peers.py $(PEERS_OPTIONS)

lock:  ## Renew requirements.lock from pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade pip 'torch==2.13.0' -e '.[dev,docs]'
	(echo '# Made by `make lock`. The exact environment of `make setup` and of CI.'; \
	 build/lock/bin/python -m pip freeze --all --exclude-editable | sed 's/+cpu//') > requirements.lock

clean:  ## Remove what was built (not the model store)
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
