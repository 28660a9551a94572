"""Defines ``torch.ops.xla_gpu``: paged attention and its cache update for PyTorch. The ops run on
CPU and CUDA tensors, and on torch_xla's by the same custom calls as in JAX's programs."""

try:
    import torch
except ImportError as _error:
    raise ImportError(
        "torch_frontend needs PyTorch, which is not installed: "
        "pip install 'xla-paged-attention[torch]', or [torch-xla] for XLA devices"
    ) from _error

from shared_ffi import __version__ as __version__
from torch_frontend.batch import (
    Batch,
    BatchHistory,
    BlockPool,
    check_batch,
    pad_batch,
    slot_mapping,
)
from torch_frontend.compilers.aot_inductor import aoti_compile_and_package
from torch_frontend.hadamard import hadamard
from torch_frontend.kv_cache_update import kv_cache_update
from torch_frontend.merge_attention import merge_attention
from torch_frontend.operator.export import export_platform
from torch_frontend.paged_attention import paged_attention
from torch_frontend.ragged_paged_attention import ragged_paged_attention, replace_tpu_kernels
from torch_frontend.simple_add import simple_add
from torch_frontend.varlen_attention import varlen_attention

del torch

__all__ = [
    "Batch",
    "BatchHistory",
    "BlockPool",
    "aoti_compile_and_package",
    "check_batch",
    "export_platform",
    "hadamard",
    "kv_cache_update",
    "merge_attention",
    "pad_batch",
    "paged_attention",
    "ragged_paged_attention",
    "replace_tpu_kernels",
    "simple_add",
    "slot_mapping",
    "varlen_attention",
]
