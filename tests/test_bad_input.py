"""Every rule of the contract, broken: through every door, and past the Python checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shared_ffi import kv_cache_update, paged_attention, runtimes, simple_add
from tests import doors
from tests.calls import call_handler
from tests.cases import CASES, UPDATE_CASES

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64


def attention(**changes: Any) -> dict[str, Any]:
    """A sound call (2 sequences, 2 and 1 query tokens, 4 blocks of 2) with some arguments replaced."""
    arguments = {
        "query": np.ones((4, 4, 8), F32),
        "kv_cache": np.ones((4, 2, 4, 8), F32),
        "context_lens": np.array([3, 1, 0], I32),
        "block_tables": np.array([[3, 1], [0, 9], [9, 9]], I32),
        "query_start_loc": np.array([0, 2, 3, 0], I32),
        "num_seqs": np.array(2, I32),
        "scale": 0.5,
        "sliding_window": None,
        "soft_cap": None,
    }
    return arguments | changes


def update(**changes: Any) -> dict[str, Any]:
    arguments = {
        "kv_cache": np.zeros((4, 2, 4, 8), F32),
        "key": np.ones((3, 2, 8), F32),
        "value": np.ones((3, 2, 8), F32),
        "slot_mapping": np.array([0, 7, -1], I32),
    }
    return arguments | changes


def add(**changes: Any) -> dict[str, Any]:
    return {"a": np.ones((2, 3), F32), "b": np.ones((2, 3), F32)} | changes


@pytest.fixture(autouse=True)
def _each_test_hears_its_own_error() -> Iterator[None]:
    yield
    doors.forget_failed_steps()


@dataclass(frozen=True)
class Fault:
    op: str
    arguments: dict[str, Any]
    error: type[Exception]
    message: str
    in_handler: bool = True  # can also be given to the handler
    id: str = ""


TARGETS = {
    "paged_attention": "xla_gpu_paged_attention",
    "kv_cache_update": "xla_gpu_kv_cache_update",
    "simple_add": "XlaGpuSimpleAdd",
}
SOUND = {"paged_attention": attention, "kv_cache_update": update, "simple_add": add}


def fault(
    make: Callable[..., dict[str, Any]],
    message: str,
    error: type[Exception] = ValueError,
    in_handler: bool = True,
    **changes: Any,
) -> Any:
    op = next(op for op, sound in SOUND.items() if sound is make)
    name = "-".join([op, *(f"{k}={_short(v)}" for k, v in changes.items())])
    return pytest.param(Fault(op, make(**changes), error, f"{op}: {message}", in_handler), id=name)


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


# What the shapes, the dtypes and the attributes alone tell.
STATIC = [
    fault(
        attention,
        "query must have shape [num_tokens, num_heads, head_size]; got [4, 8]",
        query=np.ones((4, 8), F32),
    ),
    fault(
        attention,
        "query must have dtype float32, float16 or bfloat16; got int32",
        TypeError,
        query=np.ones((4, 4, 8), I32),
    ),
    fault(
        attention,
        "query must have a head_size from 1 to 512; got 0",
        query=np.ones((4, 4, 0), F32),
        kv_cache=np.ones((4, 2, 4, 0), F32),
    ),
    fault(
        attention,
        "query must have a head_size from 1 to 512; got 513",
        query=np.ones((4, 4, 513), F32),
        kv_cache=np.ones((4, 2, 4, 513), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 4, 8]",
        kv_cache=np.ones((4, 4, 8), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 4, 16]",
        kv_cache=np.ones((4, 2, 4, 16), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=np.ones((4, 0, 4, 8), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 0, 8]",
        kv_cache=np.ones((4, 2, 0, 8), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 3, 8]",
        kv_cache=np.ones((4, 2, 3, 8), F32),
    ),
    fault(
        attention,
        "kv_cache must have query's dtype float32, or float8_e4m3fn, float8_e5m2 or int8; got float16",
        TypeError,
        kv_cache=np.ones((4, 2, 4, 8), F16),
    ),
    fault(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=3; got 4",
        kv_cache=np.ones((4, 2, 6, 8), F32),
    ),
    fault(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=2; got 0",
        query=np.ones((4, 0, 8), F32),
    ),
    fault(
        attention,
        "context_lens must have shape [max_seqs]; got [3, 1]",
        context_lens=np.ones((3, 1), I32),
    ),
    fault(
        attention,
        "block_tables must have shape [max_seqs=3, max_blocks_per_seq]; got [2, 2]",
        block_tables=np.ones((2, 2), I32),
    ),
    fault(
        attention,
        "block_tables must have shape [max_seqs=3, max_blocks_per_seq]; got [3]",
        block_tables=np.ones(3, I32),
    ),
    fault(
        attention,
        "query_start_loc must have shape [max_seqs + 1=4]; got [3]",
        query_start_loc=np.ones(3, I32),
    ),
    fault(attention, "num_seqs must have shape [] or [1]; got [2]", num_seqs=np.ones(2, I32)),
    fault(
        attention,
        "context_lens must have dtype int32; got float32",
        TypeError,
        context_lens=np.ones(3, F32),
    ),
    fault(
        attention,
        "block_tables must have dtype int32; got float32",
        TypeError,
        block_tables=np.ones((3, 2), F32),
    ),
    fault(
        attention,
        "query_start_loc must have dtype int32; got float32",
        TypeError,
        query_start_loc=np.ones(4, F32),
    ),
    fault(
        attention,
        "num_seqs must have dtype int32; got float32",
        TypeError,
        num_seqs=np.array(2, F32),
    ),
    fault(attention, "scale must be finite in float32; got inf", scale=float("inf")),
    fault(attention, "scale must be finite in float32; got nan", scale=float("nan")),
    fault(attention, "scale must be finite in float32; got 1e+300", in_handler=False, scale=1e300),
    fault(attention, "sliding_window must be at least 1; got -3", sliding_window=-3),
    fault(
        attention, "sliding_window must be at least 1; got 0", in_handler=False, sliding_window=0
    ),
    fault(attention, "soft_cap must be positive and finite in float32; got -1.5", soft_cap=-1.5),
    fault(
        attention,
        "soft_cap must be positive and finite in float32; got 0.0",
        in_handler=False,
        soft_cap=0.0,
    ),
    fault(
        attention, "soft_cap must be positive and finite in float32; got nan", soft_cap=float("nan")
    ),
    fault(
        attention, "soft_cap must be positive and finite in float32; got inf", soft_cap=float("inf")
    ),
    *(
        fault(attention, f"{name} must have {rule}", error, **{name: array})
        for name in ("sinks", "alibi_slopes")
        for rule, error, array in (
            ("shape [num_heads=4]; got [2]", ValueError, np.ones(2, F32)),
            ("shape [num_heads=4]; got [4, 1]", ValueError, np.ones((4, 1), F32)),
            ("dtype float32; got float16", TypeError, np.ones(4, F16)),
        )
    ),
    *(
        fault(
            op,
            f"{name} must {rule}",
            error,
            kv_cache=np.zeros((4, 2, 4, 8), cache_dtype),
            **{name: scales},
        )
        for op, than in ((attention, "query"), (update, "key"))
        for name in ("k_scale", "v_scale")
        for rule, error, cache_dtype, scales in (
            (
                f"be None unless kv_cache has fewer bits than {than}; got shape [2]",
                ValueError,
                F32,
                np.ones(2, F32),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [3]",
                ValueError,
                np.int8,
                np.ones(3, F32),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [2, 2, 2]",
                ValueError,
                np.int8,
                np.ones((2, 2, 2), F32),
            ),
            ("have dtype float32; got float16", TypeError, np.int8, np.ones((), F16)),
        )
    ),
    fault(
        update,
        "k_scale must be None unless kv_cache has fewer bits than key; got shape []",
        kv_cache=np.zeros((4, 2, 4, 8), np.int8),
        key=np.ones((3, 2, 8), np.int8),
        value=np.ones((3, 2, 8), np.int8),
        k_scale=np.ones((), F32),
    ),
    fault(attention, "window_right must be at least 0; got -1", causal=False, window_right=-1),
    fault(attention, "max_query_len must be at least 1; got -1", max_query_len=-1),
    fault(
        attention,
        "window_right must be None unless causal is False; got 3",
        in_handler=False,
        window_right=3,
    ),
    *(
        fault(op, f"kv_layout must {rule}; got {layout!r}", in_handler=False, kv_layout=layout)
        for op in (attention, update)
        for rule, layout in (
            ("name each of 2, b, d, h, n once, with d last, as 'nb(h2)d' or 'n2bhd' do", "nbhd"),
            ("name each of 2, b, d, h, n once, with d last, as 'nb(h2)d' or 'n2bhd' do", "nb(hd)2"),
            ("name each of 2, b, d, h, n once, with d last, as 'nb(h2)d' or 'n2bhd' do", "nbh2(d"),
            ("name each of 2, b, d, h, n once, with d last, as 'nb(h2)d' or 'n2bhd' do", "n2nbhd"),
        )
    ),
    fault(
        attention,
        "kv_layout must name each of b, d, h, n once, with d last, as 'nbhd' does where V is "
        "value_cache; got 'n2bhd'",
        in_handler=False,
        kv_layout="n2bhd",
        value_cache=np.ones((4, 2, 4, 8), F32),
    ),
    fault(
        attention,
        "kv_cache must have shape [num_blocks, 2, block_size, num_kv_heads, head_size=8]; "
        "got [4, 2, 4, 8]",
        in_handler=False,
        kv_layout="n2bhd",
    ),
    fault(
        update,
        "kv_cache must have shape [2, num_blocks, num_kv_heads=2, block_size, head_size=8]; "
        "got [2, 4, 3, 2, 8]",
        in_handler=False,
        kv_layout="2nhbd",
        kv_cache=np.ones((2, 4, 3, 2, 8), F32),
    ),
    fault(
        update,
        "kv_cache must have shape [num_blocks, block_size, num_kv_heads=2, 2 * head_size=16]; "
        "got [4, 2, 4, 8]",
        in_handler=False,
        kv_layout="nbh(2d)",
    ),
    *(
        fault(
            op,
            f"value_cache must have shape {shape} as kv_cache has; got [3, 2, 4, 8]",
            in_handler=False,
            kv_cache=np.ones(shape, F32),
            value_cache=np.ones((3, 2, 4, 8), F32),
        )
        for op, shape in ((attention, [4, 2, 4, 8]), (update, [4, 2, 2, 8]))
    ),
    *(
        fault(
            op,
            "value_cache must have kv_cache's dtype float32; got float16",
            TypeError,
            kv_cache=np.ones(shape, F32),
            value_cache=np.ones(shape, F16),
            in_handler=False,
        )
        for op, shape in ((attention, (4, 2, 4, 8)), (update, (4, 2, 2, 8)))
    ),
    fault(
        update,
        "key must have shape [num_tokens, num_kv_heads, head_size]; got [3, 16]",
        key=np.ones((3, 16), F32),
    ),
    fault(
        update,
        "key must have dtype float32, float16 or bfloat16, or one of 8 bits that kv_cache has, too; got int32",
        TypeError,
        key=np.ones((3, 2, 8), I32),
    ),
    fault(
        update,
        "value must have shape [num_tokens=3, num_kv_heads=2, head_size=8]; got [3, 1, 8]",
        value=np.ones((3, 1, 8), F32),
    ),
    fault(
        update,
        "value must have key's dtype float32; got float16",
        TypeError,
        value=np.ones((3, 2, 8), F16),
    ),
    fault(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 2, 2, 8]",
        kv_cache=np.ones((4, 2, 2, 8), F32),
    ),
    fault(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=np.ones((4, 0, 4, 8), F32),
    ),
    fault(
        update,
        "kv_cache must have key's dtype float32, or float8_e4m3fn, float8_e5m2 or int8; got float16",
        TypeError,
        kv_cache=np.ones((4, 2, 4, 8), F16),
    ),
    fault(
        update, "slot_mapping must have shape [num_tokens=3]; got [2]", slot_mapping=np.ones(2, I32)
    ),
    fault(
        update,
        "slot_mapping must have dtype int32 or int64; got float32",
        TypeError,
        slot_mapping=np.ones(3, F32),
    ),
    fault(add, "a must have dtype float32; got int32", TypeError, a=np.ones((2, 3), I32)),
    fault(add, "b must have shape [2, 3]; got [3]", b=np.ones(3, F32)),
    fault(add, "b must have dtype float32; got int32", TypeError, b=np.ones((2, 3), I32)),
]

# What only the values tell: on the CPU, the handler reads them.
DYNAMIC = [
    fault(attention, "num_seqs must be from 0 to max_seqs=3; got 4", num_seqs=np.array(4, I32)),
    fault(attention, "num_seqs must be from 0 to max_seqs=3; got -1", num_seqs=np.array([-1], I32)),
    fault(
        attention,
        "num_seqs must be from 0 to max_seqs=3; got 5",
        causal=False,
        num_seqs=np.array(5, I32),
    ),
    fault(
        attention,
        "query_start_loc[0] must be at least 0; got -1",
        query_start_loc=np.array([-1, 2, 3, 0], I32),
    ),
    fault(
        attention,
        "query_start_loc must not decrease; got query_start_loc[2]=1 after query_start_loc[1]=2",
        query_start_loc=np.array([0, 2, 1, 0], I32),
    ),
    fault(
        attention,
        "query_start_loc must give sequence 0 at most max_query_len=1 tokens; got 2",
        max_query_len=1,
    ),
    fault(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5",
        query_start_loc=np.array([0, 2, 5, 0], I32),
        context_lens=np.array([3, 3, 0], I32),
    ),
    fault(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5",
        query_start_loc=np.array([0, 4, 5, 0], I32),  # all tokens have a sequence
        context_lens=np.array([4, 1, 0], I32),
    ),
    fault(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq * block_size=4; got 5",
        context_lens=np.array([5, 1, 0], I32),
    ),
    fault(
        attention,
        "context_lens[1] must be from 0 to max_blocks_per_seq * block_size=4; got -2",
        context_lens=np.array([3, -2, 0], I32),
    ),
    fault(
        attention,
        "context_lens[0] must count the sequence's 2 query tokens too; got 1",
        context_lens=np.array([1, 1, 0], I32),
    ),
    fault(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq * block_size=4; got -1",
        causal=False,
        context_lens=np.array([-1, 1, 0], I32),
    ),
    fault(
        attention,
        "block_tables[0, 1] must be from 0 to num_blocks - 1=3; got 4",
        block_tables=np.array([[3, 4], [0, 9], [9, 9]], I32),
    ),
    fault(
        attention,
        "block_tables[1, 0] must be from 0 to num_blocks - 1=3; got -1",
        block_tables=np.array([[3, 1], [-1, 9], [9, 9]], I32),
    ),
    fault(
        attention,
        "block_tables[0, 0] must be from 0 to num_blocks - 1=-1; got 3",
        kv_cache=np.ones((0, 2, 4, 8), F32),
    ),
    fault(
        update,
        "slot_mapping[1] must be below num_blocks * block_size=8 (negative for padding); got 8",
        slot_mapping=np.array([0, 8, -1], I32),
    ),
]


# Those that an attribute can carry; and of these, those that XLA does not drop for an empty result.
FOR_HANDLER = [fault for fault in STATIC + DYNAMIC if fault.values[0].in_handler]
FOR_HANDLER_IN_XLA = [
    fault for fault in FOR_HANDLER if next(iter(fault.values[0].arguments.values())).size > 0
]


FEATURES = ("value_cache", "k_scale", "v_scale", "sinks", "alibi_slopes")


def split(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The operands that every call has, and the keyword arguments."""
    arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray) and k not in FEATURES}
    return [*arrays.values()], {k: v for k, v in arguments.items() if k not in arrays}


