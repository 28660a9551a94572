"""A line of the log for each call that is prepared: which kernels it uses and why, what is copied
for it and why, and its shapes.

``logging.getLogger("shared_ffi").setLevel(logging.DEBUG)`` turns it on. A call is prepared once for
its shapes, dtypes and options: by eager PyTorch at the first call, by XLA when a program is
compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from shared_ffi import (
    _native,
    kv_cache_update,
    paged_attention,
    varlen_attention,
    varlen_attention_backward,
)
from shared_ffi.kv_cache import are_of_groups
from shared_ffi.spec import Call

_LOGGER = logging.getLogger("shared_ffi")
_ATTENTION = {x.TARGET for x in (paged_attention, varlen_attention, varlen_attention_backward)}


def log(call: Call, platform: str, copies: Callable[[], Iterable[str]] = tuple) -> None:
    """Writes the line of a call that has been prepared for a platform, if somebody reads it.

    `copies`: what is copied, each with its reason. It is asked only for a reader.
    """
    if not _LOGGER.isEnabledFor(logging.DEBUG):
        return
    operands = zip(call.names, call.operands, strict=True)
    shapes = (f"{name} {array.dtype}{list(array.shape)}" for name, array in operands)
    facts = [_kernels(call, platform), *copies(), ", ".join(shapes)]
    _LOGGER.debug("%s on %s: %s", call, platform, "; ".join(facts))


def _kernels(call: Call, platform: str) -> str:
    if platform == "cpu" and call.target in {*_ATTENTION, kv_cache_update.TARGET}:
        best, *_ = _native.cpu_instruction_sets()
        used = _native.cpu_instruction_set()
        reason = "the best of this processor" if used == best else f"chosen instead of {best}"
        return f"the kernel for {used}, {reason}"
    if call.target not in _ATTENTION:
        return "its only kernel, which takes all calls"
    if slow := _reason_for_cuda_cores(call):
        return f"the kernel for CUDA cores, slowly, as {slow}"
    if _native.cuda_version is None:
        return "kernels of the build that runs it"
    in_use = _native.cuda_kernels_in_use()
    if not in_use:
        return f"kernels chosen {_native.cuda_choice()}, on the machine that runs it"
    return f"kernels chosen {_native.cuda_choice()}: {', '.join(in_use)}, each where it applies"


def _reason_for_cuda_cores(call: Call) -> str:
    """Why no tensor core takes a call whatever its lengths; empty if one may."""
    query, cache, *_ = call.operands
    if query.dtype == "float32":
        return "query is float32"
    unit = 8 if cache.dtype == query.dtype else 16
    head_size = dict(call.attributes).get("row_head_size", query.shape[-1])
    if isinstance(head_size, int | np.integer) and head_size % unit:  # else it is a symbol
        return f"head_size={head_size} is no multiple of {unit}"
    operands = dict(zip(call.names, call.operands, strict=True))
    sides = {"k_scale": cache, "v_scale": operands.get("value_cache", cache)}
    groups = {name: x for name in sides if (x := operands.get(name)) and are_of_groups(x)}
    if not groups:
        return ""
    for name, side in sides.items():
        if side.dtype not in ("int8", "uint8") or (name in groups and side.dtype == "int8"):
            return f"one of K and V has scales of groups and one is {side.dtype}"
    for name, scales in groups.items():
        # K has the type of the query on tensor cores.
        is_narrow = name == "k_scale" and query.dtype == "float16"
        dtypes = ("float8_e4m3fn",) if is_narrow else ("float8_e4m3fn", "float8_e8m0fnu")
        if scales.dtype not in dtypes:
            return f"{name} is {scales.dtype}"
        size = 2 * sides[name].shape[-1] // scales.shape[3]
        if size % 16 or size & (size - 1):
            return f"{name} has groups of {size}"
    return ""
