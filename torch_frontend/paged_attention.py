"""``torch.ops.xla_gpu.paged_attention``, and its function with types and a docstring."""

from __future__ import annotations

from functools import partial
from typing import Literal, SupportsFloat, TypedDict, Unpack, overload

import torch

from shared_ffi import paged_attention as op
from shared_ffi.spec import dtype_error, number, value_error
from torch_frontend.operator.arguments import checked, scale_tensor, split_causal, takes_causal_seqs
from torch_frontend.operator.define import define

_ARGUMENTS = (
    "(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, "
    "Tensor query_start_loc, Tensor num_seqs, float scale, SymInt? sliding_window=None, "
    "float? soft_cap=None, *, Tensor? value_cache=None, str? kv_layout=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_global=None, Tensor? v_global=None, "
    "Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, bool? causal=True, SymInt? window_right=None, "
    "SymInt? max_query_len=None, Tensor? tree_mask=None, int? value_head_size=None, "
    "Tensor? bidirectional_ranges=None, Tensor? causal_seqs=None, str? codes=None"
)
_STRIDED = ("kv_cache", "value_cache", "k_scale", "v_scale")
_ROWS = ("query",)
_CHECK = takes_causal_seqs(op.check)

DEFAULT = define(f"paged_attention{_ARGUMENTS}) -> Tensor", _CHECK, _STRIDED, _ROWS)
LSE = define(
    f"paged_attention.lse{_ARGUMENTS}) -> (Tensor output, Tensor lse)",
    partial(_CHECK, return_lse=True),
    _STRIDED,
    _ROWS,
)
OUT = define(
    f"paged_attention.out{_ARGUMENTS}, Tensor(a!) out) -> Tensor(a!)", _CHECK, _STRIDED, _ROWS
)
_DEFAULT, _LSE, _OUT = (checked(op.OP, overload) for overload in (DEFAULT, LSE, OUT))


class _Options(TypedDict, total=False):
    value_cache: torch.Tensor | None
    kv_layout: str | None
    k_scale: torch.Tensor | float | None
    v_scale: torch.Tensor | float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    tree_mask: torch.Tensor | None
    bidirectional_ranges: torch.Tensor | None
    causal: bool | torch.Tensor
    window_right: int | None
    max_query_len: int | None
    value_head_size: int | None
    codes: str | None
    k_global: torch.Tensor | float | None
    v_global: torch.Tensor | float | None


