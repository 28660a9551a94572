"""``torch.ops.xla_gpu.varlen_attention``, its derivative, and its function with types."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shared_ffi import varlen_attention as op
from shared_ffi import varlen_attention_backward as backward
from torch_frontend.operator.arguments import (
    TensorArguments,
    checked,
    split_causal,
    takes_causal_seqs,
)
from torch_frontend.operator.define import define
from torch_frontend.operator.dtensor import sharded_as

_INPUTS = "Tensor query, Tensor key, Tensor value"
_BATCH = (
    "Tensor query_start_loc, Tensor num_seqs, float scale, SymInt? sliding_window=None, "
    "float? soft_cap=None, *, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "Tensor? bidirectional_ranges=None, bool? causal=True, SymInt? window_right=None, "
    "SymInt? max_query_len=None, Tensor? causal_seqs=None, Tensor? prefix_seqs=None"
)


class _Attention(torch.autograd.Function):
    """A call with a derivative. The log-sum-exp has none."""

    @staticmethod
    def forward(ctx: Any, arguments: TensorArguments, *tensors: torch.Tensor) -> Any:
        output, lse = _without_autograd(LSE, arguments, tensors)
        ctx.names, ctx.options = arguments.names, dict(arguments.options)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> Any:
        *tensors, output, lse = ctx.saved_tensors
        given = dict(zip(ctx.names, tensors, strict=True)) | ctx.options
        found = BACKWARD(**given, output=output, lse=lse, dout=sharded_as(output, dout))
        names = [name for name in op.DIFFERENTIABLE if name in ctx.names]
        gradients = dict(zip(names, found, strict=True))
        return None, *map(gradients.get, ctx.names)


class _Gradients(torch.autograd.Function):
    """A call of the backward pass, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, arguments: TensorArguments, *tensors: torch.Tensor) -> Any:
        return tuple(_without_autograd(BACKWARD, arguments, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise op.second_derivative_error()


def _without_autograd(
    operator: torch._ops.OpOverload, arguments: TensorArguments, tensors: Sequence[torch.Tensor]
) -> Any:
    named = dict(zip(arguments.names, tensors, strict=True))
    with torch._C._AutoDispatchBelowAutograd():
        return operator(**named, **dict(arguments.options))


def _attend(arguments: TensorArguments) -> Any:
    return _Attention.apply(arguments, *arguments.tensors)


_INPUT_NAMES = ("query", "key", "value")
DEFAULT = define(
    f"varlen_attention({_INPUTS}, {_BATCH}) -> Tensor",
    takes_causal_seqs(op.check),
    rows=_INPUT_NAMES,
    derivative=lambda arguments: _attend(arguments)[0],
    autocast=_INPUT_NAMES,
)
LSE = define(
    f"varlen_attention.lse({_INPUTS}, {_BATCH}) -> (Tensor output, Tensor lse)",
    takes_causal_seqs(partial(op.check, return_lse=True)),
    rows=_INPUT_NAMES,
    derivative=_attend,
    autocast=_INPUT_NAMES,
)
BACKWARD = define(
    f"varlen_attention_backward({_INPUTS}, Tensor output, Tensor lse, Tensor dout, {_BATCH})"
    " -> Tensor[]",
    takes_causal_seqs(backward.check),
    rows=(*_INPUT_NAMES, "dout"),
    derivative=lambda arguments: _Gradients.apply(arguments, *arguments.tensors),
)
_DEFAULT = checked(op.OP, DEFAULT)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bidirectional_ranges: torch.Tensor | None = None,
    causal: bool | torch.Tensor = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    prefix_seqs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed sequences to themselves, with a derivative, for training: the function
    ``jax_frontend.varlen_attention``, which explains the arguments.

    The output has the bits of ``paged_attention``. Autograd gives the derivative with respect to
    ``query``, ``key``, ``value``, ``sinks`` and ``alibi_slopes``, in float32, in memory that is
    linear in the tokens, and with the bits that it has in JAX. The operators are
    ``torch.ops.xla_gpu.varlen_attention``, with the overloads ``default`` and ``lse``, and
    ``varlen_attention_backward``. Under ``torch.autocast`` query, key and value are converted, as
    those of ``scaled_dot_product_attention`` are.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, float16 or bfloat16. May have any
            strides, as may the other tensors.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``query``.
        value: ``[num_tokens, num_kv_heads, value_head_size]``, dtype of ``query``.
        query_start_loc: ``[max_seqs + 1]`` int32.
        num_seqs: ``[]`` or ``[1]`` int32.
        scale: factor of ``q . k``.
        sliding_window: how many positions a token attends to, itself included. None: all.
        soft_cap: c turns a logit into ``c * tanh(logit / c)``. None: off.
        sinks: ``[num_heads]`` float32, one more logit for each head.
        alibi_slopes: ``[num_heads]`` float32.
        bidirectional_ranges: ``[num_tokens, 2]`` int32, positions that a token also attends to.
        causal: False lets a token attend to later positions. ``[max_seqs]``: for each sequence.
        window_right: how many of them.
        max_query_len: a promise that no sequence is longer.
        prefix_seqs: ``[max_seqs]`` int32, the earlier sequence that each one continues, or -1.

    Returns:
        ``[num_tokens, num_heads, value_head_size]``, dtype of ``query``.

    Raises:
        ValueError, TypeError: as in ``paged_attention``.
        NotImplementedError: a second derivative is asked for, or one by ``torch.func`` or in
            forward mode.
    """
    causal, causal_seqs = split_causal(causal)
    return _DEFAULT(  # type: ignore[no-any-return]
        *(query, key, value, query_start_loc, num_seqs, scale, sliding_window, soft_cap),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bidirectional_ranges=bidirectional_ranges,
        causal=causal,
        window_right=window_right,
        max_query_len=max_query_len,
        causal_seqs=causal_seqs,
        prefix_seqs=prefix_seqs,
    )