def as_handlers_take_them(fault: Fault) -> tuple[list[Any], dict[str, Any]]:
    """All operands, and the attributes, with no check before."""
    operands, attributes = split(fault.arguments)
    if fault.op == "paged_attention":
        attributes.pop("causal", None)
        attributes["sliding_window"] = attributes["sliding_window"] or 0
        attributes["soft_cap"] = attributes["soft_cap"] or 0.0
    for feature in FEATURES:
        if feature in attributes:
            operands.append(attributes[feature])
            attributes[feature] = len(operands) - 1
    return operands, attributes


def make_call(fault: Fault) -> None:
    """With no check before it, as a program does that was serialized elsewhere."""
    operands, attributes = as_handlers_take_them(fault)
    result = operands[0] if fault.op == "kv_cache_update" else np.empty_like(operands[0])
    call_handler(TARGETS[fault.op], attributes, operands, [result])


def make_call_in_xla(fault: Fault) -> None:
    operands, attributes = as_handlers_take_them(fault)
    typed = {k: F32(v) if isinstance(v, float) else I64(v) for k, v in attributes.items()}
    jax.block_until_ready(
        jax.ffi.ffi_call(
            TARGETS[fault.op],
            jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
            input_output_aliases={0: 0} if fault.op == "kv_cache_update" else {},
        )(*operands, **typed)
    )


