"""``torch.ops.xla_gpu.kv_cache_update``."""

import torch

from shared_ffi import kv_cache_update as op
from torch_frontend._define import define

kv_cache_update: torch._ops.OpOverload = define(
    "kv_cache_update(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slot_mapping, *, "
    "Tensor(b!)? value_cache=None, str? kv_layout=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None) -> ()",
    op.check,
    strided=("kv_cache", "value_cache"),
    rows=("key", "value"),
)
"""Writes keys and values into ``kv_cache``, in place; see ``jax_frontend.kv_cache_update``. Unlike
JAX's function, it returns nothing."""
