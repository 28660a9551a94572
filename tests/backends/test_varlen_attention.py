"""varlen_attention and its derivative in JAX, and in PyTorch with and without torch.compile."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

import jax_frontend
import torch_frontend
from harness.arrays import to_numpy, to_torch
from harness.compare import assert_same_bits
from harness.reference import as_paged
from tests.cases.varlen import CASES, DIFFERENTIABLE, VarlenCase, oracle
from tests.support.backends import BACKENDS, JAX_ERRORS
from tests.support.calls import split_keywords

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Shares of the largest gradient. The gradients are rounded, and so is the output that they come from; on
some CPUs weights are bfloat16, too."""

Result = tuple[np.ndarray, dict[str, np.ndarray]]


def in_jax(arguments: dict[str, Any], weights: np.ndarray) -> Result:
    arrays, options = split_keywords(arguments)
    leaves = {name: arrays.pop(name) for name in DIFFERENTIABLE if name in arrays}

    def loss(leaves: Any, arrays: Any) -> Any:
        output = jax_frontend.varlen_attention(**leaves, **arrays, **options)
        return (output * weights).astype(jnp.float32).sum(), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(leaves, arrays)
    return np.asarray(output), {name: np.asarray(x) for name, x in gradients.items()}


def in_torch(arguments: dict[str, Any], weights: np.ndarray, *, compiled: bool = False) -> Result:
    arrays, options = split_keywords(arguments)
    tensors = {name: to_torch(x) for name, x in arrays.items()}
    leaves = [name for name in DIFFERENTIABLE if name in tensors]
    for name in leaves:
        tensors[name].requires_grad_()
    attend: Any = partial(torch_frontend.varlen_attention, **options)
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True)
    output = attend(**tensors)
    gradients = torch.autograd.grad(output, [tensors[x] for x in leaves], to_torch(weights))
    return to_numpy(output), dict(zip(leaves, map(to_numpy, gradients), strict=True))


def in_torch_with_threads(arguments: dict[str, Any], weights: np.ndarray) -> Result:
    """In PyTorch, whose results are those of one thread with two."""
    former = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(in_torch(arguments, weights))
    finally:
        torch.set_num_threads(former)
    assert_same_result(found[0], found[1])
    return found[0]


VARLEN: dict[str, Callable[..., Result]] = {
    "jax": in_jax,
    "torch": in_torch_with_threads,
    "inductor": partial(in_torch, compiled=True),
}


def assert_same_result(result: Result, expected: Result) -> None:
    assert_same_bits(result[0], expected[0])
    assert result[1].keys() == expected[1].keys()
    for name, gradient in result[1].items():
        assert_same_bits(gradient, expected[1][name])


@pytest.mark.parametrize("backend", VARLEN)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: VarlenCase, backend: str) -> None:
    """The output has the bits of paged_attention. The gradients are those of float64. Both have the
    same bits in each backend."""
    arguments, weights = case(), case.weights()
    weights[case.num_tokens :] = np.nan
    output, gradients = VARLEN[backend](arguments, weights)
    if backend != "jax":
        assert_same_result((output, gradients), in_jax(arguments, weights))
        return
    assert_same_bits_as_paged(output, case, BACKENDS["jax"])
    _, expected = oracle(arguments, weights)
    for name, gradient in gradients.items():
        assert gradient.dtype == arguments[name].dtype
        largest = max(1, np.abs(expected[name]).max(initial=0))
        error = np.abs(gradient.astype(np.float64) - expected[name]).max(initial=0)
        assert error <= TOLERANCES[case.dtype] * largest, (name, error, largest)
        if name in ("query", "key", "value"):
            assert not gradient[case.num_tokens :].any()