@pytest.mark.parametrize("op", SOUND)
@pytest.mark.parametrize("door", doors.DOORS)
def test_sound_calls_pass(door: str, op: str) -> None:
    operands, attributes = split(SOUND[op]())
    doors.DOORS[door](op, *operands, **attributes)


@pytest.mark.parametrize("fault", STATIC)
@pytest.mark.parametrize("door", doors.DOORS)
def test_static_fault(door: str, fault: Fault) -> None:
    operands, attributes = split(fault.arguments)
    # torch.compile wraps what its tracing raises, and keeps the words.
    error = Exception if door == "openxla" else fault.error
    with pytest.raises(error) as raised:
        doors.DOORS[door](fault.op, *operands, **attributes)
    assert fault.message in str(raised.value)


@pytest.mark.parametrize("fault", DYNAMIC)
@pytest.mark.parametrize("door", doors.DOORS)
def test_dynamic_fault(door: str, fault: Fault) -> None:
    operands, attributes = split(fault.arguments)
    error = {"jax": jax.errors.JaxRuntimeError, "torch": ValueError}.get(door, RuntimeError)
    with pytest.raises(error) as raised:
        doors.DOORS[door](fault.op, *operands, **attributes)
    assert fault.message in str(raised.value)


@pytest.mark.parametrize("fault", FOR_HANDLER)
def test_handler_says_the_same(fault: Fault) -> None:
    with pytest.raises(ValueError) as raised:
        make_call(fault)
    assert str(raised.value) == fault.message


