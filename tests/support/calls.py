"""Converts the keyword arguments of a case to operands, attributes and PyTorch's overload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from shared_ffi import (
    _native,
    kv_cache_update,
    paged_attention,
    varlen_attention,
    varlen_attention_backward,
)
from shared_ffi.spec import ArraySpec, Call
from tests.cases.case import FEATURES


@contextmanager
def cpu_instruction_set(name: str) -> Iterator[None]:
    """Runs the CPU's kernels with these instructions, and with the former ones afterwards."""
    former = _native.cpu_instruction_set()
    _native.set_cpu_instruction_set(name)
    try:
        yield
    finally:
        _native.set_cpu_instruction_set(former)


def split_keywords(attributes: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Splits keyword arguments into arrays, which are operands, and the rest."""
    arrays = {name: x for name, x in attributes.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in attributes.items() if name not in arrays}


_NORMS = ("norm_eps", "norm_offset", "norm_after_rope", "v_norm", "norm_round_first")
_OF_WITH_NORMS = (
    *("q_norm", "k_norm", *_NORMS, "hadamard", "hadamard_signs"),
    *("codes", "k_global", "v_global", "round_scales_up"),
)


def overload_of(op: str, attributes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """PyTorch's operator for a call, and its keyword arguments."""
    import torch  # noqa: PLC0415

    options = {name: x for name, x in attributes.items() if name != "return_lse"}
    if not isinstance(options.get("causal"), bool | None):
        options["causal_seqs"] = options.pop("causal")
    overload = "lse" if attributes.get("return_lse") else "default"
    if "k_scale_cache" in attributes or "v_scale_cache" in attributes:
        overload = "with_scales"
    if op == "kv_cache_update" and any(x in attributes for x in _OF_WITH_NORMS):
        overload = "with_norms"
    return getattr(getattr(torch.ops.xla_gpu, op), overload), options


_OPS = (paged_attention, kv_cache_update, varlen_attention, varlen_attention_backward)
_CHECKS: dict[str, Any] = {op.OP: op.check for op in _OPS}


def in_jax(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The results of a call in JAX, also of one that only a derivative makes."""
    from jax_frontend import _call  # noqa: PLC0415

    return _call.make(op, _CHECKS[op], arrays, options)


_POSITIONAL = ("scale", "sliding_window", "soft_cap")


def checked_call(
    op: str, operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Call, list[np.ndarray]]:
    """The call that the op's check returns, and its operands in order."""
    arrays, options = split_keywords(attributes)
    if op != "kv_cache_update":
        options = {"sliding_window": None, "soft_cap": None} | options
    positional = [options.pop(name) for name in _POSITIONAL if name in options]
    given = {name: arrays[name] for name in FEATURES[op] if name in arrays}
    optional = dict(zip(given, specs(list(given.values())), strict=True))
    call = _CHECKS[op](*specs(operands), *positional, **optional, **options)
    return call, [*operands, *given.values()]


def in_wider_rows(array: np.ndarray, more: int) -> tuple[np.ndarray, dict[str, int | float]]:
    """A query, key or value as the first columns of rows with `more` elements, which are NaN, and
    the attributes that say so."""
    num_tokens, num_heads, head_size = array.shape
    columns = np.full((num_tokens, num_heads * head_size + more), 99).astype(array.dtype)
    if array.dtype.kind not in "iu":
        columns[:] = np.nan
    columns[:, : num_heads * head_size] = array.reshape(num_tokens, num_heads * head_size)
    return columns, {"row_heads": num_heads, "row_head_size": head_size}


_ROWS = {"paged_attention": (0,), "kv_cache_update": (1, 2), "varlen_attention": ()}


def with_wider_rows(
    op: str, operands: Sequence[np.ndarray], more: int, query: int | None = None
) -> tuple[list[np.ndarray], dict[str, int | float]]:
    """The operands of a call, its queries or new keys and values in wider rows, and the attributes
    that say so. Keys have `more` elements more, values twice as many, queries to be rotated, whose
    number among the operands is `query`, three times as many."""
    arrays, attributes = [*operands], dict[str, int | float]()
    if more:
        for factor, place in enumerate(_ROWS[op], 1):
            if arrays[place].shape[2] > 0:  # V is no part of K
                head_size = arrays[place].shape[2]
                arrays[place], found = in_wider_rows(arrays[place], factor * more)
                if attributes and head_size != attributes["row_head_size"]:
                    found = {"row_value_head_size": head_size}
                attributes |= found
        if query is not None:
            arrays[query], rows = in_wider_rows(arrays[query], 3 * more)
            attributes["query_heads"] = rows["row_heads"]
    return arrays, attributes


def rows_in(wider: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The rows of this shape that wider ones begin with; the rest must be as `in_wider_rows` made
    it."""
    if wider.shape == shape:
        return wider
    size = math.prod(shape[1:])
    assert (np.isnan(wider[:, size:].astype(np.float32)) | (wider[:, size:] == 99)).all()
    return wider[:, :size].reshape(shape)


def written(keywords: Mapping[str, Any]) -> list[Any]:
    """The arrays besides kv_cache that kv_cache_update writes in place, of its keyword arguments."""
    return [keywords[name] for name in kv_cache_update.WRITTEN if name in keywords]


def in_place(call: Call) -> dict[int, int]:
    """Maps the number of each result in place to the number of its operand."""
    return {result: operand for operand, result in call.aliases}


def results_of(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays for the results: filled with NaN, or the operands that the call updates in place."""
    places = in_place(call)
    return [
        operands[places[i]] if i in places else np.full(spec.shape, np.nan, spec.dtype)
        for i, spec in enumerate(call.results)
    ]


def specs(arrays: Sequence[Any]) -> list[ArraySpec]:
    """Shapes and dtypes of NumPy arrays."""
    return [ArraySpec(x.shape, x.dtype.name) for x in arrays]


def numbers(call: Call) -> dict[str, int | float]:
    """A call's attributes as _native.EagerCall takes them."""
    return {name: value.item() for name, value in call.attributes}


def eager_call(
    target: str,
    attributes: dict[str, int | float],
    operands: Sequence[ArraySpec],
    results: Sequence[ArraySpec],
    platform: str = "cpu",
    native: Any = _native,
) -> Any:
    """A handler without the op's check, to be called on addresses."""
    return native.EagerCall(native.handlers()[platform][target], attributes, operands, results)


def call_handler(
    target: str,
    attributes: dict[str, int | float],
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    num_threads: int = 1,
) -> None:
    """Calls a CPU handler without the op's check. Writes into the results."""
    assert all(x.flags.c_contiguous for x in (*operands, *results))
    handler = eager_call(target, attributes, specs(operands), specs(results))
    handler([x.ctypes.data for x in operands], [x.ctypes.data for x in results], num_threads)


@contextmanager
def observed_calls() -> Iterator[list[tuple[str, list[int]]]]:
    """The calls that eager PyTorch makes meanwhile: the op, and the addresses of all arrays."""
    made = list[tuple[str, list[int]]]()
    _native.observe_eager_calls(lambda op, addresses: made.append((op, addresses)))
    try:
        yield made
    finally:
        _native.observe_eager_calls(None)


OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "paged_attention": {
        "scale": (0.125, 0.5),
        "sliding_window": (None, 5),
        "soft_cap": (None, 2.0),
        "kv_layout": (None, "bn(h2)d"),
        "causal": (True, False),
        "window_right": (None, 2),
        "max_query_len": (None, 8),
        "value_head_size": (8, 12),
        "return_lse": (False, True),
        "codes": (None, "e2m1"),
    },
    "varlen_attention": {
        "scale": (0.125, 0.5),
        "sliding_window": (None, 5),
        "soft_cap": (None, 2.0),
        "causal": (True, False),
        "window_right": (None, 2),
        "max_query_len": (None, 8),
        "return_lse": (False, True),
    },
    "kv_cache_update": {
        "kv_layout": (None, "bn(h2)d"),
        "interleaved": (False, True),
        "norm_eps": (1e-6, 0.5),
        "norm_offset": (0, 1),
        "norm_after_rope": (False, True),
        "v_norm": (False, True),
        "norm_round_first": (False, True),
        "hadamard": ("k", "kv"),
        "codes": (None, "e2m1"),
        "round_scales_up": (False, True),
    },
}
"""Two values of each option."""
OPTIONS["varlen_attention_backward"] = dict(OPTIONS["varlen_attention"])
del OPTIONS["varlen_attention_backward"]["return_lse"]

BESIDE: dict[str, dict[str, Any]] = {
    "window_right": {"causal": False},
    **{
        name: {"k_norm": np.linspace(0.5, 1, 8, dtype=np.float32), "norm_eps": 1e-6}
        for name in _NORMS
    },
}
"""What an option needs."""


def codes_beside(op: str, option: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The cache and scales that an option of 4-bit codes needs, in place of a cache "nb(h2)d" of
    this shape; empty for other options."""
    if option not in ("codes", "round_scales_up"):
        return {}
    *slots, rows, head_size = shape
    packed = (*slots, rows, head_size // 2)
    given = {"kv_cache": np.arange(math.prod(packed)).astype(np.uint8).reshape(packed)}
    if op == "paged_attention":
        return given | {name: np.float32([1]) for name in ("k_scale", "v_scale")}
    scales, dtype = (*slots, rows // 2), np.dtype(np.float32)
    if option == "round_scales_up":
        scales, dtype = (*scales, 2), np.dtype(ml_dtypes.float8_e8m0fnu)
    return given | {name: np.ones(scales, dtype) for name in ("k_scale_cache", "v_scale_cache")}
