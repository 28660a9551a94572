"""The check of ``varlen_attention_backward``: the gradients of ``varlen_attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shared_ffi import varlen_attention
from shared_ffi.spec import Arguments, ArraySpec, Call, check_array

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
    assert call.arguments is not None
    (result,) = call.results
    sizes = [*zip(("num_tokens", "num_heads", "value_head_size"), result.shape, strict=True)]
    for name, array in (("output", output), ("dout", dout)):
        check_array(OP, name, array, sizes, result.dtype)
    check_array(OP, "lse", lse, sizes[:2], "float32")

    def inserted(into: tuple[Any, ...], *own: Any) -> tuple[Any, ...]:
        return (*into[:_NUM_INPUTS], *own, *into[_NUM_INPUTS:])

    names = inserted(call.names, "output", "lse", "dout")
    operands = inserted(call.operands, output, lse, dout)
    head_dims = inserted(call.head_dims[:-1], 1, 1, 1)
    places = [i for i, name in enumerate(names) if name in varlen_attention.DIFFERENTIABLE]
    return replace(
        call,
        op=OP,
        target=TARGET,
        names=names,
        operands=operands,
        results=tuple(operands[i] for i in places),
        attributes=tuple(
            (name, np.int64(names.index(name)) if name in varlen_attention.FEATURES else x)
            for name, x in call.attributes
        ),
        head_dims=(*head_dims, *[head_dims[i] for i in places]),
        summed=tuple(result for result, i in enumerate(places) if head_dims[i] is None),
        arguments=Arguments(check, names, call.arguments.options),
    )