CHECKERS = {
    "paged_attention": paged_attention.check_values,
    "kv_cache_update": kv_cache_update.check_values,
}


@pytest.mark.parametrize(
    "kind", [np.asarray, doors.to_torch, jnp.asarray], ids=["numpy", "torch", "jax"]
)
@pytest.mark.parametrize("fault", DYNAMIC)
def test_the_checker_of_values_says_the_same(fault: Fault, kind: Any) -> None:
    arguments = {name: kind(x) for name, x in fault.arguments.items() if isinstance(x, np.ndarray)}
    if fault.op == "kv_cache_update":
        arguments = {name: arguments[name] for name in ("kv_cache", "slot_mapping")}
    if "max_query_len" in fault.arguments:
        arguments["max_query_len"] = fault.arguments["max_query_len"]
    with pytest.raises(ValueError) as raised:
        CHECKERS[fault.op](**arguments)
    assert str(raised.value) == fault.message


def test_the_checker_of_values_knows_layouts() -> None:
    operands, _ = split(attention(block_tables=np.array([[3, 4], [0, 9], [9, 9]], I32)))
    for layout, shape in ((None, (4, 2, 3, 8)), ("nnbhd", (2, 2, 2, 3, 8)), ("hnbd", (3, 4, 2, 8))):
        operands[1] = np.ones(shape, F32)  # of K, with an odd number of heads
        with pytest.raises(
            ValueError, match=r"block_tables\[0, 1\] must be .* num_blocks - 1=3; got 4"
        ):
            paged_attention.check_values(*operands, kv_layout=layout)


