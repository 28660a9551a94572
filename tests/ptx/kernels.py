"""Kernels in Triton's language, whose compiler's output runs rightly on GPUs. The PTX machine must,
too."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(x, y, columns, SIZE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, SIZE)
    values = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * columns + column, powers / tl.sum(powers, axis=0), mask=column < columns)


@triton.jit
def matmul(
    a,
    b,
    c,
    k_size,
    a_row,
    a_column,
    b_row,
    b_column,
    c_row,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    sums = tl.zeros((M, N), tl.float32)
    for first in range(0, k_size, K):
        x = tl.load(a + row[:, None] * a_row + (first + k)[None, :] * a_column)
        y = tl.load(b + (first + k)[:, None] * b_row + column[None, :] * b_column)
        sums = tl.dot(x, y, sums)
    tl.store(c + row[:, None] * c_row + column[None, :], sums)


@triton.jit
def attention(
    query,
    key,
    value,
    output,
    scale,
    length,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(query + row[:, None] * D + d[None, :])
    largest = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, D), tl.float32)
    end = (tl.program_id(0) + 1) * M if CAUSAL else length
    for first in range(0, end, N):
        position = first + tl.arange(0, N)
        k = tl.load(key + position[None, :] * D + d[:, None])
        scores = tl.dot(q, k) * scale
        if CAUSAL:
            scores = tl.where(position[None, :] <= row[:, None], scores, -1e30)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(value + position[:, None] * D + d[None, :])
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
        largest = new_largest
    tl.store(output + row[:, None] * D + d[None, :], sums / total[:, None])


def compiled(kernel, target: int, signature: dict[str, str], constants: dict[str, int], **options):
    """The compiled kernel. Pointers and integers are promised to be divisible by 16."""
    types = signature | dict.fromkeys(constants, "constexpr")
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    divisible = {
        (places[name],): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind != "fp32"
    }
    source = ASTSource(
        kernel, types, {(places[name],): x for name, x in constants.items()}, divisible
    )
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
