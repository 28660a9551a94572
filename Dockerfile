# JAX and PyTorch on NVIDIA GPUs with this library, built for the generations that GPUS names:
#
#   docker build -t xla-paged-attention .
#   docker run --rm --gpus all xla-paged-attention
#
# The second command tries every backend. The host needs a driver from 580 on, and no CUDA toolkit: pip
# fetches the compiler for the build, and the frameworks bring the libraries that they use.

FROM python:3.12-slim-bookworm AS build

# The compiler is the distribution's own: its version does not matter to the result.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY cmake cmake
COPY shared_ffi shared_ffi
COPY jax_frontend jax_frontend
COPY torch_frontend torch_frontend
COPY xla_paged_attention xla_paged_attention

ARG GPUS=all
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    "--config-settings=cmake.define.XLA_GPU_ARCHITECTURES=${GPUS}"

FROM python:3.12-slim-bookworm

# Inductor compiles for the CPU with g++, and Triton needs a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user

RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "jax[cuda13]>=0.8.0" "torch>=2.9" /wheels/*.whl

USER 1000
WORKDIR /home/user
ENV XLA_PYTHON_CLIENT_PREALLOCATE=false
CMD ["python", "-m", "shared_ffi"]
