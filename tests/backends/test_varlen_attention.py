"""varlen_attention and its derivative in JAX, and in PyTorch with and without torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

import jax_frontend
import torch_frontend
from harness import hlo
from harness.arrays import to_numpy, to_torch
from harness.compare import assert_same_bits
from tests.cases.varlen import CASES, DIFFERENTIABLE, VarlenCase, oracle
from tests.support.backends import BACKENDS
from tests.support.calls import split_keywords

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Of the largest gradient. The gradients are rounded, and so is the output that they come from; on
some CPUs the forward's weights are bfloat16, too."""

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


VARLEN: dict[str, Callable[..., Result]] = {
    "jax": in_jax,
    "torch": in_torch,
    "inductor": partial(in_torch, compiled=True),
}


@pytest.mark.parametrize("backend", VARLEN)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: VarlenCase, backend: str) -> None:
    """The output has the bits of paged_attention. The gradients are those of float64."""
    arguments, weights = case(), case.weights()
    weights[case.num_tokens :] = np.nan
    output, gradients = VARLEN[backend](arguments, weights)
    assert_same_bits_as_paged(output, case, BACKENDS["jax" if backend == "jax" else "torch"])
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
    max_seqs, random = len(starts) - 1, np.random.default_rng(2)
    lens = np.array([*case.lengths, *[-7] * (max_seqs - len(case.lengths))], np.int32)
    decode_starts = np.cumsum([0, *(lens > 0)]).astype(np.int32)
    last = [int(end) - 1 for end, length in zip(starts[1:], lens, strict=True) if length > 0]
    of_last = {name: rest[name][last] for name in ("bidirectional_ranges",) if name in rest}
    for page in (1, 16, 64):
        width = -(-max(case.lengths, default=0) // page)
        tables = random.permutation(max_seqs * width).astype(np.int32).reshape(max_seqs, width)
        caches = [
            np.full((max_seqs * width + 1, page, *rows.shape[1:]), np.nan, rows.dtype)
            for rows in (keys, values)
        ]
        for s, length in enumerate(case.lengths):
            own, i = slice(starts[s], starts[s] + length), np.arange(length)
            for cache, rows in zip(caches, (keys, values), strict=True):
                cache[tables[s, i // page], i % page] = rows[own]
        attend = partial(paged, "paged_attention", kv_layout="nbhd", value_cache=caches[1])
        prefilled = attend(query, caches[0], lens, tables, starts, num_seqs, **rest)
        assert_same_bits(output, prefilled)
        step = (query[last], caches[0], lens, tables, decode_starts, num_seqs)
        assert_same_bits(output[last], attend(*step, **rest | of_last))
