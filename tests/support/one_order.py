"""The one order in which kernels of a GPU add up a row of attention, as a definition in NumPy: each row
alone decides its bits, whatever is computed beside it. Kernels in that order have these bits on the
emulated GPU, and on a GPU but for the approximation of 2^x. The portable kernels of tensor
cores add up so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from harness import layouts
from harness.reference import attended_positions
from tests.cases.case import Case, Inputs
from tools.emulated_gpu.tensor_cores import add_products

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
    # [positions]: what q . k and weights are multiplied by where a cache of 8 bits has scales.
    key_scales: np.ndarray | None = None
    value_scales: np.ndarray | None = None

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
        logits = (logits * self._scales(self.key_scales, own)).astype(F)
        if self.to_logits is not None:
            logits = self.to_logits(logits, positions)
        attends = (self.begin[:, None] <= positions) & (positions < self.end[:, None])
        if self.holes is not None:
            attends &= ~np.pad(self.holes[:, own], missing[::-1])
        return np.where(attends, logits, F(-np.inf)), values

    def scaled(self, weights: np.ndarray, position: int) -> np.ndarray:
        """The weights of a block as its values take them, before they are rounded."""
        scales = self._scales(self.value_scales, slice(position, position + BLOCK))
        return (weights * scales).astype(F)

    @staticmethod
    def _scales(scales: np.ndarray | None, own: slice) -> np.ndarray:
        if scales is None:
            return np.ones(BLOCK, F)
        return np.pad(scales[own], (0, BLOCK - len(scales[own])), constant_values=1)


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
        rounded = rows.scaled(weights, position).astype(own.dtype)
        values = add_products(values, rounded, own, rows.capability)
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
        return output, (top + np.log2(divisor.astype(np.float64)).astype(F)).astype(F)


def _logits_of(
    case: Case, attributes: dict[str, Any], heads: np.ndarray, positions: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """What Rows calls to_logits, for the rows of these heads and positions."""
    scale, cap, slopes = F(attributes["scale"]), case.soft_cap, attributes.get("alibi_slopes")
    if scale > 0 and cap is None and slopes is None:
        return None

    def capped(x: np.ndarray) -> np.ndarray:
        """tanh(x) = 1 - 2 / (1 + e^2x), which suffices for caps of up to 64."""
        assert cap is not None and cap <= 64
        largest = F(F(cap) * LOG2E)
        powers = exp2((x * F(F(F(2) * LOG2E) * scale / F(cap))).astype(F))
        return fma(F(-2) * largest, flush(F(1) / (F(1) + powers)), largest)

    def to_logits(products: np.ndarray, at: np.ndarray) -> np.ndarray:
        logits = (products * F(scale * LOG2E)).astype(F) if cap is None else capped(products)
        if slopes is None:
            return logits
        distances = np.abs(positions[:, None] - at).astype(F)
        return fma(distances, -(slopes[heads] * LOG2E).astype(F)[:, None], logits)

    return to_logits


# The order in which products take 16 columns of a cache of 8 bits: a lane has four adjacent ones.
COLUMNS_OF_8_BITS = np.array([4 * lane + n for pair in (0, 2) for lane in range(4)
                              for n in (pair, pair + 1)])  # fmt: skip


def _scales_of(scales: Any, slots: tuple[Any, Any], kv_head: int) -> np.ndarray | F:
    """A cache's scales of positions, or the one of all."""
    if scales is None:
        return F(1)
    return scales[slots][:, kv_head] if scales.ndim == 3 else np.broadcast_to(
        scales, max(scales.shape, (kv_head + 1,)))[kv_head]  # fmt: skip