def test_the_checker_of_values_passes_what_is_right() -> None:
    for case in CASES[::7]:
        mask = {"causal": case.causal, "window_right": case.window_right}
        others = {"kv_layout": case.kv_layout, "max_query_len": case.max_query_len}
        paged_attention.check_values(*case.inputs(), case.sliding_window, **mask, **others)
    for case in UPDATE_CASES:
        inputs = case.inputs()
        layout = {"kv_layout": case.kv_layout}
        kv_cache_update.check_values(inputs.kv_cache, inputs.slot_mapping, **layout)


@pytest.mark.parametrize("fault", FOR_HANDLER_IN_XLA)
def test_handler_in_xla_says_the_same(fault: Fault) -> None:
    runtimes.register()
    with pytest.raises(jax.errors.JaxRuntimeError, match="^INVALID_ARGUMENT") as raised:
        make_call_in_xla(fault)
    assert fault.message in str(raised.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.empty((4, 4, 9), F32), "the result must be float32 [4, 4, 8]; got float32 [4, 4, 9]"),
        (np.empty((4, 4, 8), F16), "the result must be float32 [4, 4, 8]; got float16 [4, 4, 8]"),
    ],
)
def test_handler_checks_its_result(result: np.ndarray, message: str) -> None:
    operands, attributes = split(attention(sliding_window=0, soft_cap=0.0))
    with pytest.raises(ValueError) as raised:
        call_handler(paged_attention.TARGET, attributes, operands, [result])
    assert str(raised.value) == f"paged_attention: {message}"