@overload
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: SupportsFloat,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: SupportsFloat,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: SupportsFloat | None = None,  # required: None is for a message that names it
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: torch.Tensor | None = None,
    kv_layout: str | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    bidirectional_ranges: torch.Tensor | None = None,
    causal: bool | torch.Tensor = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    codes: str | None = None,
    k_global: torch.Tensor | float | None = None,
    v_global: torch.Tensor | float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed query tokens over a paged key/value cache.

    Prefill, chunked prefill, decode, and any mix of them in one call, on CPU, CUDA and XLA tensors,
    in ``torch.compile`` and without it. All tensors are on one device. The operator itself is
    ``torch.ops.xla_gpu.paged_attention``, with the overloads ``default``, ``lse`` and ``out``.

    The optional arguments mean what they mean in ``jax_frontend.paged_attention``, which defines
    the op.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, float16 or bfloat16: the tokens of
            all sequences, one sequence after the other, then padding. May be a slice of a fused
            projection.
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, dtype of ``query``, or
            float8_e4m3fn, float8_e5m2, int8 or uint8; the K of kv head h at index 2h, its V at
            2h + 1. uint8 holds two numbers of 4 bits in an element, and has ``head_size / 2``
            elements in a row. May be a strided view.
        context_lens: ``[max_seqs]`` int32: tokens of the sequence in the cache, this call's
            included. At most 2**31 - 1024.
        block_tables: ``[max_seqs, max_blocks_per_seq]`` int32: the blocks of the sequence.
        query_start_loc: ``[max_seqs + 1]`` int32: where the tokens of each sequence begin.
        num_seqs: ``[]`` or ``[1]`` int32: how many sequences there are. On XLA devices use
            ``[1]``: torch_xla makes a 0 or 1 of shape ``[]`` a constant, and compiles a program for
            each of the two.
        scale: factor of ``q . k``, usually ``head_size ** -0.5``; outside of ``torch.compile`` it
            may be a float tensor ``[]``, which the host waits for.
        sliding_window: how many positions a query attends to, itself included. None: all.
        soft_cap: c turns a logit into ``c * tanh(logit / c)``. None: off.
        value_cache: the V, if K and V are two tensors. Its head size may be smaller, and is then
            that of the output. One of the two may be int8 and the other of 4 bits.
        kv_layout: which dimension is which, such as ``"n2bhd"``.
        k_scale: what the keys in a cache of 8 or 4 bits are multiplied by, float32, or a number.
            int8 and uint8 need it: 1.0 keeps whole numbers.
            A tensor with a dimension of groups also float16, bfloat16, float8_e4m3fn or
            float8_e8m0fnu. May be a strided view, as where pages hold codes and scales.
        v_scale: the same for the values.
        sinks: ``[num_heads]`` float32, one more logit for each head.
        alibi_slopes: ``[num_heads]`` float32.
        tree_mask: ``[num_tokens, 2]`` int32, for draft trees of speculative decoding.
        bidirectional_ranges: ``[num_tokens, 2]`` int32: a token also attends to these positions of
            its sequence, from the first number up to but not including the second.
        causal: False lets a query attend to later positions. ``[max_seqs]`` integers or bool: for
            each sequence; the operator's argument for it is ``causal_seqs``.
        window_right: how many of them.
        max_query_len: a promise that no sequence has more query tokens.
        value_head_size: for multi-head latent attention, where V is a part of K.
        return_lse: also return the log-sum-exp of each row, for ``merge_attention``.
        codes: "e2m1" says that uint8 holds floats of 4 bits, as float4_e2m1fn_x2 does without it.
        k_global: a float32 factor of all scales of groups of the keys, or a number.
        v_global: the same for the values.
        out: a contiguous tensor for the result, which is returned. Not with ``return_lse``.

    Returns:
        ``[num_tokens, num_heads, head_size]``, dtype of ``query``; the head size is that of V, if
        it has one of its own. With ``return_lse`` also ``[num_tokens, num_heads]`` float32.

    Raises:
        ValueError: a shape or a value is wrong, or tensors are on several devices. On CPU tensors
            also lengths or tables that contradict each other or point outside the pool. On XLA
            tensors these are a RuntimeError with INVALID_ARGUMENT when the graph runs; on CUDA the
            rows are NaN, and ``shared_ffi.paged_attention.check_values`` says why.
        TypeError: a dtype or type is wrong.
        NotImplementedError: a tensor requires grad: the op has no derivative.
    """
    if isinstance(scale, torch.Tensor) and not torch.compiler.is_compiling():
        scale = number(scale)
    causal, causal_seqs = split_causal(causal)
    k_scale, v_scale, k_global, v_global = (
        scale_tensor(x, kv_cache) for x in (k_scale, v_scale, k_global, v_global)
    )
    if not isinstance(return_lse, bool):
        raise dtype_error(op.OP, "return_lse", "type bool", type(return_lse).__name__)
    if out is not None and return_lse:
        got, remedy = f"shape {[*out.shape]}", "Pass one of the two"
        raise value_error(op.OP, "out", "be None with return_lse", got, remedy)
    call = _LSE if return_lse else _DEFAULT if out is None else _OUT
    return call(  # type: ignore[no-any-return]
        *(query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs),
        *(scale, sliding_window, soft_cap),
        value_cache=value_cache,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        tree_mask=tree_mask,
        bidirectional_ranges=bidirectional_ranges,
        causal=causal,
        window_right=window_right,
        max_query_len=max_query_len,
        value_head_size=value_head_size,
        causal_seqs=causal_seqs,
        codes=codes,
        k_global=k_global,
        v_global=v_global,
        **({} if out is None else {"out": out}),
    )
