"""``torch.ops.xla_gpu.paged_attention``."""

from functools import partial

import torch

from shared_ffi import paged_attention as op
from torch_frontend._define import define

_ARGUMENTS = (
    "(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, "
    "Tensor query_start_loc, Tensor num_seqs, float scale, SymInt? sliding_window=None, "
    "float? soft_cap=None, *, Tensor? value_cache=None, str? kv_layout=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, bool? causal=True, SymInt? window_right=None, "
    "SymInt? max_query_len=None, Tensor? tree_mask=None, int? value_head_size=None"
)
_CACHES = ("kv_cache", "value_cache")
_ROWS = ("query",)

paged_attention: torch._ops.OpOverload = define(
    f"paged_attention{_ARGUMENTS}) -> Tensor", op.check, _CACHES, _ROWS
)
"""Attention over a paged cache; see ``jax_frontend.paged_attention``.

On XLA devices, give ``num_seqs`` the shape ``[1]``. When the host passes 0 or 1 with the shape
``[]``, torch_xla makes it a constant of the program before the op sees it, and compiles a program
for each of these values.

Faulty lengths and tables are reported at another time than by JAX's function: on CPU tensors at
once, as ValueError; on XLA tensors when the graph runs, as RuntimeError with INVALID_ARGUMENT.
"""

paged_attention_lse: torch._ops.OpOverload = define(
    f"paged_attention.lse{_ARGUMENTS}) -> (Tensor output, Tensor lse)",
    partial(op.check, return_lse=True),
    _CACHES,
    _ROWS,
)
"""``torch.ops.xla_gpu.paged_attention.lse`` also returns the log-sum-exp of the rows, as
``jax_frontend.paged_attention`` does with ``return_lse=True``."""

paged_attention_out: torch._ops.OpOverload = define(
    f"paged_attention.out{_ARGUMENTS}, Tensor(a!) out) -> Tensor(a!)", op.check, _CACHES, _ROWS
)
"""``torch.ops.xla_gpu.paged_attention(..., out=tensor)`` writes the result to a contiguous tensor
and returns it."""
