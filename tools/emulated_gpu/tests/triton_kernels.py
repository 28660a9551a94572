"""Kernels in Triton's languages, whose compiler's output runs rightly on GPUs. The emulated GPU must,
too."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


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


@gluon.jit
def produce(
    a,
    b,
    a_row,
    b_row,
    num_tiles,
    left,
    right,
    filled,
    freed,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, M, gl.SliceLayout(1, layout))
    column = gl.arange(0, N, gl.SliceLayout(0, layout))
    k = gl.arange(0, K, gl.SliceLayout(0, layout))
    depth = gl.arange(0, K, gl.SliceLayout(1, layout))
    for tile in range(num_tiles):
        stage = tile % STAGES
        mbarrier.wait(freed.index(stage), tile // STAGES & 1 ^ 1)
        x = a + row[:, None] * a_row + (tile * K + k)[None, :]
        y = b + (tile * K + depth)[:, None] * b_row + column[None, :]
        async_copy.async_copy_global_to_shared(left.index(stage), x)
        async_copy.async_copy_global_to_shared(right.index(stage), y)
        async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)


@gluon.jit
def consume(
    c,
    c_row,
    num_tiles,
    left,
    right,
    filled,
    freed,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BY_THREADS: gl.constexpr,
):
    """Multiplies tiles that threads have copied, or else tensor copies, which need no fence."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums = gl.zeros((M, N), gl.float32, layout)
    for tile in range(num_tiles):
        stage = tile % STAGES
        mbarrier.wait(filled.index(stage), tile // STAGES & 1)
        if BY_THREADS:
            fence_async_shared()
        sums = warpgroup_mma(left.index(stage), right.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(freed.index(stage))
    row = gl.arange(0, M, gl.SliceLayout(1, layout))
    column = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(c + row[:, None] * c_row + column[None, :], sums)


@gluon.jit
def pipelined_matmul(
    a,
    b,
    c,
    a_row,
    b_row,
    c_row,
    num_tiles,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Some warps copy tiles into stages, the others multiply them: barriers in shared memory for
    asynchronous copies, barriers for a part of the block, registers that change hands."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, M, K], layout)
    right = gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, K, N], layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=32 * WARPS)
        mbarrier.init(freed.index(stage), count=1)
    a += gl.program_id(0) * M * a_row
    b += gl.program_id(1) * N
    c += gl.program_id(0) * M * c_row + gl.program_id(1) * N
    gl.warp_specialize(
        (c, c_row, num_tiles, left, right, filled, freed, M, N, STAGES, True),
        consume,
        (a, b, a_row, b_row, num_tiles, left, right, filled, freed, M, N, K, STAGES, WARPS),
        [produce],
        [WARPS],
        [24],
    )


@triton.jit
def copy_box(tensor, output, a, b, c, d, e, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    """The box whose first element is at these coordinates, of which a tensor has the last ones."""
    if len(SHAPE) == 1:
        box = tensor.load([e])
    elif len(SHAPE) == 2:
        box = tensor.load([d, e])
    elif len(SHAPE) == 3:
        box = tensor.load([c, d, e])
    elif len(SHAPE) == 4:
        box = tensor.load([b, c, d, e])
    else:
        box = tensor.load([a, b, c, d, e])
    tl.store(output + tl.reshape(tl.arange(0, SIZE), SHAPE), box)


@triton.jit
def matmul_of_boxes(a, b, c, k_size, c_row, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0) * M
    column = tl.program_id(1) * N
    sums = tl.zeros((M, N), tl.float32)
    for first in range(0, k_size, K):
        sums = tl.dot(a.load([row, first]), b.load([first, column]), sums)
    to = (row + tl.arange(0, M))[:, None] * c_row + (column + tl.arange(0, N))[None, :]
    tl.store(c + to, sums)


@triton.jit
def attention_of_boxes(
    query, key, value, output, scale, length, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    row = tl.program_id(0) * M
    q = query.load([row, 0])
    largest = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, D), tl.float32)
    for first in range(0, length, N):
        scores = tl.dot(q, key.load([first, 0]).T) * scale
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = value.load([first, 0])
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
        largest = new_largest
    to = (row + tl.arange(0, M))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(output + to, sums / total[:, None])


@gluon.jit
def produce_boxes(
    a, b, num_tiles, left, right, filled, freed, K: gl.constexpr, STAGES: gl.constexpr
):
    row = gl.program_id(0) * a.block_type.shape[0]
    column = gl.program_id(1) * b.block_type.shape[1]
    for tile in range(num_tiles):
        stage = tile % STAGES
        mbarrier.wait(freed.index(stage), tile // STAGES & 1 ^ 1)
        mbarrier.expect(filled.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        tma.async_copy_global_to_shared(a, [row, tile * K], filled.index(stage), left.index(stage))
        tma.async_copy_global_to_shared(
            b, [tile * K, column], filled.index(stage), right.index(stage)
        )


@gluon.jit
def pipelined_matmul_of_boxes(
    a,
    b,
    c,
    c_row,
    num_tiles,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As pipelined_matmul, but one warp copies boxes of tensors, whose bytes the barriers count."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES, M, K], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, K, N], b.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=1)
    c += gl.program_id(0) * M * c_row + gl.program_id(1) * N
    gl.warp_specialize(
        (c, c_row, num_tiles, left, right, filled, freed, M, N, STAGES, False),
        consume,
        (a, b, num_tiles, left, right, filled, freed, K, STAGES),
        [produce_boxes],
        [1],
        [24],
    )


@gluon.jit
def copy_box_over_ones(tensor, output, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Writes ones to shared memory, reads them in another order, and copies a box over them. Writes
    both to the output."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    other: gl.constexpr = gl.BlockedLayout([8, 2], [2, 16], [2, 2], [1, 0])
    tile = gl.allocate_shared_memory(tensor.dtype, [ROWS, COLUMNS], tensor.layout)
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(filled, count=1)
    tile.store(gl.full((ROWS, COLUMNS), 1, tensor.dtype, layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, other))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, other))
    to = output + row[:, None] * COLUMNS + column[None, :]
    gl.store(to, tile.load(other))
    fence_async_shared()
    mbarrier.expect(filled, tensor.block_type.nbytes)
    tma.async_copy_global_to_shared(tensor, [0, 0], filled, tile)
    mbarrier.wait(filled, 0)
    gl.store(to + ROWS * COLUMNS, tile.load(other))


def tensor(dtype: str, *shape: int) -> str:
    """The type of a tensor of which boxes of a shape are copied."""
    return f"tensordesc<{dtype}{list(shape)}>"


def swizzled_tensor(dtype: str, *shape: int) -> str:
    """The same, of elements of 16 bits, for kernels that say how boxes lie in shared memory."""
    return tensor(dtype, *shape)[:-1] + f",{gl.NVMMASharedLayout(128, 16, 2)!r}>"


# Integers that kernels are given as they are.
ANY_INTEGERS = ("num_tiles", "a", "b", "c", "d", "e")


def compiled(kernel, target: int, signature: dict[str, str], constants: dict[str, Any], **options):
    """The compiled kernel. Pointers and integers are promised to be divisible by 16."""
    types = signature | dict.fromkeys(constants, "constexpr")
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    divisible = {
        (places[name],): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind[0] == "*" or (kind == "i32" and name not in ANY_INTEGERS)
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, types, {(places[name],): x for name, x in constants.items()}, divisible
    )
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
