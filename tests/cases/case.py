"""A call of paged_attention with adversarial arrays: block tables are permutations of a pool that is
larger than needed, and everything that the op must not read holds NaN, infinity or junk."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from harness.arrays import CODES, DTYPES, packed, quantized
from harness.layouts import arrange

SHORT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
JUNK = np.array([2147480000, -7, 2147483647, -2147483648, 1000000], np.int32)
RANGES = (None, "blocks", "any")
_OF_CACHES = ("value_cache", "k_scale", "v_scale", "k_global", "v_global")
FEATURES = {
    "paged_attention": (
        *(*_OF_CACHES, "sinks", "alibi_slopes", "tree_mask"),
        *("bidirectional_ranges", "causal"),
    ),
    "varlen_attention": (
        *("sinks", "alibi_slopes", "bidirectional_ranges", "causal"),
        "prefix_seqs",
    ),
    "kv_cache_update": (
        *(*_OF_CACHES, "k_scale_cache", "v_scale_cache"),
        *("query", "positions", "cos_sin_cache", "q_norm", "k_norm", "hadamard_signs"),
    ),
}
"""The arrays that not every call of an op has, in the order of its operands."""
TREES = (None, "draft", "chain", "any")
SCALES = (None, "one", "per head", "per position")


INTEGERS = ("int8", "int4")
UNIT_SCALES = {name: np.ones((), np.float32) for name in ("k_scale", "v_scale")}
"""What a cache of integers that is not scaled has."""


def scale_of(dtype: str) -> float:
    """The size of the scales of a cache of numbers of a normal distribution."""
    return {"int4": 0.3, "e2m1": 0.5}.get(dtype, 0.05)


@dataclass(frozen=True)
class Groups:
    """Scales of groups of a row."""

    size: int  # numbers of a group
    dtype: str = "float32"  # of SCALE_DTYPES
    has_globals: bool = False
    of: tuple[str, ...] = ("k_scale", "v_scale")  # the others are of positions

    def arrays(
        self, num_kv_heads: int, is_unused: np.ndarray, dtypes: Sequence[str], sizes: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """k_scale, v_scale, k_global and v_global. See `scale_arrays`. `sizes`: the numbers of a row
        of K and of V."""
        rng = np.random.default_rng(2)
        arrays: dict[str, np.ndarray] = {}
        globals_: dict[str, Any] = {
            "k_scale": np.float32(0.7),
            "v_scale": np.array([1.3], np.float32),
        }
        for name, dtype, row_size in zip(globals_, dtypes, sizes, strict=True):
            factor = globals_[name] if self.has_globals and name in self.of else 1
            groups = (row_size // self.size,) if name in self.of else ()
            scales = rng.uniform(0.5, 1.5, (*is_unused.shape, num_kv_heads, *groups))
            scales[is_unused] = np.nan
            to = np.dtype(self.dtype if name in self.of else "float32")
            arrays[name] = (scales * scale_of(dtype) / factor).astype(np.float32).astype(to)
        if self.has_globals:
            arrays |= {
                name.replace("scale", "global"): np.array(globals_[name]) for name in self.of
            }
        return arrays


NVFP4: dict[str, Any] = {
    "cache_dtype": "e2m1",
    "groups": Groups(16, "float8_e4m3fn", has_globals=True),
}
MXFP4: dict[str, Any] = {"cache_dtype": "e2m1", "groups": Groups(32, "float8_e8m0fnu")}
INT8_NVFP4: dict[str, Any] = {
    "cache_dtype": "int8",
    "value_cache_dtype": "e2m1",
    "groups": Groups(16, "float8_e4m3fn", has_globals=True, of=("v_scale",)),
    "kv_layout": "nbhd",
}


def scale_arrays(
    kind: str, num_kv_heads: int, is_unused: np.ndarray, dtypes: tuple[str, str]
) -> dict[str, np.ndarray]:
    """k_scale and v_scale. `is_unused`, [num_blocks, block_size]: positions whose scales are
    NaN. `dtypes`: of K and of V."""
    position_shape = (*is_unused.shape, num_kv_heads)
    shape = {"one": (), "per head": (num_kv_heads,), "per position": position_shape}[kind]
    arrays = np.random.default_rng(1).uniform(0.5, 1.5, (2, *shape))
    arrays *= np.reshape([scale_of(dtype) for dtype in dtypes], (2, *[1] * len(shape)))
    if kind == "per position":
        arrays[:, is_unused] = np.nan
    return {
        name: np.array(array, np.float32)
        for name, array in zip(("k_scale", "v_scale"), arrays, strict=True)
    }


def quantized_cache(values: np.ndarray, dtypes: tuple[str, str], scales: str | None) -> np.ndarray:
    """A cache in the default layout whose K and V have these dtypes."""
    factors = [1 if scales is None else scale_of(dtype) for dtype in dtypes]
    rows = [quantized(values[:, :, i::2] / factors[i], dtypes[i]) for i in (0, 1)]
    return np.stack(rows, 3).reshape(values.shape)


def pack_4_bits(caches: tuple[np.ndarray, ...], dtypes: tuple[str, str]) -> tuple[np.ndarray, ...]:
    """The arrays of a cache, those of 4 bits packed."""
    return tuple(
        packed(x, dtype) if dtype in CODES else x.astype(dtype)
        for x, dtype in zip(caches, dtypes, strict=False)
    )


class Inputs(NamedTuple):
    """The array arguments of paged_attention, in their order."""

    query: Any
    kv_cache: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any


@dataclass(frozen=True)
class Case:
    """A call of paged_attention. `sequences` are pairs (q_len, context_len)."""

    id: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 4
    dtype: str = "float32"
    scale: float | None = None  # head_size ** -0.5
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: bool = False
    tree: str | None = None  # of TREES
    ranges: str | None = None  # of RANGES
    causal: bool = True
    causal_seqs: bool = False  # with causal=False: the sequences with an even number are causal
    window_right: int | None = None
    max_query_len: int | None = None
    return_lse: bool = False
    kv_layout: str | None = None
    cache_dtype: str | None = None  # of QUANTIZED
    value_cache_dtype: str | None = None  # of V, where K and V are int8 and int4
    scales: str | None = None  # of SCALES
    groups: Groups | None = None  # in their place
    value_head_size: int | None = None  # where V is a part of K
    own_value_head_size: int | None = None  # of V in an array of its own
    padding_seqs: int = 2
    padding_blocks: int = 2
    unused_blocks: int = 3  # of the pool
    padding_tokens: int = 3
    first_token: int = 0
    num_seqs_shape: tuple[int, ...] = ()
    query_factor: float = 1.0
    nan_in_last_position: bool = False
    nan_in_second_query: bool = False  # its K and V, which a tree mask may exclude
    shared_blocks: int = 0  # the first blocks of every sequence

    def attributes(self) -> dict[str, Any]:
        """The other arguments: numbers, and the arrays of the case's features."""
        attributes: dict[str, Any] = {
            "scale": self.head_size**-0.5 if self.scale is None else self.scale,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }
        rng = np.random.default_rng(self.num_heads)
        if self.sinks:
            attributes["sinks"] = rng.standard_normal(self.num_heads).astype(np.float32)
            attributes["sinks"][-1] = -np.inf
        if self.alibi_slopes:
            attributes["alibi_slopes"] = rng.uniform(0, 0.3, self.num_heads).astype(np.float32)
        if self.tree is not None:
            attributes["tree_mask"] = self._tree_mask()
        if self.ranges is not None:
            attributes["bidirectional_ranges"] = self._ranges()
        if not self.causal:
            attributes |= {"causal": False, "window_right": self.window_right}
        if self.causal_seqs:
            attributes["causal"] = rng.choice(JUNK, len(self.sequences) + self.padding_seqs)
            for s in range(len(self.sequences)):
                attributes["causal"][s] = self.is_causal(s)
        if self.max_query_len is not None:
            attributes["max_query_len"] = self.max_query_len
        if self.return_lse:
            attributes["return_lse"] = True
        if self.scales is not None or self.groups is not None:
            kv_cache = self._before_quantization().kv_cache.astype(np.float32)
            is_unused = ~np.isfinite(kv_cache).all((2, 3))
            of_positions = self.num_kv_heads, is_unused, self._dtypes()
            if self.groups is not None:
                sizes = self.head_size, self.own_value_head_size or self.head_size
                attributes |= self.groups.arrays(*of_positions, sizes)
            elif self.scales is not None:
                attributes |= scale_arrays(self.scales, *of_positions)
        elif {*self._dtypes()} & {*INTEGERS}:
            attributes |= UNIT_SCALES
        if self.value_head_size is not None:
            attributes["value_head_size"] = self.value_head_size
            attributes.pop("v_scale", None)
            attributes.pop("v_global", None)
        if "e2m1" in self._dtypes():
            attributes["codes"] = "e2m1"
        if self.kv_layout is not None:
            attributes["kv_layout"] = self.kv_layout
            _, *value_cache = self._arranged(self._in_default_layout().kv_cache)
            attributes |= dict(zip(["value_cache"], value_cache, strict=False))
        return attributes

    def _dtypes(self) -> tuple[str, str]:
        """The dtypes of K and V in the cache."""
        dtype = self.cache_dtype or self.dtype
        return dtype, self.value_cache_dtype or dtype

    def _arranged(self, kv_cache: np.ndarray) -> tuple[np.ndarray, ...]:
        is_latent = self.value_head_size is not None
        caches = arrange(
            kv_cache,
            self.kv_layout,
            is_latent=is_latent,
            value_head_size=self.own_value_head_size,
        )
        return pack_4_bits(caches, self._dtypes())

    def _tree_mask(self) -> np.ndarray:
        """Draft trees for every second sequence, all tokens of which attend to their ancestors; or
        any bits. Tokens of no sequence have any bits."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        q_lens = [q_len for q_len, _ in self.sequences]
        num_tokens = self.first_token + sum(q_lens) + self.padding_tokens
        bits = rng.integers(0, 2, (num_tokens, 64), np.uint8)
        start = self.first_token
        for s, q_len in enumerate(q_lens):
            sequence_bits = bits[start : start + q_len]
            start += q_len
            has_tree = q_len <= 64 and (self.tree != "draft" or s % 2 == 0)
            sequence_bits[:, q_len if has_tree else 0 :] = 0
            if self.tree == "chain" and has_tree:
                sequence_bits[:, :q_len] = np.tri(q_len)
            elif self.tree == "draft" and has_tree:
                for i in range(q_len):
                    sequence_bits[i, :i] = sequence_bits[rng.integers(i)][:i] if i else 0
                    sequence_bits[i, i:] = np.arange(64 - i) == 0
        return np.packbits(bits, axis=1, bitorder="little").view("<i4")

    def _ranges(self) -> np.ndarray:
        """Each second 13 tokens of a sequence attend to each other; or any ranges. Some end after the
        sequence. Tokens of no sequence have any numbers."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        num_tokens = self.first_token + sum(q for q, _ in self.sequences) + self.padding_tokens
        ranges = rng.choice(JUNK, (num_tokens, 2))
        token = self.first_token
        for q_len, context_len in self.sequences:
            for position in range(context_len - q_len, context_len):
                begin, end = rng.integers(-2, context_len + 3, 2)
                block = position // 13
                if self.ranges == "any":
                    some = ((begin, end), (begin, begin + 5), (0, 0), (end, 2**31 - 1))
                    ranges[token] = some[rng.choice(4, p=[0.4, 0.2, 0.3, 0.1])]
                else:
                    ranges[token] = 13 * block, 13 * (block + block % 2)
                token += 1
        return ranges

    def multiplies_rows(self) -> bool:
        """Whether rows of K or V are multiplied by scales before the products."""
        return self.groups is not None or "e2m1" in self._dtypes()

    def is_causal(self, sequence: int) -> bool:
        return self.causal or (self.causal_seqs and sequence % 2 == 0)

    def attended_positions(self, sequence: int) -> list[int]:
        """The positions that some query of a sequence attends to."""
        q_len, context_len = self.sequences[sequence]
        if q_len == 0:
            return []
        window = self.sliding_window or context_len
        positions = {*range(max(0, context_len - q_len - window + 1), context_len)}
        if self.ranges is not None:
            start = self.first_token + sum(q for q, _ in self.sequences[:sequence])
            for begin, end in self._ranges()[start : start + q_len]:
                positions |= {*range(max(0, begin), min(end, context_len))}
        return sorted(positions)

    def inputs(self) -> Inputs:
        inputs = self._in_default_layout()
        return inputs._replace(kv_cache=self._arranged(inputs.kv_cache)[0])

    def _in_default_layout(self) -> Inputs:
        inputs = self._before_quantization()
        if self.cache_dtype is None:
            return inputs
        values = inputs.kv_cache.astype(np.float32)
        scales = self.scales if self.groups is None else "of groups"
        return inputs._replace(kv_cache=quantized_cache(values, self._dtypes(), scales))

    def _before_quantization(self) -> Inputs:
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        dtype = DTYPES[self.dtype]
        q_lens = [q_len for q_len, _ in self.sequences]
        lengths = [-(-context // self.block_size) for _, context in self.sequences]
        num_seqs, max_seqs = len(self.sequences), len(self.sequences) + self.padding_seqs

        pool = rng.permutation(sum(lengths) + self.unused_blocks).astype(np.int32)
        width = max(lengths, default=0) + self.padding_blocks
        block_tables = rng.choice(JUNK, (max_seqs, width))
        kv_cache = rng.choice(
            [np.nan, np.inf, -np.inf],
            (len(pool), self.block_size, 2 * self.num_kv_heads, self.head_size),
        ).astype(dtype)
        taken = 0
        for s, (q_len, context_len) in enumerate(self.sequences):
            blocks = pool[taken : taken + lengths[s]].copy()
            taken += lengths[s]
            blocks[: self.shared_blocks] = pool[: min(lengths[s], self.shared_blocks)]
            positions = self.attended_positions(s)
            for j in range(min(positions, default=context_len), context_len):
                block_tables[s, j // self.block_size] = blocks[j // self.block_size]
            for j in positions:
                block, offset = j // self.block_size, j % self.block_size
                slot = kv_cache[blocks[block], offset]
                if (
                    np.isnan(slot.astype(np.float32)).any()
                    or np.isinf(slot.astype(np.float32)).any()
                ):
                    slot[...] = rng.standard_normal(slot.shape).astype(dtype)
            nan_positions = [context_len - 1] if self.nan_in_last_position else []
            if self.nan_in_second_query and q_len > 1:
                nan_positions.append(context_len - q_len + 1)
            for position in nan_positions:
                kv_cache[blocks[position // self.block_size], position % self.block_size] = np.nan

        num_tokens = self.first_token + sum(q_lens) + self.padding_tokens
        query = np.full((num_tokens, self.num_heads, self.head_size), np.nan, dtype)
        end = self.first_token + sum(q_lens)
        shape = query[self.first_token : end].shape
        query[self.first_token : end] = (self.query_factor * rng.standard_normal(shape)).astype(
            dtype
        )

        context_lens = rng.choice(JUNK, max_seqs)
        context_lens[:num_seqs] = [context for _, context in self.sequences]
        query_start_loc = rng.choice(JUNK, max_seqs + 1)
        if num_seqs > 0:  # with no sequences not even entry 0 is read
            query_start_loc[: num_seqs + 1] = np.cumsum([self.first_token, *q_lens])
        return Inputs(
            query,
            kv_cache,
            context_lens,
            block_tables,
            query_start_loc,
            np.full(self.num_seqs_shape, num_seqs, np.int32),
        )


def without_range(case: Case) -> np.ndarray:
    """Whether each token of the batch has an empty range."""
    begins, ends = case.attributes()["bidirectional_ranges"].T
    lengths = np.zeros(len(begins), np.int64)
    start = case.first_token
    for q_len, context_len in case.sequences:
        lengths[start : start + q_len] = context_len
        start += q_len
    return np.maximum(begins, 0) >= np.minimum(ends, lengths)


DECODE = ((1, 5), (1, 17), (1, 1), (1, 12))
PREFILL = ((9, 9), (4, 4), (1, 1))
CHUNKED = ((5, 14), (3, 16), (8, 11))
MIXED = ((1, 19), (6, 6), (0, 7), (4, 21), (1, 1))


def each_dtype(family: str, **fields: Any) -> Iterator[Case]:
    """A case for each dtype of queries."""
    for dtype, short in SHORT_NAMES.items():
        yield Case(id=f"{family}-{short}", dtype=dtype, **fields)


FEATURE_BATCHES = {
    "decode": ((1, 150), (1, 3)),
    "mixed": ((7, 80), (9, 9), (0, 5), (1, 66)),
    "long": ((1, 700), (3, 1100), (30, 530)),
}


def feature_cases(features: dict[str, dict[str, Any]]) -> Iterator[Case]:
    """Each feature, given as the fields of its cases, in FEATURE_BATCHES."""
    for (feature, fields), (name, sequences) in product(features.items(), FEATURE_BATCHES.items()):
        yield from each_dtype(
            f"{feature}-{name}",
            sequences=sequences,
            num_heads=6,
            block_size=8,
            head_size=24,
            return_lse=name != "decode" or feature == "lse",
            **fields,
        )
