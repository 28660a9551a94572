"""What the keyword arguments of a case become: operands, attributes, PyTorch's overload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared_ffi import paged_attention
from shared_ffi.spec import ArraySpec, Call


def split_keywords(attributes: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays among keyword arguments, which are operands, and the rest."""
    arrays = {name: x for name, x in attributes.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in attributes.items() if name not in arrays}


def overload_of(op: str, attributes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """PyTorch's operator for a call, and its keyword arguments."""
    import torch  # noqa: PLC0415

    options = {name: x for name, x in attributes.items() if name != "return_lse"}
    overload = "lse" if attributes.get("return_lse") else "default"
    return getattr(getattr(torch.ops.xla_gpu, op), overload), options


def checked_attention(
    operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Call, list[np.ndarray]]:
    """A call of paged_attention as its check makes it, and its operands in their order."""
    arrays, options = split_keywords(attributes)
    order = [name for name in ("sinks", "alibi_slopes") if name in arrays]
    specs = [ArraySpec(x.shape, x.dtype.name) for x in operands]
    optional = {name: ArraySpec(arrays[name].shape, arrays[name].dtype.name) for name in order}
    scale, window, cap = (
        options.pop(name, None) for name in ("scale", "sliding_window", "soft_cap")
    )
    call = paged_attention.check(*specs, scale, window, cap, **optional, **options)
    return call, [*operands, *(arrays[name] for name in order)]


def numbers(call: Call) -> dict[str, int | float]:
    """A call's attributes as _native.EagerCall takes them."""
    return {name: value.item() for name, value in call.attributes}
