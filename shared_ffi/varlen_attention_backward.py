"""The check of ``varlen_attention_backward``: the gradients of ``varlen_attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shared_ffi import token_rows, varlen_attention, varlen_scratch
from shared_ffi.spec import ArraySpec, Call, check_array

OP = "varlen_attention_backward"
TARGET = "xla_gpu_varlen_attention_backward"

_NUM_INPUTS = 3  # query, key and value come first


def check(*, output: ArraySpec, lse: ArraySpec, dout: ArraySpec, **forward: Any) -> Call:
    """Returns the call, or raises ValueError (shape, value) or TypeError (dtype, type). Its results
    are the gradients of the operands that are in DIFFERENTIABLE.

    Args:
        output: of ``varlen_attention``.
        lse: its log-sum-exp.
        dout: the derivative of the loss with respect to `output`.
        forward: the arguments of ``varlen_attention``.
    """
    call = varlen_attention.check(**forward)
    (result,) = call.results
    sizes = [*zip(("num_tokens", "num_heads", "value_head_size"), result.shape, strict=True)]
    for name, array in (("output", output), ("dout", dout)):
        check_array(
            OP, name, array, sizes, result.dtype, "It has the shape of the forward's output"
        )
    remedy = "It is what varlen_attention returned with return_lse"
    check_array(OP, "lse", lse, sizes[:2], "float32", remedy)

    def with_own(forward: tuple[Any, ...], *own: Any) -> tuple[Any, ...]:
        return (*forward[:_NUM_INPUTS], *own, *forward[_NUM_INPUTS:])

    names = with_own(call.names, "output", "lse", "dout")
    head_dims = with_own(call.head_dims[:-1], 1, 1, 1)
    attributes = dict(call.attributes)
    inputs = [forward[name] for name in names[:_NUM_INPUTS]]
    attributes |= dict(varlen_attention.row_attributes(*inputs, output, dout))
    for name in attributes.keys() & {*varlen_attention.FEATURES}:
        attributes[name] = np.int64(names.index(name))
    differentiable = [name for name in varlen_attention.DIFFERENTIABLE if name in names]
    dims = [head_dims[names.index(name)] for name in differentiable]
    return replace(
        call,
        op=OP,
        target=TARGET,
        check=check,
        names=names,
        operands=with_own(call.operands, *map(token_rows.as_operand, (output, lse, dout))),
        results=tuple(forward[name]._replace(strides=None) for name in differentiable),
        attributes=(*attributes.items(),),
        head_dims=(*head_dims, *dims),
        cuda_scratch_bytes=varlen_scratch.backward_bytes,
        summed=tuple(result for result, dim in enumerate(dims) if dim is None),
    )