def assert_same_bits_as_paged(output: np.ndarray, case: VarlenCase, paged: Any) -> None:
    """Whatever the pages, and whether the tokens are prefilled, or the last one is decoded."""
    rest = case()
    query, keys, values, starts, num_seqs = (
        rest.pop(name) for name in ("query", "key", "value", "query_start_loc", "num_seqs")
    )
    count, max_seqs, random = len(case.lengths), len(starts) - 1, np.random.default_rng(2)
    operands, _ = as_paged(query, keys, values, starts, num_seqs, rest.pop("prefix_seqs", None))
    lens, contexts = operands[2].astype(np.int32), operands[3]
    lens[count:] = -7
    decode_starts = np.cumsum([0, *(np.diff(starts) > 0)]).astype(np.int32)
    last = starts[1:][np.diff(starts) > 0] - 1
    of_last = {name: rest[name][last] for name in ("bidirectional_ranges",) if name in rest}
    for page in (1, 16, 64):
        width = -(-max(lens[:count], default=0) // page)
        tables = random.permutation(max_seqs * width).astype(np.int32).reshape(max_seqs, width)
        caches = [
            np.full((max_seqs * width + 1, page, *rows.shape[1:]), np.nan, rows.dtype)
            for rows in (keys, values)
        ]
        for s, length in enumerate(lens[:count]):
            i = np.arange(length)
            for cache, rows in zip(caches, (keys, values), strict=True):
                cache[tables[s, i // page], i % page] = rows[contexts[s, :length]]
        attend = partial(paged, "paged_attention", kv_layout="nbhd", value_cache=caches[1])
        prefilled = attend(query, caches[0], lens, tables, starts, num_seqs, **rest)
        assert_same_bits(output, prefilled)
        step = (query[last], caches[0], lens, tables, decode_starts, num_seqs)
        assert_same_bits(output[last], attend(*step, **rest | of_last))


EVERYTHING = next(case for case in CASES if case.id == "everything-float32")
SMALL = replace(EVERYTHING, id="small", lengths=(5, 0, 3, 9), head_size=4, value_head_size=3)


def test_check_grads() -> None:
    """The derivatives of both frameworks are those of finite differences."""
    arguments = SMALL() | {"soft_cap": 3.0, "sliding_window": 4, "window_right": 2}
    arrays, options = split_keywords(arguments)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    for name in names[:3]:  # finite differences with NaN are NaN
        arrays[name] = np.nan_to_num(arrays[name])
    leaves = [arrays.pop(name) for name in names]

    def attend(*leaves: Any) -> Any:
        return jax_frontend.varlen_attention(
            **dict(zip(names, leaves, strict=True)), **arrays, **options
        )

    check_grads(attend, leaves, order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)
    tensors = {name: to_torch(x) for name, x in arrays.items()}

    def attend_in_torch(*leaves: Any) -> Any:
        return torch_frontend.varlen_attention(
            **dict(zip(names, leaves, strict=True)), **tensors, **options
        )

    inputs = [to_torch(x).requires_grad_() for x in leaves]
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(attend_in_torch, inputs, eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_gradients_of_a_sequence_depend_on_it_alone(backend: str) -> None:
    """They have the same bits in each run and in another batch, also beside NaN."""
    case = replace(EVERYTHING, arrays=("sinks", "bidirectional_ranges", "causal"))
    arguments, weights = case(), case.weights()
    first, end = arguments["query_start_loc"][3:5]
    alone = dict(arguments, query_start_loc=np.int32([0, end - first]), num_seqs=np.int32([1]))
    alone["causal"] = arguments["causal"][3:4]
    for name in ("query", "key", "value", "bidirectional_ranges"):
        alone[name] = arguments[name][first:end]
    output, expected = VARLEN[backend](alone, weights[first:end])
    for name in ("query", "key", "value"):
        arguments[name][:first] = arguments[name][end:] = np.nan
    for _ in range(2):
        in_batch, gradients = VARLEN[backend](arguments, weights)
        assert_same_bits(in_batch[first:end], output)
        for name in ("query", "key", "value"):
            assert_same_bits(gradients[name][first:end], expected[name])


def test_there_is_no_second_derivative() -> None:
    message = "^varlen_attention: it has no second derivative"
    arrays, options = split_keywords(SMALL())
    query = arrays.pop("query")

    def loss(query: Any) -> Any:
        return jax_frontend.varlen_attention(query, **arrays, **options).sum()

    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(query)
    _, pullback = jax.vjp(loss, query)
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda grad: pullback(grad)[0].sum())(1.0)
    tensors = {name: to_torch(x) for name, x in arrays.items()}
    leaf = to_torch(query).requires_grad_()
    output = torch_frontend.varlen_attention(leaf, **tensors, **options)
    (gradient,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        gradient.sum().backward()


def test_transformations_of_jax() -> None:
    arrays, options = split_keywords(SMALL())
    query, starts = (arrays.pop(name) for name in ("query", "query_start_loc"))
    weights = jnp.asarray(SMALL.weights())

    def loss(query: Any, starts: Any) -> Any:
        output = jax_frontend.varlen_attention(query, query_start_loc=starts, **arrays, **options)
        return (output * weights).sum()

    gradient = jax.jit(jax.grad(loss))
    expected = gradient(query, starts)
    queries, all_starts = jnp.stack([query, 2 * query]), jnp.stack([starts, 0 * starts])
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(queries, all_starts)
    for x, *one in zip(mapped, queries, all_starts, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(gradient(*one)))
    remade = jax.jit(jax.grad(jax.checkpoint(loss)))(query, starts)
    assert_same_bits(np.asarray(remade), np.asarray(expected))

    def twice(query: Any) -> Any:
        return jax.lax.scan(lambda sum_, _: (sum_ + loss(query, starts), None), 0.0, None, 2)[0]

    assert_same_bits(np.asarray(jax.jit(jax.grad(twice))(query)), np.asarray(2 * expected))


def test_memory_is_linear() -> None:
    """No array of JAX's program has tokens x tokens elements, nor sequences x tokens."""
    case = VarlenCase("long", (32,) * 128, num_heads=1, num_kv_heads=1, head_size=8, padding=0)
    arrays, options = split_keywords(case())
    names = ("query", "key", "value")

    def loss(*leaves: Any) -> Any:
        others = {name: x for name, x in arrays.items() if name not in names}
        return jax_frontend.varlen_attention(*leaves, **others, **options).sum()

    leaves = [arrays[name] for name in names]
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*leaves).compile().as_text()
    shapes = re.findall(r"[fsu]\d+\[([\d,]+)\]", program)
    sizes = [prod(map(int, shape.split(","))) for shape in shapes]
    assert max(sizes) == leaves[0].size


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("backend", VARLEN)
def test_no_sequences(backend: str, tokens: int) -> None:
    """Not even places for them: all is padding."""
    case = replace(EVERYTHING, lengths=(), padding=tokens)
    arguments, weights = case(), case.weights()
    arguments |= {"query_start_loc": np.int32([4]), "num_seqs": np.int32([0])}
    arguments |= {name: arguments[name][:0] for name in ("causal", "prefix_seqs")}
    output, gradients = VARLEN[backend](arguments, weights)
    assert not output.any() and not any(x.any() for x in gradients.values())


def test_large_logits() -> None:
    """No weight is above 1, however the log-sum-exp was rounded: the gradients are those of float64
    as far as float32 goes, and SDPA's are no better."""
    random = np.random.default_rng(0)
    for size in (1e2, 1e5, 1e9):
        query, key, value, dout = random.normal(size=(4, 200, 2, 64)).astype(np.float32)
        query *= size / 8
        starts, count = np.int32([0, 150, 200]), np.int32([2])
        arguments = {"query": query, "key": key, "value": value, "query_start_loc": starts}
        arguments |= {"num_seqs": count, "scale": 0.125}
        _, gradients = in_torch(arguments, dout)
        _, expected = oracle(arguments, dout)
        error = np.linalg.norm(gradients["value"] - expected["value"])
        assert error <= 1e-5 * np.linalg.norm(expected["value"])
        assert all(np.isfinite(x).all() for x in gradients.values())


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "promise": (
        {"max_query_len": 8},
        "query_start_loc must give sequence 3 at most max_query_len=8 tokens; got 9",
    ),
    "order": (
        {"query_start_loc": np.int32([0, 5, 4, 8, 17, 0, 0, 0])},
        "query_start_loc must not decrease; got query_start_loc[2]=4 after query_start_loc[1]=5",
    ),
    "num_seqs": ({"num_seqs": np.int32([8])}, "num_seqs must be from 0 to max_seqs=7; got 8"),
    "prefix": (
        {"prefix_seqs": np.int32([-1, 0, 2, 0, 0, 0, 0])},
        "prefix_seqs[2] must be -1, or the number of an earlier sequence; got 2",
    ),
    "negative prefix": (
        {"prefix_seqs": np.int32([-1, -2, 1, 0, 0, 0, 0])},
        "prefix_seqs[1] must be -1, or the number of an earlier sequence; got -2",
    ),
}


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", FAULTS)
def test_wrong_values(name: str, backend: str) -> None:
    changes, message = FAULTS[name]
    with pytest.raises(JAX_ERRORS, match=re.escape(f"varlen_attention: {message}")):
        VARLEN[backend](SMALL() | changes, SMALL.weights())
