"""What the files of this integration call things by."""

from __future__ import annotations

import importlib.metadata

import torch

from shared_ffi import _native

NAME = "xla_gpu"
NAMES = ("CUSTOM", "XLA_GPU")
LATENT_NAME = "XLA_GPU_MLA"
OPS = torch.ops.xla_gpu
REMEDY = "; leave out --attention-backend for vLLM's own attention"
FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SCALE_BYTES = 4
# A row of these is K, its scale, V and its scale. The scales are float32.
DTYPES_WITH_SCALES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}


def unsupported(what: str) -> NotImplementedError:
    """The error that says so."""
    return NotImplementedError(f"{NAME}: {what} is not supported{REMEDY}")


def description(device: torch.device) -> str:
    """What attends on a device: "xla-paged-attention 0.1.0, avx2", for logs."""
    version = importlib.metadata.version("xla-paged-attention")
    kernels = "CUDA" if device.type == "cuda" else _native.cpu_instruction_set()
    return f"xla-paged-attention {version}, {kernels}"
