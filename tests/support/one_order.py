"""The one order in which kernels of a GPU add up a row of attention, as a definition in NumPy: each row
alone decides its bits, whatever is computed beside it. Kernels in that order have these bits on the
emulated GPU, and on a GPU but for the approximation of 2^x. No kernel adds up so yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.support.tensor_cores import add_products

F = np.float32
LOG2E = F(1.4426950408889634)
NONE = F(np.finfo(F).min)  # the reference of a row that has attended to nothing
BLOCK = 32  # positions between two looks at the reference
GROUP = 8192  # positions whose leaves are added from the left
ROOM = F(32)  # a part may exceed the total's reference by 2^ROOM before that follows
SLACK = {"bfloat16": F(16), "float16": F(12)}  # the same for weights and the leaf's reference


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(F).tiny, F(0), x).astype(F)


def exp2(x: np.ndarray) -> np.ndarray:
    """ex2.approx.ftz.f32 of the emulated GPU."""
    return flush(np.exp2(np.maximum(flush(x), F(-200)).astype(np.float64)).astype(F))


def fma(a: np.ndarray, b: np.ndarray | F, c: np.ndarray | F) -> np.ndarray:
    """a b is exact in float64, whose sum with c is rounded once more: wrong in one of 2^28 sums."""
    return (np.asarray(a, np.float64) * b + c).astype(F)


@dataclass(frozen=True)
class Rows:
    """Rows that attend to one kv head of a sequence. 16-bit arrays have the cache's type."""

    query: np.ndarray  # [rows, head size], 16 bits
    keys: np.ndarray  # [positions, head size], 16 bits
    values: np.ndarray  # [positions, columns], 16 bits
    begin: np.ndarray  # [rows]: the first position that a row attends to
    end: np.ndarray  # [rows]: behind the last one
    scale: float
    capability: int = 90
    holes: np.ndarray | None = None  # [rows, positions]: what a row leaves out of them
    sinks: np.ndarray | None = None  # [rows], in units of 1 / log2(e)
    # Where the scale, which is `scale` log2(e), is not multiplied late: turns q . k and the positions
    # of a block into logits in units of 1 / log2(e).
    to_logits: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None

    def of(self, index: slice | np.ndarray) -> Rows:
        names = ("query", "begin", "end", "holes", "sinks")
        arrays = {name: getattr(self, name) for name in names}
        return replace(self, **{n: x[index] for n, x in arrays.items() if x is not None})

    def block(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits of a block, -inf where a row does not attend, and its values; zeros behind the end."""
        own = slice(position, position + BLOCK)
        missing = ((0, BLOCK - len(self.keys[own])), (0, 0))
        keys, values = (np.pad(x[own], missing) for x in (self.keys, self.values))
        positions = np.arange(position, position + BLOCK)
        logits = np.zeros((len(self.query), BLOCK), F)
        logits = add_products(logits, self.query, keys.T, self.capability)
        if self.to_logits is not None:
            logits = self.to_logits(logits, positions)
        attends = (self.begin[:, None] <= positions) & (positions < self.end[:, None])
        if self.holes is not None:
            attends &= ~np.pad(self.holes[:, own], missing[::-1])
        return np.where(attends, logits, F(-np.inf)), values


@dataclass(frozen=True)
class Part:
    """What rows have found: weights are 2^(logit - reference)."""

    reference: np.ndarray  # [rows], or NONE
    sum: np.ndarray  # [rows]
    values: np.ndarray  # [rows, columns]


def leaf_at(position: int) -> range:
    """The leaf with a position, counted from the sequence's first one."""
    size = 256 if position < 1024 else 512
    return range(position // size * size, position // size * size + size)


def leaves(begin: int, end: int) -> Iterator[range]:
    while begin < end:
        leaf = leaf_at(begin)
        yield leaf
        begin = leaf.stop


def add_leaf(rows: Rows, leaf: range) -> Part:
    factor = F(F(rows.scale) * LOG2E) if rows.to_logits is None else F(1)
    slack = SLACK[rows.values.dtype.name]
    reference = np.full(len(rows.query), NONE, F)
    lanes = np.zeros((len(reference), 4), F)  # a lane has positions 2i and 2i + 1 of each 8
    values = np.zeros((len(reference), rows.values.shape[1]), F)
    for position in range(leaf.start, min(leaf.stop, int(rows.end.max())), BLOCK):
        logits, own = rows.block(position)
        top = (logits.max(axis=1) * factor).astype(F)
        is_first = reference == NONE
        exceeds = top > (reference + slack).astype(F)
        steps = np.where(exceeds & ~is_first, np.ceil(top - reference), F(0)).astype(F)
        reference = np.where(exceeds & is_first, top, reference + steps).astype(F)
        shrinks = exp2(-steps)[:, None]
        lanes, values = flush(lanes * shrinks), (values * shrinks).astype(F)
        shift = np.where(reference == NONE, F(0), reference)[:, None]
        weights = exp2(fma(logits, factor, -shift))
        pairs = (weights[:, 0::2] + weights[:, 1::2]).reshape(-1, 4, 4)  # [row, eight, lane]
        lanes = lanes + ((pairs[:, 0] + pairs[:, 1]) + (pairs[:, 2] + pairs[:, 3]))
        values = add_products(values, weights.astype(own.dtype), own, rows.capability)
    total = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
    return Part(reference, total, values)


def fold(total: Part | None, part: Part) -> Part:
    """Adds a part to those on its left, as an addition in memory does: all is flushed."""
    if total is None:
        return part
    is_empty, is_first = part.reference == NONE, total.reference == NONE
    follows = ~is_empty & (is_first | (part.reference > (total.reference + ROOM).astype(F)))
    reference = np.where(follows, part.reference, total.reference)
    before = np.where(follows, exp2(np.where(is_first, F(-200), total.reference - reference)), F(1))
    factor = np.where(is_empty, F(0), exp2(np.where(is_empty, F(0), part.reference - reference)))

    def add(x: np.ndarray, y: np.ndarray, b: np.ndarray, f: np.ndarray) -> np.ndarray:
        return flush(flush(x * b) + flush(y * f))

    return Part(
        reference,
        add(total.sum, part.sum, before, factor),
        add(total.values, part.values, before[:, None], factor[:, None]),
    )


def total_of(rows: Rows, add: Callable[[Rows, range], Part] = add_leaf) -> Part:
    """Leaves are folded within groups, and these from the left."""
    total: Part | None = None
    group: Part | None = None
    for leaf in leaves(leaf_at(int(rows.begin.min())).start, int(rows.end.max())):
        if group is not None and leaf.start % GROUP == 0:
            total, group = fold(total, group), None
        group = fold(group, add(rows, leaf))
    assert group is not None
    return fold(total, group)


def attend(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The output before it is rounded, and the log-sum-exp in units of 1 / log2(e)."""
    total = total_of(rows)
    has_keys = total.reference != NONE
    largest = np.where(has_keys, total.reference, F(-np.inf))
    sinks = np.full_like(largest, -np.inf) if rows.sinks is None else rows.sinks
    top = np.maximum(largest, sinks)
    shift = np.where(np.isinf(top), F(0), top)
    weight = np.where(has_keys, exp2(np.where(has_keys, largest - shift, F(0))), F(0))
    divisor = fma(weight, total.sum, exp2(sinks - shift))
    factor = (weight / np.where(has_keys, divisor, F(1))).astype(F)
    output = fma(total.values, factor[:, None], F(0))
    with np.errstate(divide="ignore"):
        return output, (top + np.log2(divisor)).astype(F)
