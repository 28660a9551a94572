"""Calls that break one rule of the contract each, in every backend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from harness import reference
from shared_ffi import kv_cache_update, paged_attention
from shared_ffi.spec import NO_OVERLAP, ArraySpec, Call, numbers_of
from shared_ffi.xla import runtimes
from tests.cases.all import SAMPLED_CASES, UPDATE_CASES
from tests.cases.bad_calls import (
    DYNAMIC,
    FUNCTIONS,
    MISTAKES,
    STATIC,
    BadCall,
    Mistake,
    assert_says,
)
from tests.cases.sound_calls import SOUND, attention, rotated_update, split, update
from tests.support import backends

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64


@pytest.fixture(autouse=True)
def forget_failed_steps() -> Iterator[None]:
    yield
    backends.forget_failed_steps()


@pytest.mark.parametrize("op", SOUND)
@pytest.mark.parametrize(
    "backend",
    [*backends.BACKENDS.values(), backends.in_inductor],
    ids=[*backends.BACKENDS, "inductor"],
)
def test_sound_calls_agree_with_the_oracle(backend: backends.Backend, op: str) -> None:
    operands, attributes = split(SOUND[op]())
    expected = getattr(reference, op)(*operands, **attributes)
    result = backend(op, *operands, **attributes)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("call", STATIC)
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_static_errors(backend: str, call: BadCall) -> None:
    operands, attributes = split(call.arguments)
    # torch.compile wraps errors of its tracing in an exception with the same text.
    error = Exception if backend == "openxla" else call.error
    with pytest.raises(error) as raised:
        backends.BACKENDS[backend](call.op, *operands, **attributes)
    assert_says(str(raised.value), call.message)


@pytest.mark.parametrize("call", DYNAMIC)
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_dynamic_errors(backend: str, call: BadCall) -> None:
    operands, attributes = split(call.arguments)
    error = {"jax": backends.JAX_ERRORS, "torch": ValueError}.get(backend, RuntimeError)
    with pytest.raises(error) as raised:
        backends.BACKENDS[backend](call.op, *operands, **attributes)
    assert_says(str(raised.value), call.message)


def _given(value: Any, convert: Any) -> Any:
    """A value with each array in it converted."""
    if isinstance(value, np.ndarray):
        return convert(value)
    is_list = isinstance(value, list | tuple)
    return type(value)(_given(x, convert) for x in value) if is_list else value


@pytest.mark.parametrize("frontend", ["jax", "torch"])
@pytest.mark.parametrize("call", MISTAKES)
def test_mistakes_in_calls_of_functions(frontend: str, call: Mistake) -> None:
    package, convert = {
        "jax": (jax_frontend, jnp.asarray),
        "torch": (torch_frontend, backends.to_torch),
    }[frontend]
    given = FUNCTIONS[call.function] | call.changes
    arguments = {name: _given(x, convert) for name, x in given.items()}
    if frontend not in call.messages:
        getattr(package, call.function)(**arguments)
        return
    with pytest.raises((TypeError, ValueError)) as raised:
        getattr(package, call.function)(**arguments)
    shown = str(raised.value).partition("\n")[0]
    assert shown == f"{call.function}: {call.messages[frontend]}"


def test_host_functions_under_jit() -> None:
    """They need values, which a traced array does not have."""
    arrays, _ = split(attention())
    traced = {
        "pad_batch": lambda x: jax_frontend.pad_batch(
            **FUNCTIONS["pad_batch"] | {"context_lens": x}
        ),
        "paged_attention.check_values": lambda x: paged_attention.check_values(
            *arrays[:2], x, *arrays[3:]
        ),
        "kv_cache_update.check_values": lambda x: kv_cache_update.check_values(arrays[1], x),
    }
    for name, function in traced.items():
        with pytest.raises(TypeError) as raised:
            jax.jit(function)(arrays[2])
        rule = rf"{name}: \w+ must have values on the host; got a value under jax.jit. Call {name} "
        assert re.match(rule + "outside of the jitted function", str(raised.value))
    slots = partial(jax_frontend.slot_mapping, *arrays[2:], block_size=2)
    with pytest.raises(TypeError, match="num_tokens is a constant of the program"):
        jax.jit(lambda x: slots(num_tokens=x))(4)


CHECKERS = {
    "paged_attention": paged_attention.check_values,
    "kv_cache_update": kv_cache_update.check_values,
}


@pytest.mark.parametrize(
    "kind", [np.asarray, backends.to_torch, jnp.asarray], ids=["numpy", "torch", "jax"]
)
@pytest.mark.parametrize("call", DYNAMIC)
def test_check_values_gives_the_same_message(call: BadCall, kind: Any) -> None:
    arguments = {name: kind(x) for name, x in call.arguments.items() if isinstance(x, np.ndarray)}
    if call.op == "kv_cache_update":
        names = ("kv_cache", "slot_mapping", "positions", "cos_sin_cache")
        arguments = {name: arguments[name] for name in names if name in arguments}
    if "max_query_len" in call.arguments:
        arguments["max_query_len"] = call.arguments["max_query_len"]
    with pytest.raises(ValueError) as raised:
        CHECKERS[call.op](**arguments)
    assert str(raised.value) == call.message


def test_check_values_knows_layouts() -> None:
    operands, _ = split(attention(block_tables=np.array([[3, 4], [0, 9], [9, 9]], I32)))
    for layout, shape in ((None, (4, 2, 3, 8)), ("nnbhd", (2, 2, 2, 3, 8)), ("hnbd", (3, 4, 2, 8))):
        operands[1] = np.ones(shape, F32)  # K alone, with an odd number of heads
        with pytest.raises(
            ValueError, match=r"block_tables\[0, 1\] must be .* num_blocks - 1=3; got 4"
        ):
            paged_attention.check_values(*operands, kv_layout=layout)


def test_check_values_of_64_bit_tree_masks() -> None:
    operands, _ = split(attention())
    for dtype, word, rule in (
        (np.int64, 2**40, f"tree_mask must hold words of 32 bits; got {2**40}"),
        (np.uint64, 2**32, f"tree_mask must hold words of 32 bits; got {2**32}"),
        (np.uint32, 2**31, r"tree_mask\[0\] must have bits of the sequence's"),
        (np.int64, 2**31, r"tree_mask\[0\] must have bits of the sequence's"),
    ):
        mask = np.zeros((4, 2), dtype)
        mask[0, 0] = word
        with pytest.raises(ValueError, match=f"^paged_attention: {rule}"):
            paged_attention.check_values(*operands, tree_mask=mask)


@pytest.mark.parametrize("causal", [[2**32, 0, 7], [True, False, False], (1, 0, 1)], ids=str)
def test_check_values_reads_causal_as_the_op_does(causal: Any) -> None:
    """A sequence of one position and two tokens, which only causal attention refuses."""
    message = r"context_lens\[0\] must count the sequence's 2 query tokens too; got 1"
    operands, _ = split(attention(context_lens=np.int32([1, 1, 0])))
    with pytest.raises(ValueError, match=message):
        paged_attention.check_values(*operands, causal=causal)
    with jax.enable_x64(True), pytest.raises(backends.JAX_ERRORS, match=message):
        jax.block_until_ready(jax_frontend.paged_attention(*operands, 0.5, causal=causal))
    for backward in (False, np.bool_(False), [0, 1, 1], np.uint8([0, 1, 1])):
        paged_attention.check_values(*operands, causal=backward)
        jax.block_until_ready(jax_frontend.paged_attention(*operands, 0.5, causal=backward))


def test_check_values_accepts_sound_calls() -> None:
    for case in SAMPLED_CASES:
        attributes = case.attributes()
        names = ("causal", "window_right", "kv_layout", "max_query_len", "tree_mask")
        names += ("bidirectional_ranges",)
        others = {name: attributes[name] for name in names if name in attributes}
        paged_attention.check_values(*case.inputs(), case.sliding_window, **others)
    for case in UPDATE_CASES:
        inputs, attributes = case.inputs(), case.attributes()
        names = ("kv_layout", "positions", "cos_sin_cache")
        others = {name: attributes[name] for name in names if name in attributes}
        kv_cache_update.check_values(inputs.kv_cache, inputs.slot_mapping, **others)


def test_xla_passes_the_errors_of_a_changed_program_on() -> None:
    """tests/kernels/test_corrupt_calls.py has more of them, without XLA."""
    runtimes.register()
    operands, _ = split(attention(block_tables=np.ones((3, 2), F32)))
    attributes = {"scale": F32(0.5), "sliding_window": I64(0), "soft_cap": F32(0)}
    result = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
    message = (
        r"^INVALID_ARGUMENT: paged_attention: operand block_tables must be int32 \[3, any\]; got"
    )
    with pytest.raises(backends.JAX_ERRORS, match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call(paged_attention.TARGET, result)(*operands, **attributes)
        )


@pytest.mark.parametrize(
    "changes",
    [{"slot_mapping": np.array([0, 8, -1], I32)}, {"positions": np.array([0, 8, 0], I32)}],
    ids=["slot", "position"],
)
def test_bad_token_leaves_cache_and_query_unchanged(changes: dict[str, np.ndarray]) -> None:
    operands, rotary = split(rotated_update(**changes))
    cache = backends.to_torch(operands[0])
    keywords = {name: backends.to_torch(x) for name, x in rotary.items()}
    with pytest.raises(ValueError, match=next(iter(changes))):
        torch.ops.xla_gpu.kv_cache_update(cache, *map(backends.to_torch, operands[1:]), **keywords)
    assert not cache.any()
    assert (keywords["query"] == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": True}, "scale must have type float; got bool"),
        ({"sliding_window": True}, "sliding_window must have type int; got bool"),
        ({"causal": False, "window_right": True}, "window_right must have type int; got bool"),
    ],
    ids=str,
)
def test_jax_refuses_bool_as_number(changes: dict[str, Any], message: str) -> None:
    """Only in JAX: torch's dispatcher converts booleans to numbers before the op sees them."""
    operands, attributes = split(attention() | changes)
    with pytest.raises(TypeError, match=message):
        backends.in_jax("paged_attention", *operands, **attributes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kv_layout": ["nbhd"]},
            TypeError,
            "kv_layout must have type str; got list. Pass a string, such as 'n2bhd'",
        ),
        (
            {"kv_layout": 5},
            TypeError,
            "kv_layout must have type str; got int. Pass a string, such as 'n2bhd'",
        ),
        (
            {"kv_layout": "nb(h2)d\n"},
            ValueError,
            "kv_layout must name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' "
            "do; got 'nb(h2)d\\n'. Name the cache's dimensions in their order, in brackets those that are one",
        ),
        (
            {"causal": None},
            TypeError,
            "causal must have type bool; got NoneType. Pass True or False, or an array with one for each sequence",
        ),
        (
            {"scale": np.complex64(1)},
            TypeError,
            "scale must have type float; got complex64. Pass a number",
        ),
        (
            {"scale": None},
            TypeError,
            "scale must have type float; got NoneType. Give it: it is usually head_size ** -0.5",
        ),
        (
            {"sliding_window": 4.0},
            TypeError,
            "sliding_window must have type int; got float. Pass int(sliding_window)",
        ),
        (
            {"scale": 10**400},
            ValueError,
            "scale must be finite in float32; got an integer of 1329 bits. It is usually head_size ** -0.5",
        ),
        (
            {"soft_cap": 10**400},
            ValueError,
            "soft_cap must be positive and finite in float32, or None; got an integer of 1329 bits. "
            "Leave soft_cap out if there is none",
        ),
        (
            {"sliding_window": -(10**400)},
            ValueError,
            "sliding_window must be at least 1, or None; got an integer of 1329 bits. "
            "Leave sliding_window out if there is none",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_types_outside_the_schema(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Torch's dispatcher refuses most of them in its own words, before the op sees them."""
    operands, attributes = split(attention() | changes)
    with pytest.raises(error) as raised:
        backends.in_jax("paged_attention", *operands, **attributes)
    assert str(raised.value) == f"paged_attention: {message}"
    if "causal" in changes or isinstance(changes.get("kv_layout"), str):
        with pytest.raises(error) as raised:
            backends.in_torch("paged_attention", *operands, **attributes)
        assert str(raised.value) == f"paged_attention: {message}"


def test_arguments_that_are_constants_of_a_program() -> None:
    operands, attributes = split(attention())
    cure = "{0} is a constant of the program: name it in static_argnames of jax.jit, or bind it with functools.partial"

    def call(**changes: Any) -> Any:
        return jax_frontend.paged_attention(*operands, **attributes | changes)

    for name, kind, value in (("scale", "float", 0.5), ("sliding_window", "int", 3)):
        with pytest.raises(TypeError) as raised:
            jax.jit(lambda x, name=name: call(**{name: x}))(value)
        rule = f"paged_attention: {name} must have type {kind}; got DynamicJaxprTracer. "
        assert str(raised.value) == rule + cure.format(name)
        with pytest.raises(TypeError, match=rf"got ArrayImpl. Pass {kind}\({name}\)$"):
            call(**{name: jnp.asarray([value])})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_may_be_an_array_without_dimensions(dtype: str) -> None:
    operands, attributes = split(attention())
    of_numbers = attributes | {"scale": 0.125}
    in_jax = partial(jax_frontend.paged_attention, *map(jnp.asarray, operands), **attributes)
    expected = jax_frontend.paged_attention(*map(jnp.asarray, operands), **of_numbers)
    for scale in (jnp.array(0.125, dtype), np.array(0.125, dtype)):
        assert (in_jax(scale=scale) == expected).all()
    with pytest.raises(TypeError, match=r"scale must have type float; got ArrayImpl"):
        in_jax(scale=jnp.array(1))

    tensors = [backends.to_torch(x) for x in operands]
    in_torch = partial(torch_frontend.paged_attention, *tensors, **attributes)
    scale = torch.tensor(0.125, dtype=getattr(torch, dtype))
    assert torch.equal(in_torch(scale=scale), in_torch(scale=0.125))
    for wrong in (scale[None], scale.int(), scale.clone().requires_grad_()):
        with pytest.raises(TypeError, match=r"scale must have type float; got Tensor"):
            in_torch(scale=wrong)


@pytest.mark.parametrize("op", SOUND)
def test_none_instead_of_array(op: str) -> None:
    operands, attributes = split(SOUND[op]())
    for convert, function in (
        (jnp.asarray, getattr(jax_frontend, op)),
        (backends.to_torch, getattr(torch.ops.xla_gpu, op)),
    ):
        for number, name in enumerate([*SOUND[op]()][: len(operands)]):
            arrays = [convert(x) for x in operands]
            arrays[number] = None
            with pytest.raises(TypeError) as raised:
                function(*arrays, **attributes)
            remedy = "It is not optional"
            if name == "kv_cache" and convert is backends.to_torch:
                remedy = "kv_cache_update writes in place and returns None"
            elif name in (*paged_attention.METADATA, "slot_mapping"):
                remedy += "; pad_batch makes it"
            assert str(raised.value) == f"{op}: {name} must be an array; got None. {remedy}"


def float4(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float4_e2m1fn")


@pytest.mark.parametrize(
    ("caches", "error", "message"),
    [
        (
            {"kv_cache": float4(4, 2, 2, 8), "value_cache": ArraySpec((4, 2, 2, 4), "uint8")},
            TypeError,
            "value_cache must have kv_cache's dtype float4_e2m1fn, or int8; got uint8",
        ),
        (
            {"kv_cache": ArraySpec((4, 2, 2, 8), "int8"), "value_cache": float4(4, 2, 2, 7)},
            ValueError,
            "value_cache must have an even head size with dtype float4_e2m1fn, which holds pairs",
        ),
        (
            {"kv_cache": float4(4, 2, 4, 4)},
            ValueError,
            "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got",
        ),
        (
            {"kv_cache": ArraySpec((4, 2, 4, 8), "float4_e2m1fn_x2")},
            ValueError,
            "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size / 2=4]",
        ),
    ],
    ids=str,
)
def test_caches_of_float4(caches: dict[str, ArraySpec], error: Any, message: str) -> None:
    """No array of NumPy stands for one in all frameworks."""
    scales = {"k_scale": ArraySpec((), "float32")} if len(caches) > 1 else {}
    with pytest.raises(error, match=re.escape(message)):
        check_on_specs(attention(), caches | scales)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float4_e2m1fn_x2"])
@pytest.mark.parametrize("make", [attention, update])
def test_cuda_refuses_float4(make: Any, dtype: str) -> None:
    shape = (4, 2, 4, 8 // numbers_of(dtype))
    call = check_on_specs(make(), {"kv_cache": ArraySpec(shape, dtype)})
    message = (
        f"kv_cache must have no dtype of 4 bits on CUDA; got {dtype}. Hold pairs of its numbers in "
        "uint8, and give codes='e2m1'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        call.results_on("cuda")


def check_on_specs(arguments: dict[str, Any], arrays: dict[str, ArraySpec]) -> Call:
    op = paged_attention if "query" in arguments else kv_cache_update
    specs = {
        name: ArraySpec(x.shape, x.dtype.name) if isinstance(x, np.ndarray) else x
        for name, x in arguments.items()
    }
    return op.check(**specs | arrays)


def test_update_refuses_overlapping_cache() -> None:
    cache, key, value, slots = map(backends.to_torch, split(update())[0])
    repeated = torch.ones_like(cache)[:1].expand_as(cache)
    rule = "must have no overlapping elements: it is written in place; got strides"
    with pytest.raises(ValueError, match=rf"^kv_cache_update: kv_cache {rule} \[0, 32, 8, 1\]"):
        torch.ops.xla_gpu.kv_cache_update(repeated, key, value, slots)
    keys, values = torch.zeros(4, 2, 2, 8), torch.zeros(4, 2, 1, 8).expand(4, 2, 2, 8)
    with pytest.raises(ValueError, match="^kv_cache_update: value_cache must have the strides"):
        torch.ops.xla_gpu.kv_cache_update(keys, key, value, slots, value_cache=values)
    assert (repeated == 1).all() and not values.any()
    operands = [*map(backends.to_torch, split(attention())[0])]
    assert (
        torch.ops.xla_gpu.paged_attention(operands[0], repeated, *operands[2:], 0.5)[:3] == 1
    ).all()


ONE_TENSOR = {
    "columns": ((8, 2, 2, 16), lambda x, n: (x[..., :8], x[..., 8 - n : 16 - n])),
    "halves of a block": ((8, 2, 2, 2, 8), lambda x, n: (x[:, 0], x[:, 1 - n])),
    "ranges of blocks": ((8, 2, 2, 8), lambda x, n: (x[:4], x[4 - n : 8 - n])),
    "pages in turn": ((10, 2, 2, 8), lambda x, n: (x[:8:2], x[1 + n : 9 + n : 2])),
    "heads": ((8, 2, 4, 8), lambda x, n: (x[:, :, :2], x[:, :, 2 - n : 4 - n])),
    "tokens of blocks": ((8, 4, 2, 8), lambda x, n: (x[:, :2], x[:, 2 - n : 4 - n])),
}
"""Views for K and V of one tensor, which share elements if n is 1."""

ROUTES: dict[str, Any] = {
    "eager": (backends.to_torch, lambda f: f),
    "inductor": (backends.to_torch, torch.compile),
    "openxla": (backends.to_torch, partial(torch.compile, backend="openxla")),
    "torch_xla": (backends.to_xla, lambda f: f),
}


@pytest.mark.parametrize("name", ["k_scale_cache", "v_scale_cache"])
def test_update_refuses_scales_that_it_cannot_write(name: str) -> None:
    _, key, value, slots = map(backends.to_torch, split(update())[0])
    cache, memory = torch.zeros(4, 2, 4, 8, dtype=torch.int8), torch.zeros(2, 4, 2, 2)
    scales: dict[str, Any] = {"k_scale_cache": memory[0], "v_scale_cache": memory[1]}
    rule = f"^kv_cache_update: {name} must {NO_OVERLAP}; got strides "
    for expanded in (torch.zeros(4, 2, 1).expand(4, 2, 2), torch.zeros(2, 2).expand(4, 2, 2)):
        with pytest.raises(ValueError, match=rule + r"\["):
            torch.ops.xla_gpu.kv_cache_update(cache, key, value, slots, **scales | {name: expanded})
    rule = (
        r"^kv_cache_update: v_scale_cache must not share memory with k_scale_cache: it is written"
    )
    with pytest.raises(ValueError, match=rule):
        shared = dict.fromkeys(scales, memory[0])
        torch.ops.xla_gpu.kv_cache_update(cache, key, value, slots, **shared)
    assert cache.count_nonzero() == memory.count_nonzero() == 0
    torch.ops.xla_gpu.kv_cache_update(cache, key, value, slots, **scales)
    assert memory.count_nonzero() == 8


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("views", ONE_TENSOR)
def test_update_refuses_caches_that_share_elements(views: str, route: str) -> None:
    (convert, compiled), (shape, cut) = ROUTES[route], ONE_TENSOR[views]
    _, key, value, slots = map(convert, split(update())[0])

    def run(memory: torch.Tensor, n: int) -> None:
        keys, values = cut(memory, n)
        torch.ops.xla_gpu.kv_cache_update(keys, key, value, slots, value_cache=values)

    memory = convert(np.zeros(shape, np.float32))
    rule = "kv_cache_update: value_cache must not share memory with .* got the memory of kv_cache"
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match=rule):
        compiled(run)(memory, 1)
    assert not memory.cpu().any()
    compiled(run)(memory, 0)
    apart = [torch.zeros_like(x) for x in cut(torch.zeros(shape), 0)]
    operands = [x.cpu() for x in (key, value, slots)]
    torch.ops.xla_gpu.kv_cache_update(apart[0], *operands, value_cache=apart[1])
    for actual, expected in zip(cut(memory.cpu(), 0), apart, strict=True):
        assert torch.equal(actual, expected) and expected.any()


def test_update_refuses_caches_that_share_memory() -> None:
    _, key, value, slots = map(backends.to_torch, split(update())[0])
    rule = "^kv_cache_update: value_cache must not share memory with .* got the memory of kv_cache"
    keys = torch.zeros(4, 2, 2, 8)
    for values in (keys, keys.view(4, 2, 2, 8)):
        with pytest.raises(ValueError, match=rule):
            torch.ops.xla_gpu.kv_cache_update(keys, key, value, slots, value_cache=values)
    assert not keys.any()
    pool = torch.zeros(8, 2, 2, 8)  # pages of K and V alternate; the slots would tell them apart
    with pytest.raises(ValueError, match=rule):
        torch.ops.xla_gpu.kv_cache_update(
            pool[:7], key, value, slots // 2 * 4, value_cache=pool[1:]
        )
    empty = keys[4:]  # shares nothing, wherever it begins
    torch.ops.xla_gpu.kv_cache_update(empty, key[:0], value[:0], slots[:0], value_cache=empty)


def test_update_refuses_a_query_of_other_strides() -> None:
    operands, rotary = split(rotated_update())
    arrays = [*map(backends.to_torch, operands)]
    rule = "^kv_cache_update: query must have tokens with dense heads that do not overlap: it is"
    for query in (
        torch.ones(4, 3, 8).transpose(0, 1),
        torch.ones(1, 4, 8).expand(3, 4, 8),
        torch.ones(3, 4, 16)[..., ::2],
    ):
        keywords = {name: backends.to_torch(x) for name, x in rotary.items()} | {"query": query}
        with pytest.raises(ValueError, match=rule):
            torch.ops.xla_gpu.kv_cache_update(*arrays, **keywords)
        assert (query == 1).all() and not arrays[0].any()


@pytest.mark.parametrize("first_key", [0, 1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_update_refuses_a_query_that_shares_elements_with_the_key(
    route: str, first_key: int
) -> None:
    """Query and key are heads of one projection."""
    convert, compiled = ROUTES[route]
    operands, rotary = split(rotated_update())
    cache, key, value, slots = map(convert, operands)
    keywords = {name: convert(x) for name, x in rotary.items() if name != "query"}
    heads = key.shape[1]

    def run(rows: torch.Tensor) -> None:
        query, keys = rows[:, 1:][:, :heads], rows[:, 1 + first_key * heads // 2 :][:, :heads]
        torch.ops.xla_gpu.kv_cache_update(cache, keys, value, slots, query=query, **keywords)

    rows = torch.cat([torch.ones_like(key)] * 3, 1)
    if first_key == 2:
        compiled(run)(rows)
        assert cache.cpu().any()
        return
    rule = "query must not share memory with key: it is written in place; got the memory of key"
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match=rule):
        compiled(run)(rows)
    assert not cache.cpu().any()


def test_jax_refuses_interleaved_of_another_type() -> None:
    operands, rotary = split(rotated_update(interleaved=1))
    with pytest.raises(TypeError, match="^kv_cache_update: interleaved must have type bool; got"):
        backends.in_jax("kv_cache_update", *operands, **rotary)


def test_update_refuses_negated_view() -> None:
    cache, key, value, slots = map(backends.to_torch, split(update())[0])
    keys = torch.zeros(4, 2, 2, 8)
    rule = "must not be a lazily negated view, as it is written to"
    with pytest.raises(ValueError, match=f"^kv_cache_update: kv_cache {rule}"):
        torch.ops.xla_gpu.kv_cache_update(torch._neg_view(cache), key, value, slots)
    with pytest.raises(ValueError, match=f"^kv_cache_update: value_cache {rule}"):
        torch.ops.xla_gpu.kv_cache_update(
            keys, key, value, slots, value_cache=torch._neg_view(keys.clone())
        )
    torch.ops.xla_gpu.kv_cache_update(cache, torch._neg_view(key), value, slots)
    assert (cache[0, 0, 0] == -1).all() and not keys.any()
    query, kv_cache, *rest = map(backends.to_torch, split(attention())[0])
    negated = torch.ops.xla_gpu.paged_attention(query, torch._neg_view(kv_cache), *rest, 0.5)
    assert torch.equal(negated, torch.ops.xla_gpu.paged_attention(query, -kv_cache, *rest, 0.5))


def test_update_refuses_strided_rows() -> None:
    cache = torch.zeros(4, 2, 8, 4).transpose(2, 3)
    key = torch.ones(3, 2, 8)
    with pytest.raises(
        ValueError, match=r"kv_cache must be contiguous in head_size; got strides \[64, 32, 1, 4\]"
    ):
        torch.ops.xla_gpu.kv_cache_update(cache, key, key, torch.zeros(3, dtype=torch.int32))


def test_update_refuses_caches_with_different_strides() -> None:
    cache, other = torch.zeros(4, 2, 2, 8), torch.zeros(2, 4, 2, 8).transpose(0, 1)
    key = torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match="value_cache must have the strides of kv_cache"):
        torch.ops.xla_gpu.kv_cache_update(
            cache, key, key, torch.zeros(3, dtype=torch.int32), value_cache=other
        )


def test_strides_of_values_with_a_head_size_of_their_own() -> None:
    """In the proportion of the head sizes, or those of the keys: other strides are refused."""
    key, value, slots = torch.ones(3, 2, 12), torch.full((3, 2, 8), 2.0), torch.arange(3)
    rows = torch.zeros(4, 2, 2, 20)
    dense, of_rows = (torch.zeros(4, 2, 2, 12), torch.zeros(4, 2, 2, 8)), rows.split((12, 8), 3)
    for keys, values in (dense, of_rows):
        torch.ops.xla_gpu.kv_cache_update(keys, key, value, slots, value_cache=values)
        assert keys.sum() == key.sum() and values.sum() == value.sum()
    metadata = [torch.tensor(x, dtype=torch.int32) for x in ([3], [[0, 1]], [0, 1], 1)]
    results = [
        torch.ops.xla_gpu.paged_attention(
            torch.ones(1, 4, 12), keys, *metadata, 0.5, value_cache=values
        )
        for keys, values in (dense, of_rows)
    ]
    assert results[0].shape == (1, 4, 8) and (results[0] == 2).all()
    assert torch.equal(*results)
    with pytest.raises(
        ValueError,
        match=r"value_cache must have the strides of kv_cache, \[48, 24, 12, 1\], or 8/12 of them; "
        r"got strides \[80, 40, 20, 1\]",
    ):
        torch.ops.xla_gpu.kv_cache_update(dense[0], key, value, slots, value_cache=of_rows[1])


def test_update_refuses_unequal_block_strides() -> None:
    cache, key = torch.zeros(2, 3, 2, 4, 8)[:, :2], torch.ones(3, 2, 8)
    slots = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"kv_cache must have equal distances along num_blocks; got str"
    ):
        torch.ops.xla_gpu.kv_cache_update(cache, key, key, slots, kv_layout="nnb(h2)d")


def test_runtime_survives_an_error() -> None:
    operands, attributes = split(attention(num_seqs=np.array(9, I32)))
    with pytest.raises(RuntimeError):
        backends.in_torch_xla("paged_attention", *operands, **attributes)
    backends.forget_failed_steps()
    operands, attributes = split(attention())
    assert np.isfinite(backends.in_torch_xla("paged_attention", *operands, **attributes)).all()