def _products(
    cache: np.ndarray, slots: tuple[Any, Any], head: int, scales: np.ndarray | None
) -> np.ndarray:
    """Rows of K or V, of the head `head` of both, times the scales of their groups, if they have any."""
    rows = cache[slots][:, head].astype(F)
    if scales is None or scales.ndim < 4:
        return rows
    of_rows = scales[slots][:, head // 2].astype(F)
    return rows * np.repeat(of_rows, rows.shape[1] // of_rows.shape[1], 1)


def rows_of_case(
    case: Case, inputs: Inputs, capability: int, most: int = 2**31
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], Rows]]:
    """The rows of a case, by sequence and kv head, and of each row its token in the batch and its head.
    `most`: of a sequence and kv head, the first and the last among them."""
    attributes = case.attributes()
    caches = (inputs.kv_cache, *(attributes[name] for name in attributes if name == "value_cache"))
    codes = attributes.get("codes")
    cache = layouts.default(
        caches, case.kv_layout, is_latent=case.value_head_size is not None, codes=codes
    )
    columns = case.value_head_size or case.own_value_head_size or case.head_size
    options = {name: x for name, x in attributes.items() if name != "scale"}
    sinks, group = attributes.get("sinks"), case.num_heads // case.num_kv_heads
    for s, (q_len, context_len) in enumerate(case.sequences):
        num_rows = q_len * group
        chosen = np.linspace(0, num_rows - 1, min(num_rows, most)).astype(np.int64)
        attended = np.zeros((len(chosen), context_len), bool)
        positions = np.zeros(len(chosen), np.int64)
        for n, row in enumerate(chosen):
            positions[n], own = attended_positions(
                int(row) // group, s, inputs.context_lens, inputs.query_start_loc, **options
            )
            attended[n, own] = True
        begin, end = attended.argmax(1), context_len - attended[:, ::-1].argmax(1)
        tokens = inputs.query_start_loc[s] + chosen // group
        is_read = np.flatnonzero(attended.any(0))
        slots = inputs.block_tables[s, is_read // case.block_size], is_read % case.block_size
        for kv_head in range(case.num_kv_heads):
            heads = kv_head * group + chosen % group
            query = inputs.query[tokens, heads]
            keys, values = np.zeros((2, context_len, case.head_size), query.dtype)
            keys[is_read] = _products(cache, slots, 2 * kv_head, attributes.get("k_scale"))
            values[is_read] = _products(cache, slots, 2 * kv_head + 1, attributes.get("v_scale"))
            rows = Rows(
                query, keys, values[:, :columns], begin, end,
                attributes["scale"], capability, ~attended,
                None if sinks is None else (sinks[heads] * LOG2E).astype(F),
                _logits_of(case, attributes, heads, positions),
            )  # fmt: skip
            if case.multiplies_rows():
                scales = np.ones((2, context_len), F)
                for of_positions, name in zip(scales, "kv", strict=True):
                    of_rows = attributes.get(f"{name}_scale")
                    if of_rows is not None and of_rows.ndim == 4:
                        of_rows = attributes.get(f"{name}_global")
                    of_positions[is_read] = _scales_of(of_rows, slots, kv_head)
                rows = replace(
                    rows, key_scales=scales[0], value_scales=scales[1],
                    values=rows.values.astype(ml_dtypes.bfloat16),
                )  # fmt: skip
            elif case.cache_dtype is not None:
                order = (np.arange(0, case.head_size, 16)[:, None] + COLUMNS_OF_8_BITS).ravel()
                scales = np.ones((2, context_len), F)
                for of_positions, name in zip(scales, ("k_scale", "v_scale"), strict=True):
                    of_positions[is_read] = _scales_of(attributes.get(name), slots, kv_head)
                rows = replace(
                    rows, query=query[:, order], keys=keys[:, order], key_scales=scales[0],
                    values=rows.values.astype(ml_dtypes.bfloat16), value_scales=scales[1],
                )  # fmt: skip
            yield (tokens, heads), rows


def expected_of(rows: Rows, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The output of rows, in the type of the query, and their log-sum-exp."""
    output, lse = attend(rows)
    return output.astype(dtype), (lse * F(np.log(2))).astype(F)