# That of the sound call's cache, as attributes tell it.
LAYOUT = {
    "num_blocks": 4,
    "block_size": 2,
    "num_kv_heads": 2,
    "block_stride": 64,
    "position_stride": 32,
    "head_stride": 16,
    "value_offset": 8,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scale": None},
            "the attribute scale is missing: this program was made by another version",
        ),
        (
            {"window_right": 1.5},
            "the attribute window_right is of another type: this program was made by another version",
        ),
        (
            {"kv_layout": 1},
            "the call has 4 attributes, of which 3 are known: this program was made by a newer version",
        ),
        *(
            (
                LAYOUT | changes,
                "kv_cache must hold num_blocks={num_blocks} blocks of block_size={block_size} "
                "positions with num_kv_heads={num_kv_heads} heads; got [4, 2, 4, 8]".format(
                    **(LAYOUT | changes)
                ),
            )
            for changes in (
                {"num_blocks": 5},
                {"num_blocks": -1},
                {"block_size": 3},
                {"num_kv_heads": 0},
                {"head_stride": 17},
                {"value_offset": 9},
                {"value_offset": -1},
                {"block_stride": 2**62},
                {"num_blocks": 2**62, "block_stride": 4},
            )
        ),
        ({"sinks": 6}, "sinks must be an operand of the call; got number 6"),
        ({"sinks": 2}, "sinks must be an operand of the call; got number 2"),
    ],
    ids=str,
)
def test_handler_checks_its_attributes(changes: dict[str, Any], message: str) -> None:
    operands, attributes = split(attention(sliding_window=0, soft_cap=0.0))
    attributes = {k: v for k, v in (attributes | changes).items() if v is not None}
    with pytest.raises(ValueError) as raised:
        call_handler(paged_attention.TARGET, attributes, operands, [np.empty_like(operands[0])])
    assert str(raised.value) == f"paged_attention: {message}"


@pytest.mark.parametrize(
    ("num_operands", "results", "message"),
    [
        (7, [], "the call must have 6 operands; got 7"),
        (
            6,
            [np.empty((4, 3), F32)],
            "the second result must be float32 [4, 4]; got float32 [4, 3]",
        ),
        (
            6,
            [np.empty((4, 4), F16)],
            "the second result must be float32 [4, 4]; got float16 [4, 4]",
        ),
        (6, [np.empty((4, 4), F32)] * 2, "the call must have 1 or 2 results; got 3"),
    ],
)
def test_handler_checks_what_it_gets(num_operands: int, results: Any, message: str) -> None:
    operands, attributes = split(attention(sliding_window=0, soft_cap=0.0))
    operands = [*operands, np.ones(4, F32)][:num_operands]
    results = [np.empty_like(operands[0]), *results]
    with pytest.raises(ValueError) as raised:
        call_handler(paged_attention.TARGET, attributes, operands, results)
    assert str(raised.value) == f"paged_attention: {message}"


