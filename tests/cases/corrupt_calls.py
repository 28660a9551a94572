"""Calls of the handlers that no check in Python has passed, as a stored or changed program makes them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from harness.arrays import guarded
from harness.compare import assert_same_bits
from shared_ffi import (
    kv_cache_update,
    paged_attention,
    simple_add,
    varlen_attention,
    varlen_attention_backward,
)
from tests.cases.case import FEATURES, Case, Groups
from tests.cases.updates import UpdateCase
from tests.cases.varlen import VarlenCase
from tests.support.calls import (
    checked_call,
    in_place,
    in_wider_rows,
    numbers,
    results_of,
    specs,
    split_keywords,
    with_wider_rows,
)

MODULES = {
    module.OP: module
    for module in (
        *(paged_attention, kv_cache_update, simple_add),
        *(varlen_attention, varlen_attention_backward),
    )
}

_OPERANDS = {
    "paged_attention": (
        "query",
        "kv_cache",
        "context_lens",
        "block_tables",
        "query_start_loc",
        "num_seqs",
    ),
    "kv_cache_update": ("kv_cache", "key", "value", "slot_mapping"),
    "simple_add": ("a", "b"),
}
_OPTIONAL = (
    *dict.fromkeys(itertools.chain(*FEATURES.values())),
    *("block_size", "num_blocks", "num_kv_heads"),
    *("block_stride", "position_stride", "head_stride", "value_offset", "key_unit", "value_unit"),
    *("window_right", "max_query_len", "value_head_size"),
    *("row_heads", "row_head_size", "row_kv_heads", "row_value_head_size"),
    *("query_heads", "interleaved"),
    *("norm_eps", "norm_offset", "norm_after_rope", "v_norm", "norm_round_first"),
    *("k_hadamard", "v_hadamard"),
    *("e2m1", "round_scales_up"),
)
"""Attributes that not every call has."""

_SCALES = ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
_STRIDES = ("block_stride", "position_stride", "head_stride", "group_stride", "groups")

_NAMES = {
    *itertools.chain(*_OPERANDS.values(), _OPTIONAL),
    *(f"{name}_{stride}" for name in _SCALES for stride in _STRIDES),
    *("scale", "sliding_window", "soft_cap", "output", "lse", "scratch", "sum"),
    *("dout", "dquery", "dkey", "dvalue", "dsinks", "dalibi_slopes"),
}

_ALIKE = {"key": ["value"], "kv_cache": ["value_cache"]}
"""Operands that have the shape and dtype of another."""

DTYPES = (
    *(np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ml_dtypes.float8_e8m0fnu,
    *(np.int8, np.uint8, np.int32, np.int64, np.float64, np.bool_, np.complex64),
)
_INTEGERS = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**32 + 2, 2**62, 2**63 - 1)
_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -1.0, -3e38, 3e38, 1e-45)


@dataclass(frozen=True)
class HandlerCall:
    """A call as a handler gets it."""

    op: str
    operands: dict[str, np.ndarray]
    results: dict[str, np.ndarray]
    attributes: dict[str, Any]
    in_place: frozenset[str] = frozenset()
    """Operands that share their memory with the result of the same name."""

    def make(self, run: Callable[..., None]) -> str | None:
        """Calls run(module, operands, results, **attributes) with all arrays between guard pages.
        Returns the message of the error that refuses the call, if any.

        Raises:
            AssertionError: the message does not begin with the op and name an argument, or the call
                has written to an operand.
        """
        operands = {name: guarded(x) for name, x in self.operands.items()}
        results = {
            name: operands[name] if name in self.in_place else guarded(x)
            for name, x in self.results.items()
        }
        message = None
        try:
            run(MODULES[self.op], [*operands.values()], [*results.values()], **self.attributes)
        except ValueError as error:
            message = str(error)
            named = rf"((operand|attribute|result) )?({'|'.join(_NAMES)})\b"
            counted = "the call (has|must have) "
            assert re.match(f"{self.op}: ({named}|{counted})", message), message
        for name, x in operands.items():
            if message is not None or name not in self.in_place:
                assert_same_bits(x, self.operands[name])
        return message


def _handler_call(op: str, case: Any, more_columns: int = 0) -> HandlerCall:
    inputs, attributes = case.inputs(), case.attributes()
    call, arrays = checked_call(op, inputs, attributes)
    query = numbers(call).get("query")
    arrays, row_attributes = with_wider_rows(op, arrays, more_columns, query)  # type: ignore[arg-type]
    features = sorted({*FEATURES[op]} & {*numbers(call)}, key=numbers(call).__getitem__)
    names = [*_OPERANDS[op], *features]
    result_names = [names[i] for i in in_place(call).values()] or ["output", "lse"]
    return HandlerCall(
        op,
        dict(zip(names, arrays, strict=True)),
        dict(zip(result_names, results_of(call, arrays), strict=False)),
        numbers(call) | row_attributes,
        frozenset(result_names if call.aliases else ()),
    )


def _with_strided_scales(call: HandlerCall) -> HandlerCall:
    """The same call, whose scales for each position have gaps between them, as views have."""
    arrays, attributes = dict[str, np.ndarray](), {**call.attributes}
    for name in [x for x in _SCALES if x in call.operands]:
        scales = call.operands[name]
        arrays[name] = np.repeat(scales.ravel(), 3)[:-2]
        steps = [3 * n // scales.itemsize for n in scales.strides] + [*scales.shape[3:]]
        attributes |= {f"{name}_{x}": n for x, n in zip(_STRIDES, steps, strict=False)}
    results = {name: arrays.get(name, x) for name, x in call.results.items()}
    return replace(call, operands=call.operands | arrays, results=results, attributes=attributes)


def _attention(id: str, more_columns: int = 0, **changes: Any) -> HandlerCall:
    """A call that reads every row of its cache."""
    case = Case(id, ((3, 8), (1, 4)), unused_blocks=0, **changes)
    return _handler_call("paged_attention", case, more_columns)


def _training(op: str, case: VarlenCase, more_columns: int = 0) -> HandlerCall:
    """A call of varlen_attention, or of its backward pass, whose rows are in wider ones if there are
    `more_columns`."""
    arrays, options = split_keywords(case())
    if op == "varlen_attention":
        options["return_lse"] = True
    else:
        dout = case.weights()
        arrays |= {"output": dout, "lse": np.zeros(dout.shape[:2], np.float32), "dout": dout}
    given = dict(zip(arrays, specs([*arrays.values()]), strict=True))
    for i, name in enumerate(x for x in ("query", "key", "value", "dout") if x in given):
        if more_columns:
            size = given[name].shape[2]
            arrays[name], _ = in_wider_rows(arrays[name], (i + 1) * more_columns)
            strides = (arrays[name].shape[1], size, 1)
            given[name] = given[name]._replace(strides=strides)
    call = MODULES[op].check(**given, **options)
    operands = {name: arrays[name] for name in call.names}
    names = ["output", "lse"]
    if op != "varlen_attention":
        names = [f"d{name}" for name in varlen_attention.DIFFERENTIABLE if name in call.names]
    results = dict(zip(names, results_of(call, [*operands.values()]), strict=True))
    return HandlerCall(op, operands, results, numbers(call))


_update = partial(_handler_call, "kv_cache_update")


def sound_calls() -> dict[str, HandlerCall]:
    """Calls that together have every operand, result and attribute."""
    of_8_bits = _attention(
        "of-8-bits",
        3,
        kv_layout="nhbd",
        cache_dtype="int8",
        scales="per position",
        sinks=True,
        alibi_slopes=True,
        causal=False,
        ranges="any",
        causal_seqs=True,
        window_right=2,
        sliding_window=5,
        soft_cap=3.0,
        max_query_len=4,
        return_lse=True,
    )
    of_groups = _attention(
        "of-groups", cache_dtype="e2m1", groups=Groups(8, "float8_e4m3fn", has_globals=True)
    )
    updates = {
        "plain": UpdateCase("plain", num_padding=0),
        "of-8-bits": UpdateCase(
            "of-8-bits", num_padding=0, kv_layout="nbhd", cache_dtype="int8", scales="per head"
        ),
        "of-4-bits": UpdateCase(
            "of-4-bits", num_padding=0, head_size=18, cache_dtype="int4", scales="one"
        ),
        "of-8-and-4-bits": UpdateCase(
            "of-8-and-4-bits",
            num_padding=0,
            head_size=16,
            kv_layout="nbhd",
            cache_dtype="int8",
            value_cache_dtype="int4",
            rotary_dim=6,
        ),
        "made-scales": UpdateCase(
            "made-scales",
            num_padding=0,
            cache_dtype="int8",
            made_scales=("k_scale", "v_scale"),
            rotary_dim=8,
            num_heads=4,
        ),
        "made-groups": UpdateCase(
            "made-groups",
            num_padding=0,
            head_size=16,
            cache_dtype="e2m1",
            groups=Groups(8, "float8_e8m0fnu", has_globals=True),
            made_scales=("k_scale", "v_scale"),
            round_scales_up=True,
        ),
        "of-groups": UpdateCase(
            "of-groups",
            num_padding=0,
            head_size=16,
            cache_dtype="int4",
            groups=Groups(4, "float16"),
        ),
        "copied": UpdateCase(
            "copied", num_padding=0, head_size=18, cache_dtype="int4", dtype="float16"
        ),
        "own-value-head-size": UpdateCase(
            "own", num_padding=0, kv_layout="nbhd", head_size=24, own_value_head_size=16
        ),
        "latent": UpdateCase("latent", num_padding=0, num_kv_heads=1, is_latent=True),
        "rotated": UpdateCase(
            "rotated", num_padding=0, num_heads=4, rotary_dim=8, interleaved=True, dtype="float16"
        ),
        "normalized": UpdateCase(
            "normalized",
            num_padding=0,
            num_heads=4,
            rotary_dim=8,
            dtype="bfloat16",
            norm="per head",
            v_norm=True,
            norm_options=("norm_after_rope", "norm_round_first"),
        ),
        "normalized-together": UpdateCase(
            "normalized-together",
            num_padding=0,
            num_heads=4,
            cache_dtype="int8",
            scales="one",
            norm="all heads",
            norm_options=("norm_offset",),
        ),
        "transformed": UpdateCase(
            "transformed",
            num_padding=0,
            num_heads=4,
            head_size=24,
            cache_dtype="int8",
            made_scales=("k_scale", "v_scale"),
            hadamard="kv",
            has_signs=True,
            dtype="bfloat16",
        ),
    }
    small = partial(VarlenCase, lengths=(3, 0, 2), head_size=8, padding=1)
    window = {"sliding_window": 3, "window_right": 2, "soft_cap": 3.0, "max_query_len": 4}
    packed = [
        (small("plain", dtype="float16"), 0),
        (small("all", value_head_size=4, arrays=varlen_attention.FEATURES, options=window), 3),
    ]
    made_scales = _update(updates["made-scales"], 5)
    rows = np.ones((2, 3), np.float32)
    add = HandlerCall("simple_add", {"a": rows, "b": rows}, {"sum": rows}, {})
    return {
        "attention-plain": _attention("plain", dtype="float16"),
        "attention-of-8-bits": of_8_bits,
        "attention-of-strided-scales": _with_strided_scales(of_8_bits),
        "attention-of-4-bits": _attention("of-4-bits", cache_dtype="int4", scales="per position"),
        "attention-of-8-and-4-bits": _attention(
            "of-8-and-4-bits",
            kv_layout="nbhd",
            cache_dtype="int8",
            value_cache_dtype="int4",
            dtype="bfloat16",
            head_size=128,
            own_value_head_size=64,
        ),
        "attention-of-groups": of_groups,
        "attention-of-strided-groups": _with_strided_scales(of_groups),
        "attention-latent": _attention("latent", num_kv_heads=1, value_head_size=8, tree="draft"),
        "attention-own-value-head-size": _attention(
            "own", kv_layout="nbhd", head_size=24, own_value_head_size=16
        ),
        **{
            f"update-{name}": _update(case, 5 * i) for i, (name, case) in enumerate(updates.items())
        },
        **{
            f"{op}-{case.id}": _training(op, case, more_columns)
            for op in ("varlen_attention", "varlen_attention_backward")
            for case, more_columns in packed
        },
        "update-made-strided-scales": _with_strided_scales(made_scales),
        "update-made-strided-groups": _with_strided_scales(_update(updates["made-groups"])),
        "add": add,
    }


def _other_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of another rank, size or dtype."""
    shape = array.shape
    shapes = {(), (1,), (array.size,), (*shape, 1), (1, *shape), shape[1:], shape[:-1]}
    for dim, size in enumerate(shape):
        for other in (0, 1, size - 1, size + 1, 2 * size):
            shapes.add((*shape[:dim], max(other, 0), *shape[dim + 1 :]))
    for other_shape in sorted(shapes - {shape}, key=str):
        yield str([*other_shape]), np.resize(array, other_shape)
    for dtype in DTYPES:
        if dtype != array.dtype:
            yield np.dtype(dtype).name, np.zeros(shape, dtype)


