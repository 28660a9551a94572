"""Walsh-Hadamard transforms of a cache leave attention as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from harness import reference
from harness.arrays import DTYPES, to_numpy, to_torch
from harness.compare import assert_same_bits
from tests.support import backends

HADAMARD: dict[str, Callable[[Any], Any]] = {
    "jax": lambda x: np.asarray(jax.jit(jax_frontend.hadamard)(x)),
    "torch": lambda x: to_numpy(torch_frontend.hadamard(to_torch(x))),
}


def matrix(head_size: int) -> np.ndarray:
    """The orthonormal Walsh-Hadamard matrix of each block on the diagonal, in float64."""
    block = max(n for n in range(1, head_size + 1) if head_size % n == 0 and n & (n - 1) == 0)
    signs = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return np.kron(np.eye(head_size // block), np.array(signs) / block**0.5)


@pytest.mark.parametrize("head_size", [1, 17, 6, 32, 80, 96, 128, 192])
def test_the_matrix(head_size: int) -> None:
    """The oracle's transform, whose bits kernels must have, multiplies by it."""
    x = np.random.default_rng(head_size).standard_normal((3, 2, head_size)).astype(np.float32)
    wanted = x.astype(np.float64) @ matrix(head_size)
    np.testing.assert_allclose(reference.transformed(x), wanted, rtol=0, atol=3e-6)
    np.testing.assert_allclose(matrix(head_size) @ matrix(head_size), np.eye(head_size), atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_size", [1, 6, 80, 128])
@pytest.mark.parametrize("backend", HADAMARD)
def test_the_function_has_the_bits_of_the_update(backend: str, head_size: int, dtype: str) -> None:
    rng = np.random.default_rng(head_size)
    x = rng.standard_normal((3, 2, head_size)).astype(DTYPES[dtype])
    wanted = reference.transformed(x).astype(x.dtype)
    for shape in (x.shape, (6, head_size), (head_size,), (0, head_size)):
        heads = x.reshape(-1, head_size)[: 1 if len(shape) == 1 else None]
        count = int(np.prod(shape[:-1]))
        given = heads[:count].reshape(shape)
        same = wanted.reshape(-1, head_size)[:count].reshape(shape)
        assert_same_bits(HADAMARD[backend](given), same)


def test_one_compiled_function_takes_all_numbers_of_tokens() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        torch_frontend.hadamard, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (5, 2, 7):
        x = torch.randn(tokens, 3, 80, dtype=torch.bfloat16)
        with torch.compiler.set_stance("fail_on_recompile" if tokens != 5 else "default"):
            assert torch.equal(compiled(x), torch_frontend.hadamard(x))


def test_the_function_has_a_derivative() -> None:
    x = torch.randn(3, 24, requires_grad=True)
    torch_frontend.hadamard(x).backward(torch.ones(3, 24))
    assert torch.equal(x.grad, torch_frontend.hadamard(torch.ones(3, 24)))
    ones = np.ones((3, 24), np.float32)
    _, pullback = jax.vjp(jax_frontend.hadamard, ones)
    np.testing.assert_allclose(pullback(ones)[0], x.grad, atol=1e-6)


@pytest.mark.parametrize("has_signs", [False, True])
@pytest.mark.parametrize("hadamard", ["k", "v", "kv"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_attention_stays_as_it_was(backend: str, hadamard: str, has_signs: bool) -> None:
    """With rotated queries of several heads for each of K, and undone in both ways."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size, tokens, hidden = 6, 2, 24, 11, 10
    query, key, value = (
        rng.standard_normal((tokens, n, size)).astype(np.float32)
        for n in (heads, kv_heads, kv_heads)
    )
    weight = rng.standard_normal((hidden, heads * size)).astype(np.float32)
    signs = rng.choice(np.float32([-1, 1]), size) if has_signs else np.ones(size, np.float32)
    kv_cache = np.zeros((4, 4, 2 * kv_heads, size), np.float32)
    rows = [kv_cache, key, value, np.arange(tokens, dtype=np.int32) + 4]
    rotary = {
        "query": query,
        "positions": np.arange(tokens, dtype=np.int32),
        "cos_sin_cache": np.cos(np.arange(16 * size).reshape(16, size)).astype(np.float32),
    }
    batch = [np.int32(x) for x in ([tokens], [[1, 2, 3]], [0, tokens], [1])]
    run, transform = backends.BACKENDS[backend], HADAMARD[backend]

    def attend(**options: Any) -> np.ndarray:
        updated, rotated = run("kv_cache_update", *rows, **rotary, **options)
        return np.asarray(run("paged_attention", rotated, updated, *batch, scale=0.2))

    wanted = attend()
    output = attend(hadamard=hadamard, **({"hadamard_signs": signs} if has_signs else {}))
    folded, undone = weight, output
    if "v" in hadamard:
        assert abs(output - wanted).max() > 0.1
        of_heads = weight.reshape(hidden, heads, size) * signs
        folded, undone = transform(of_heads).reshape(weight.shape), transform(output) * signs
    np.testing.assert_allclose(undone, wanted, atol=3e-6)
    of_folded = output.reshape(tokens, -1) @ folded.T
    np.testing.assert_allclose(of_folded, wanted.reshape(tokens, -1) @ weight.T, atol=1e-4)