def test_handler_checks_the_result_of_simple_add() -> None:
    operands, _ = split(add())
    with pytest.raises(ValueError, match="the result must be float32 .2, 3.; got float32 .3, 2."):
        call_handler(simple_add.TARGET, {}, operands, [np.empty((3, 2), F32)])


def test_handler_demands_an_aliased_cache() -> None:
    operands, _ = split(update())
    call = partial(call_handler, kv_cache_update.TARGET)
    with pytest.raises(ValueError, match="the result must alias kv_cache"):
        call({}, operands, [operands[0].copy()])
    with pytest.raises(ValueError, match="the call must have a result for each cache; got 2"):
        call({}, operands, [operands[0], operands[0]])
    layout = LAYOUT | {"num_kv_heads": 2, "value_offset": 0, "value_cache": 4}
    cache, *rest = operands
    with pytest.raises(ValueError, match="the second result must alias value_cache"):
        call(layout, [cache, *rest, cache.copy()], [cache, cache])


def test_a_slot_past_the_end_leaves_the_cache_as_it_was() -> None:
    operands, _ = split(update(slot_mapping=np.array([0, 8, -1], I32)))
    cache = doors.to_torch(operands[0])
    with pytest.raises(ValueError, match="slot_mapping"):
        torch.ops.xla_gpu.kv_cache_update(cache, *map(doors.to_torch, operands[1:]))
    assert not cache.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": True}, "scale must have type float; got bool"),
        ({"sliding_window": True}, "sliding_window must have type int; got bool"),
        ({"causal": False, "window_right": True}, "window_right must have type int; got bool"),
    ],
    ids=str,
)
def test_booleans_are_not_numbers(changes: dict[str, Any], message: str) -> None:
    """In JAX only: torch's dispatcher makes them numbers before the op sees them."""
    operands, attributes = split(attention() | changes)
    with pytest.raises(TypeError, match=message):
        doors.in_jax("paged_attention", *operands, **attributes)


def test_a_cache_whose_rows_are_not_contiguous() -> None:
    cache = torch.zeros(4, 2, 8, 4).transpose(2, 3)
    key = torch.ones(3, 2, 8)
    with pytest.raises(
        ValueError, match=r"kv_cache must be contiguous in head_size,.*got strides \[64, 32, 1, 4\]"
    ):
        torch.ops.xla_gpu.kv_cache_update(cache, key, key, torch.zeros(3, dtype=torch.int32))


def test_two_caches_with_different_strides() -> None:
    cache, other = torch.zeros(4, 2, 2, 8), torch.zeros(2, 4, 2, 8).transpose(0, 1)
    key = torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match="kv_cache must .*have the strides of value_cache"):
        torch.ops.xla_gpu.kv_cache_update(
            cache, key, key, torch.zeros(3, dtype=torch.int32), value_cache=other
        )


def test_blocks_at_unequal_distances() -> None:
    cache, key = torch.zeros(2, 3, 2, 4, 8)[:, :2], torch.ones(3, 2, 8)
    slots = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"kv_cache must have equal distances along num_blocks; got str"
    ):
        torch.ops.xla_gpu.kv_cache_update(cache, key, key, slots, kv_layout="nnb(h2)d")


def test_the_runtime_survives_a_fault() -> None:
    operands, attributes = split(attention(num_seqs=np.array(9, I32)))
    with pytest.raises(RuntimeError):
        doors.in_torch_xla("paged_attention", *operands, **attributes)
    doors.forget_failed_steps()
    operands, attributes = split(attention())
    assert np.isfinite(doors.in_torch_xla("paged_attention", *operands, **attributes)).all()
