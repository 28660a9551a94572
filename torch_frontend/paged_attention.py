"""``torch.ops.xla_gpu.paged_attention``."""

from shared_ffi import paged_attention as op
from torch_frontend._library import define

paged_attention = define(
    "paged_attention(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, "
    "Tensor query_start_loc, Tensor num_seqs, float scale, int? sliding_window=None, "
    "float? soft_cap=None) -> Tensor",
    op.check,
)
"""Causal attention over a paged cache; see ``jax_frontend.paged_attention``.

On XLA devices, give ``num_seqs`` the shape ``[1]``. One of shape ``[]`` that comes from the host as
0 or 1 is made a constant of the program by torch_xla, before the op sees it, and then a program is
compiled for each of these values.

It differs from JAX's in when faulty lengths and tables are reported: on CPU tensors at once, as
ValueError; on XLA tensors when the graph runs, as RuntimeError with INVALID_ARGUMENT.
"""