def _other_numbers(value: Any) -> list[Any]:
    """Attributes of another type, and of other and extreme values."""
    if isinstance(value, float):
        return [1, *_FLOATS]
    integers = {value - 1, value + 1, 2 * value, *_INTEGERS} - {value}
    return [1.5, *sorted(x for x in integers if -(2**63) <= x < 2**63)]


def corrupt_calls(call: HandlerCall, argument: str) -> Iterator[tuple[str, HandlerCall]]:
    """Calls that differ from a sound one in an operand, result or attribute of this name."""
    operands, results, attributes = call.operands, call.results, call.attributes
    if argument in operands:
        alike = [x for x in _ALIKE.get(argument, ()) if x in operands]
        for names in [[argument], [argument, *alike]] if alike else [[argument]]:
            for what, array in _other_arrays(operands[argument]):
                changed = {**operands, **dict.fromkeys(names, array)}
                updated = {name: changed[name] for name in call.in_place}
                what = f"{' and '.join(names)} {what}"
                yield what, replace(call, operands=changed, results=results | updated)
        yield (
            "without operand",
            replace(
                call,
                operands={name: x for name, x in operands.items() if name != argument},
                in_place=call.in_place - {argument},
            ),
        )
    if argument in results:
        separate = replace(call, in_place=call.in_place - {argument})
        if call.in_place:
            yield "not in place", separate
        for what, array in _other_arrays(results[argument]):
            yield f"result {what}", replace(separate, results={**results, argument: array})
        fewer = {name: x for name, x in results.items() if name != argument}
        yield "without result", replace(call, results=fewer)
    if argument in attributes:
        others = {name: x for name, x in attributes.items() if name != argument}
        yield "without attribute", replace(call, attributes=others)
        for value in _other_numbers(attributes[argument]):
            yield f"attribute {value}", replace(call, attributes={**attributes, argument: value})
    elif argument in _OPTIONAL:
        for value in _other_numbers(0):
            yield (
                f"new attribute {value}",
                replace(call, attributes={**attributes, argument: value}),
            )


def arguments_of(call: HandlerCall) -> list[str]:
    """What may be corrupt: the names of operands, results and attributes."""
    return [*dict.fromkeys([*call.operands, *call.results, *call.attributes, *_OPTIONAL])]
