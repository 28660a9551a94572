"""The parity cases, by family. All of them are adversarial: block tables are permutations of a
pool that is larger than needed, and everything that the ops must not read holds NaN, infinity or
junk."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from harness.arrays import CACHE_DTYPES, DTYPES, quantized
from harness.layouts import LATENT_LAYOUTS, LAYOUTS, arrange

SCALE = 0.05  # the size of the scales of 8-bit caches
SHORT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
JUNK = np.array([2147480000, -7, 2147483647, -2147483648, 1000000], np.int32)
TREES = (None, "draft", "chain", "any")
SCALES = (None, "one", "per head", "per position")


def scales(kind: str, num_kv_heads: int, is_unused: np.ndarray) -> dict[str, np.ndarray]:
    """k_scale and v_scale. `is_unused`, [num_blocks, block_size]: positions whose scales are
    NaN."""
    of_positions = (*is_unused.shape, num_kv_heads)
    shape = {"one": (), "per head": (num_kv_heads,), "per position": of_positions}[kind]
    arrays = np.random.default_rng(1).uniform(0.5, 1.5, (2, *shape)) * SCALE
    if kind == "per position":
        arrays[:, is_unused] = np.nan
    return {
        name: np.array(array, np.float32)
        for name, array in zip(("k_scale", "v_scale"), arrays, strict=True)
    }


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
    causal: bool = True
    window_right: int | None = None
    max_query_len: int | None = None
    return_lse: bool = False
    kv_layout: str | None = None
    cache_dtype: str | None = None  # of 8 bits
    scales: str | None = None  # of SCALES
    value_head_size: int | None = None  # where V is a part of K
    padding_seqs: int = 2
    padding_blocks: int = 2
    unused_blocks: int = 3  # of the pool
    padding_tokens: int = 3
    first_token: int = 0
    num_seqs_shape: tuple[int, ...] = ()
    query_factor: float = 1.0
    nan_in_last_position: bool = False
    nan_in_second_query: bool = False  # its K and V, which a tree mask may exclude
    shared_first_block: bool = False

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
        if not self.causal:
            attributes |= {"causal": False, "window_right": self.window_right}
        if self.max_query_len is not None:
            attributes["max_query_len"] = self.max_query_len
        if self.return_lse:
            attributes["return_lse"] = True
        if self.scales is not None:
            kv_cache = self._of_one_dtype().kv_cache.astype(np.float32)
            is_unused = ~np.isfinite(kv_cache).all((2, 3))
            attributes |= scales(self.scales, self.num_kv_heads, is_unused)
        if self.value_head_size is not None:
            attributes["value_head_size"] = self.value_head_size
            attributes.pop("v_scale", None)
        if self.kv_layout is not None:
            attributes["kv_layout"] = self.kv_layout
            _, *value_cache = self._arranged(self._in_default_layout().kv_cache)
            attributes |= dict(zip(["value_cache"], value_cache, strict=False))
        return attributes

    def _arranged(self, kv_cache: np.ndarray) -> tuple[np.ndarray, ...]:
        is_latent = self.value_head_size is not None
        return arrange(kv_cache, self.kv_layout, is_latent=is_latent)

    def _tree_mask(self) -> np.ndarray:
        """Draft trees for every second sequence, all tokens of which attend to their ancestors; or
        any bits. Tokens of no sequence have any bits."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        q_lens = [q_len for q_len, _ in self.sequences]
        num_tokens = self.first_token + sum(q_lens) + self.padding_tokens
        bits = rng.integers(0, 2, (num_tokens, 64), np.uint8)
        start = self.first_token
        for s, q_len in enumerate(q_lens):
            of_sequence = bits[start : start + q_len]
            start += q_len
            has_tree = q_len <= 64 and (self.tree != "draft" or s % 2 == 0)
            of_sequence[:, q_len if has_tree else 0 :] = 0
            if self.tree == "chain" and has_tree:
                of_sequence[:, :q_len] = np.tri(q_len)
            elif self.tree == "draft" and has_tree:
                for i in range(q_len):
                    of_sequence[i, :i] = of_sequence[rng.integers(i)][:i] if i else 0
                    of_sequence[i, i:] = np.arange(64 - i) == 0
        return np.packbits(bits, axis=1, bitorder="little").view("<i4")

    def needed_positions(self, q_len: int, context_len: int) -> range:
        """The positions that some query of a sequence attends to."""
        if q_len == 0:
            return range(0)
        window = self.sliding_window or context_len
        return range(max(0, context_len - q_len - window + 1), context_len)

    def inputs(self) -> Inputs:
        inputs = self._in_default_layout()
        return inputs._replace(kv_cache=self._arranged(inputs.kv_cache)[0])

    def _in_default_layout(self) -> Inputs:
        inputs = self._of_one_dtype()
        if self.cache_dtype is None:
            return inputs
        values = inputs.kv_cache.astype(np.float32) / (1 if self.scales is None else SCALE)
        return inputs._replace(kv_cache=quantized(values, self.cache_dtype))

    def _of_one_dtype(self) -> Inputs:
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
            if self.shared_first_block:
                blocks[0] = pool[0]
            positions = self.needed_positions(q_len, context_len)
            for j in positions:
                block, offset = j // self.block_size, j % self.block_size
                block_tables[s, block] = blocks[block]
                slot = kv_cache[blocks[block], offset]
                if (
                    np.isnan(slot.astype(np.float32)).any()
                    or np.isinf(slot.astype(np.float32)).any()
                ):
                    slot[...] = rng.standard_normal(slot.shape).astype(dtype)
            of_nan = [context_len - 1] if self.nan_in_last_position else []
            if self.nan_in_second_query and q_len > 1:
                of_nan.append(context_len - q_len + 1)
            for position in of_nan:
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


DECODE = ((1, 5), (1, 17), (1, 1), (1, 12))
PREFILL = ((9, 9), (4, 4), (1, 1))
CHUNKED = ((5, 14), (3, 16), (8, 11))
MIXED = ((1, 19), (6, 6), (0, 7), (4, 21), (1, 1))


def _of_each_dtype(family: str, **fields: Any) -> Iterator[Case]:
    for dtype, short in SHORT_NAMES.items():
        yield Case(id=f"{family}-{short}", dtype=dtype, **fields)


def _batches() -> Iterator[Case]:
    batches = {
        "decode": DECODE,
        "prefill": PREFILL,
        "chunked-prefill": CHUNKED,
        "mixed": MIXED,
        "one-token": ((1, 1),),
        "no-query-tokens": ((0, 3), (0, 9)),
        "empty-context": ((0, 0), (2, 2), (0, 0)),
        "only-empty-context": ((0, 0), (0, 0)),
        "no-sequences": (),
        "long-beside-short": ((1, 290), (1, 2), (40, 90)),
    }
    for name, sequences in batches.items():
        yield from _of_each_dtype(name, sequences=sequences)
    no_padding = {"padding_seqs": 0, "padding_blocks": 0, "padding_tokens": 0}
    yield from _of_each_dtype("no-padding", sequences=MIXED, **no_padding)
    yield from _of_each_dtype("much-padding", sequences=MIXED, padding_seqs=20, padding_tokens=50)
    yield from _of_each_dtype("first-token-5", sequences=MIXED, first_token=5)
    yield from _of_each_dtype("num-seqs-of-rank-1", sequences=MIXED, num_seqs_shape=(1,))
    yield from _of_each_dtype("shared-first-block", sequences=CHUNKED, shared_first_block=True)


def _lengths() -> Iterator[Case]:
    for block_size in (1, 2, 3, 8, 16, 17, 32, 64, 100, 128, 256):
        around = sorted({1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size})
        decode = tuple((1, length) for length in around)
        yield from _of_each_dtype(
            f"block-{block_size}-decode", sequences=decode, block_size=block_size
        )
        chunked = tuple((min(3, length), length) for length in around)
        yield from _of_each_dtype(
            f"block-{block_size}-chunked", sequences=chunked, block_size=block_size, head_size=8
        )
    for length in (63, 64, 65, 127, 128, 129):  # the CPU kernel's tile has 64 positions
        for q_len in (1, 5, min(66, length)):
            yield from _of_each_dtype(
                f"context-{length}-query-{q_len}",
                sequences=((q_len, length), (1, 3)),
                block_size=16,
                head_size=8,
                num_heads=2,
            )


def _heads() -> Iterator[Case]:
    for num_kv_heads, group in product((1, 2, 3, 5), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)):
        for dtype in ("float32", "bfloat16"):
            yield Case(
                id=f"kv{num_kv_heads}-gqa{group}-{SHORT_NAMES[dtype]}",
                sequences=((1, 11), (3, 6)),
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                head_size=8,
                dtype=dtype,
            )
    for head_size in (1, 2, 3, 7, 8, 16, 17, 32, 40, 64, 80, 96, 112, 120, 128, 192, 256, 512):
        yield from _of_each_dtype(
            f"head-size-{head_size}", sequences=((1, 19), (3, 5)), head_size=head_size
        )


def _windows_and_caps() -> Iterator[Case]:
    batches = {"decode": ((1, 150), (1, 3)), "mixed": ((7, 80), (9, 9), (1, 66))}
    for window, (name, sequences) in product((1, 2, 8, 9, 63, 64, 65, 1000), batches.items()):
        yield from _of_each_dtype(
            f"window-{window}-{name}",
            sequences=sequences,
            block_size=8,
            head_size=8,
            sliding_window=window,
        )
    for cap, (name, sequences) in product((0.5, 30.0, 50.0), batches.items()):
        yield from _of_each_dtype(
            f"cap-{cap}-{name}", sequences=sequences, block_size=8, soft_cap=cap, query_factor=8.0
        )
    yield from _of_each_dtype(
        "window-20-cap-5", sequences=batches["mixed"], sliding_window=20, soft_cap=5.0
    )
    yield from _of_each_dtype("cap-5-scale-0", sequences=batches["mixed"], scale=0.0, soft_cap=5.0)
    yield from _of_each_dtype("largest-window", sequences=MIXED, sliding_window=2**63 - 1)


def _values() -> Iterator[Case]:
    for scale in (0.0, -0.3, 0.25, 5.0):
        yield from _of_each_dtype(f"scale-{scale}", sequences=MIXED, scale=scale)
    for name, sequences in {"decode": ((1, 140),), "prefill": ((70, 70),)}.items():
        yield from _of_each_dtype(
            f"large-logits-{name}", sequences=sequences, query_factor=30.0, num_heads=2
        )
    for length in (2, 16, 17, 63, 64, 65, 70):
        yield from _of_each_dtype(
            f"later-token-nan-prefill-{length}",
            sequences=((length, length),),
            nan_in_last_position=True,
            num_heads=2,
        )
    yield from _of_each_dtype(
        "later-token-nan-chunked",
        sequences=((5, 69), (3, 9)),
        sliding_window=66,
        nan_in_last_position=True,
    )
    yield from _of_each_dtype(
        "context-2000",
        sequences=((1, 2000), (2, 1025)),
        num_heads=8,
        head_size=64,
        block_size=16,
    )


def _features() -> Iterator[Case]:
    features: dict[str, dict[str, Any]] = {
        "lse": {},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": True},
        "not-causal": {"causal": False},
        "right-0": {"causal": False, "window_right": 0},
        "right-3": {"causal": False, "window_right": 3},
        "window-9-right-70": {"causal": False, "sliding_window": 9, "window_right": 70},
        "alibi-not-causal": {"causal": False, "alibi_slopes": True},
        "all": {
            "sinks": True,
            "alibi_slopes": True,
            "causal": False,
            "window_right": 20,
            "sliding_window": 300,
            "soft_cap": 5.0,
        },
    }
    batches = {
        "decode": ((1, 150), (1, 3)),
        "mixed": ((7, 80), (9, 9), (0, 5), (1, 66)),
        "long": ((1, 700), (3, 1100), (30, 530)),
    }
    for (feature, fields), (name, sequences) in product(features.items(), batches.items()):
        yield from _of_each_dtype(
            f"{feature}-{name}",
            sequences=sequences,
            num_heads=6,
            block_size=8,
            head_size=24,
            return_lse=name != "decode" or feature == "lse",
            **fields,
        )
    trees: dict[str, tuple[tuple[int, int], ...]] = {
        "decode": ((7, 150), (1, 3), (2, 2), (13, 13)),
        "wide": ((64, 190), (65, 70), (64, 64), (0, 5)),
        "long": ((12, 700), (9, 1100), (33, 530)),
    }
    for tree, (name, sequences) in product(TREES[1:], trees.items()):
        yield from _of_each_dtype(
            f"tree-{tree}-{name}",
            sequences=sequences,
            tree=tree,
            num_heads=6,
            block_size=8,
            head_size=24,
            sinks=name == "wide",
            sliding_window=66 if name == "long" else None,
            soft_cap=5.0 if name == "long" else None,
            return_lse=name == "wide",
        )
    for tree, cache_dtype in product(TREES[1:], (None, "float8_e4m3fn", "int8")):
        yield from _of_each_dtype(
            f"tree-{tree}-nan-{cache_dtype}",
            sequences=((3, 40), (9, 70), (6, 38), (12, 12), (40, 41)),
            tree=tree,
            cache_dtype=cache_dtype,
            scales=None if cache_dtype is None else "per position",
            query_factor=8.0,
            nan_in_second_query=True,
        )
    # More queries than keys, as where devices share the cache.
    fewer = ((5, 2), (3, 0), (1, 0), (40, 0), (4, 9), (90, 20))
    for feature, right in product(("lse", "sinks", "alibi"), (None, 0, 2)):
        yield from _of_each_dtype(
            f"fewer-keys-{feature}-right-{right}",
            sequences=fewer,
            return_lse=True,
            **(features[feature] | {"causal": False, "window_right": right}),
        )


def _layouts() -> Iterator[Case]:
    batches = {
        "mixed": ((7, 80), (9, 9), (0, 5), (1, 66)),
        "long": ((1, 700), (3, 1100)),
    }
    for layout, (name, sequences) in product(LAYOUTS, batches.items()):
        yield from _of_each_dtype(
            f"layout-{layout}-{name}",
            sequences=sequences,
            kv_layout=layout,
            num_heads=12,
            num_kv_heads=3,
            block_size=8 if name == "mixed" else 5,
            head_size=24,
            sliding_window=70 if name == "mixed" else None,
        )
    # Rows of 4 bytes, which are adjacent only in some layouts.
    for layout in LAYOUTS:
        yield Case(
            id=f"layout-{layout}-thin",
            sequences=MIXED,
            kv_layout=layout,
            head_size=1,
            num_kv_heads=1,
        )


def _latent() -> Iterator[Case]:
    """V is a part of K: multi-head latent attention."""
    batches = {
        "decode": (20, 12, ((1, 150), (1, 3))),
        "mixed": (48, 32, ((7, 80), (9, 9), (0, 5), (1, 66))),
        "long": (40, 40, ((1, 700), (3, 1100), (30, 530))),
        "deepseek": (576, 512, ((1, 70), (2, 21))),
    }
    for name, (head_size, value_head_size, sequences) in batches.items():
        yield from _of_each_dtype(
            f"latent-{name}",
            sequences=sequences,
            value_head_size=value_head_size,
            num_heads=16,
            num_kv_heads=1,
            block_size=8,
            head_size=head_size,
            return_lse=name == "mixed",
        )
    for layout, cache_dtype in product(LATENT_LAYOUTS, (None, *CACHE_DTYPES)):
        yield from _of_each_dtype(
            f"latent-{layout}-{cache_dtype}",
            sequences=batches["mixed"][2],
            value_head_size=16,
            num_heads=6,
            num_kv_heads=2 if "h" in layout else 1,
            head_size=32,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            scales="per position" if cache_dtype else None,
        )
    features: dict[str, dict[str, Any]] = {
        "window-9-cap-5": {"sliding_window": 9, "soft_cap": 5.0},
        "not-causal": {"causal": False, "window_right": 20},
        "sinks-and-alibi": {"sinks": True, "alibi_slopes": True},
        "tree": {"tree": "draft"},
        "nan": {"nan_in_last_position": True},
    }
    for feature, fields in features.items():
        yield from _of_each_dtype(
            f"latent-{feature}",
            sequences=((7, 80), (9, 9), (1, 66)),
            value_head_size=17,
            num_heads=5,
            num_kv_heads=1,
            head_size=24,
            return_lse=True,
            **fields,
        )


def _caches_of_8_bits() -> Iterator[Case]:
    batches = {
        "decode": (24, ((1, 150), (1, 3))),
        "mixed": (32, ((7, 80), (9, 9), (0, 5), (1, 66))),
        "long": (112, ((1, 700), (5, 530))),
    }
    for cache_dtype, scales in product(CACHE_DTYPES, SCALES):
        for name, (head_size, sequences) in batches.items():
            yield from _of_each_dtype(
                f"{cache_dtype}-{scales}-{name}",
                sequences=sequences,
                cache_dtype=cache_dtype,
                scales=scales,
                num_heads=12,
                num_kv_heads=3,
                block_size=8,
                head_size=head_size,
                return_lse=name == "mixed",
            )
    for cache_dtype, head_size in product(CACHE_DTYPES, (1, 7, 64, 100, 192)):
        yield Case(
            id=f"{cache_dtype}-head-size-{head_size}",
            sequences=MIXED,
            cache_dtype=cache_dtype,
            scales="per position",
            head_size=head_size,
            soft_cap=4.0,
            dtype="bfloat16",
        )
    for cache_dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield from _of_each_dtype(
            f"{cache_dtype}-later-token-nan",
            sequences=((9, 9), (70, 70)),
            cache_dtype=cache_dtype,
            nan_in_last_position=True,
        )
    for cache_dtype in CACHE_DTYPES:
        yield from _of_each_dtype(
            f"{cache_dtype}-later-scale-nan",
            sequences=((9, 9), (70, 70)),
            cache_dtype=cache_dtype,
            scales="per position",
            nan_in_last_position=True,
        )
    for layout in ("n2hbd", "nbhd"):
        yield Case(
            id=f"float8-layout-{layout}",
            sequences=MIXED,
            cache_dtype="float8_e4m3fn",
            scales="per head",
            kv_layout=layout,
            sinks=True,
            alibi_slopes=True,
            dtype="bfloat16",
        )


def _hints() -> Iterator[Case]:
    batches = {
        1: ((1, 700), (1, 3), (0, 5), (1, 1)),
        3: ((3, 600), (2, 9), (1, 70)),
        100: ((40, 330), (1, 70)),
    }
    for (max_query_len, sequences), head_size in product(batches.items(), (64, 160)):
        yield from _of_each_dtype(
            f"max-query-len-{max_query_len}-head-size-{head_size}",
            sequences=sequences,
            max_query_len=max_query_len,
            num_heads=10,
            num_kv_heads=2,
            head_size=head_size,
            padding_tokens=20,
        )
    for cache_dtype in CACHE_DTYPES:
        yield Case(
            id=f"max-query-len-{cache_dtype}",
            sequences=batches[3],
            max_query_len=3,
            num_heads=10,
            head_size=128,
            cache_dtype=cache_dtype,
            scales="per position",
            dtype="float16",
        )


def _ragged() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for i in range(60):
        sequences = []
        for _ in range(int(rng.integers(1, 6))):
            context = int(rng.integers(0, 100))
            sequences.append((int(rng.integers(0, min(context, 8) + 1)), context))
        num_kv_heads = int(rng.integers(1, 4))
        yield from _of_each_dtype(
            f"ragged-{i}",
            sequences=tuple(sequences),
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * int(rng.integers(1, 5)),
            head_size=int(rng.integers(1, 50)),
            block_size=int(rng.integers(1, 40)),
            sliding_window=int(rng.integers(1, 90)) if i % 3 == 0 else None,
            soft_cap=20.0 if i % 4 == 0 else None,
            first_token=i % 5,
        )


CASES = [
    *_batches(),
    *_lengths(),
    *_heads(),
    *_windows_and_caps(),
    *_values(),
    *_features(),
    *_layouts(),
    *_latent(),
    *_caches_of_8_bits(),
    *_hints(),
    *_ragged(),
]
assert len({case.id for case in CASES}) == len(CASES)


def _long_queries() -> Iterator[Case]:
    """Queries with more tokens than a query tile of the CUDA kernels, so that the Hopper kernel may
    run. Contexts have many KV tiles. Short queries are in the same batch."""
    batches = {
        "prompts": ((130, 130), (1, 200), (65, 65), (300, 300)),
        "chunks": ((100, 385), (66, 128), (20, 129), (0, 40), (129, 520)),
    }
    features: dict[str, dict[str, Any]] = {
        "window-1": {"sliding_window": 1},
        "window-90": {"sliding_window": 90},
        "window-128-cap-5": {"sliding_window": 128, "soft_cap": 5.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": True},
        "not-causal": {"causal": False},
        "window-40-right-200": {"causal": False, "sliding_window": 40, "window_right": 200},
        "large-logits": {"query_factor": 30.0},
        "negative-scale": {"scale": -0.3},
        "hint": {"max_query_len": 300},
        "shared-first-block": {"shared_first_block": True},
        "layout-n2hbd": {"kv_layout": "n2hbd"},
        "all": {
            "sinks": True,
            "alibi_slopes": True,
            "causal": False,
            "window_right": 20,
            "sliding_window": 150,
            "soft_cap": 5.0,
        },
    }
    shorts = {dtype: short for dtype, short in SHORT_NAMES.items() if dtype != "float32"}
    sizes = product((8, 64, 80, 128), ((1, 1), (2, 3), (1, 4), (1, 8)))
    larger = product((144, 192), ((1, 2), (1, 5)))
    for i, (head_size, (num_kv_heads, group)) in enumerate(chain(sizes, larger)):
        dtype = "float16" if head_size == 80 else "bfloat16"
        yield Case(
            id=f"long-head-size-{head_size}-gqa{group}-{shorts[dtype]}",
            sequences=[*batches.values()][(i + i // 4) % 2],
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * group,
            head_size=head_size,
            block_size=16,
            dtype=dtype,
            return_lse=True,
        )
    for i, (feature, fields) in enumerate(features.items()):
        both = zip(shorts.items(), batches.items(), strict=True)
        for (dtype, short), (name, sequences) in both:
            yield Case(
                id=f"long-{name}-{feature}-{short}",
                sequences=sequences,
                num_heads=6,
                block_size=(1, 7, 16, 64, 100, 256)[i % 6],
                head_size=(64, 128, 72)[i % 3],
                dtype=dtype,
                return_lse=True,
                **fields,
            )
    for (dtype, short), length in product(shorts.items(), (65, 127, 128, 129, 200, 256, 257)):
        yield Case(
            id=f"long-later-token-nan-{length}-{short}",
            sequences=((length, length), (70, length + 5)),
            nan_in_last_position=True,
            sliding_window=100 if length == 200 else None,
            head_size=64 if length % 2 else 128,
            num_heads=2,
            block_size=16,
            dtype=dtype,
        )
    for i, (cache_dtype, feature) in enumerate(product(CACHE_DTYPES, features)):
        dtype, short = [*shorts.items()][i % 2]
        yield Case(
            id=f"long-{cache_dtype}-{feature}-{short}",
            sequences=[*batches.values()][i // 2 % 2],
            num_heads=6,
            block_size=(1, 7, 16, 64, 100, 256)[i % 6],
            head_size=(64, 128, 80, 16)[i % 4],
            dtype=dtype,
            cache_dtype=cache_dtype,
            scales=(None, "one", "per head")[i % 3],
            return_lse=True,
            **features[feature],
        )
    for cache_dtype, length in product(("float8_e4m3fn", "float8_e5m2"), (65, 129, 200)):
        yield Case(
            id=f"long-{cache_dtype}-later-token-nan-{length}",
            sequences=((length, length), (70, length + 5)),
            nan_in_last_position=True,
            head_size=64 if length % 2 else 128,
            block_size=16,
            dtype="bfloat16",
            cache_dtype=cache_dtype,
            scales="per head",
        )
    yield Case(
        id="long-later-token-nan-gqa64",
        sequences=((4, 200), (3, 130)),
        nan_in_last_position=True,
        num_heads=64,
        num_kv_heads=1,
        block_size=16,
        dtype="bfloat16",
    )
    for group in (100, 130):
        yield Case(
            id=f"long-gqa{group}",
            sequences=((3, 200), (2, 2)),
            num_heads=group,
            num_kv_heads=1,
            dtype="bfloat16",
        )
    yield Case(
        id="long-beside-splits",
        sequences=((100, 130), (3, 700), (1, 600), (22, 300)),
        num_heads=6,
        dtype="bfloat16",
    )
    yield Case(
        id="long-float8_e4m3fn-beside-splits",
        sequences=((100, 130), (3, 700), (1, 600), (22, 300)),
        num_heads=6,
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        scales="per head",
    )
    yield Case(
        id="long-latent-int8",
        sequences=((100, 130), (70, 300)),
        num_heads=6,
        num_kv_heads=1,
        head_size=96,
        value_head_size=64,
        kv_layout="nbd",
        dtype="float16",
        cache_dtype="int8",
        scales="one",
    )
    yield Case(
        id="long-fewer-keys-int8",
        sequences=((200, 20), (150, 0), (70, 200)),
        causal=False,
        sinks=True,
        return_lse=True,
        dtype="bfloat16",
        cache_dtype="int8",
        scales="one",
    )
    yield Case(
        id="long-fewer-keys",
        sequences=((200, 20), (150, 0), (70, 200)),
        causal=False,
        sinks=True,
        return_lse=True,
        dtype="float16",
    )


def _extreme_numbers() -> dict[str, dict[str, Any]]:
    """Arguments near the ends of float32, or where its tanh alone would lose the logit."""
    caps = {f"cap-{cap:g}": {"soft_cap": cap} for cap in (64.0, 65.0, 1e4, 1e8, 1e30, 3e38)}
    no_scale = {"scale": 0.0}
    of_heads = {
        f"{name}-{value:g}": {name: np.array([value, 0.5, value, -1], np.float32)}
        for name, values in {
            "sinks": (3e38, np.inf),
            "alibi_slopes": (3e38, -3e38, np.inf),
        }.items()
        for value in values
    }
    return {
        **caps,
        "logits-beyond-the-cap": {"soft_cap": 65.0, "scale": 40.0},
        "least-cap": no_scale | {"soft_cap": 1e-45},
        "least-cap-of-scale-1": {"scale": 1.0, "soft_cap": 2.0**-126},
        "largest-scale-and-cap": {"scale": 2.0**126, "soft_cap": 1.0},
        "least-scale": {"scale": 1e-45, "soft_cap": 3e38},
        **of_heads,
    }


EXTREME_NUMBERS = _extreme_numbers()


def extreme_call(name: str, dtype: str) -> tuple[Inputs, dict[str, Any]]:
    """The operands and attributes of a call with EXTREME_NUMBERS[name]."""
    case = Case(
        id="extreme",
        sequences=((3, 40), (1, 9), (9, 9)),
        head_size=16,
        dtype=dtype,
        query_factor=3.0,
        return_lse=True,
    )
    return case.inputs(), case.attributes() | EXTREME_NUMBERS[name]


LONG_CASES = list(_long_queries())
assert len({case.id for case in LONG_CASES}) == len(LONG_CASES)

SHORT_CASES = [
    case
    for case in CASES
    if case.id.rpartition("-")[0]
    in {
        "mixed",
        "no-sequences",
        "block-17-chunked",
        "window-9-mixed",
        "cap-30.0-decode",
        "all-mixed",
        "fewer-keys-sinks-right-2",
        "layout-n2hbd-mixed",
        "layout-nbhd-mixed",
        "float8_e4m3fn-per head-mixed",
        "float8_e5m2-one-mixed",
        "int8-per head-decode",
        "int8-per position-mixed",
        "latent-mixed",
        "max-query-len-3-head-size-64",
        "ragged-7",
    }
]


class UpdateInputs(NamedTuple):
    """The arguments of kv_cache_update, in their order."""

    kv_cache: Any
    key: Any
    value: Any
    slot_mapping: Any


@dataclass(frozen=True)
class UpdateCase:
    """A call of kv_cache_update with `num_tokens` tokens; `num_padding` of them have no slot."""

    id: str
    num_tokens: int = 9
    num_padding: int = 3
    num_kv_heads: int = 2
    head_size: int = 17
    block_size: int = 4
    dtype: str = "float32"
    slot_dtype: str = "int32"
    kv_layout: str | None = None
    cache_dtype: str | None = None  # of 8 bits
    scales: str | None = None  # of SCALES
    key_factor: float = 1.0
    is_latent: bool = False  # V is a part of K

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if self.kv_layout is not None:
            _, *value_cache = self._arranged(self._in_default_layout().kv_cache)
            attributes = dict(zip(["value_cache"], value_cache, strict=False))
            attributes["kv_layout"] = self.kv_layout
        if self.scales is not None:
            inputs = self._in_default_layout()
            is_unused = np.full(inputs.kv_cache.shape[:2], True)
            slots = inputs.slot_mapping
            is_unused.reshape(-1)[slots[slots >= 0]] = False
            attributes |= scales(self.scales, self.num_kv_heads, is_unused)
            if self.is_latent:
                del attributes["v_scale"]
        return attributes

    def _arranged(self, kv_cache: np.ndarray) -> tuple[np.ndarray, ...]:
        return arrange(kv_cache, self.kv_layout, is_latent=self.is_latent)

    def inputs(self) -> UpdateInputs:
        inputs = self._in_default_layout()
        if self.is_latent:
            inputs = inputs._replace(value=inputs.value[..., :0])
        return inputs._replace(kv_cache=self._arranged(inputs.kv_cache)[0])

    def _in_default_layout(self) -> UpdateInputs:
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        dtype = DTYPES[self.dtype]
        num_blocks = -(-self.num_tokens // self.block_size) + 3
        slots = rng.permutation(num_blocks * self.block_size)[: self.num_tokens]
        padding = rng.permutation(self.num_tokens)[: self.num_padding]
        slots[padding] = rng.choice([-1, -2, -2147483648], self.num_padding)
        cache_shape = (num_blocks, self.block_size, 2 * self.num_kv_heads, self.head_size)
        shape = (self.num_tokens, self.num_kv_heads, self.head_size)
        kv_cache, key, value = (
            rng.standard_normal(size).astype(dtype) for size in (cache_shape, shape, shape)
        )
        key *= dtype(self.key_factor)
        if self.cache_dtype is not None:
            kv_cache = quantized(kv_cache.astype(np.float32), self.cache_dtype)
            if self.dtype == "float16" and self.scales is None:  # copied unchanged
                key, value = (
                    quantized(x.astype(np.float32), self.cache_dtype) for x in (key, value)
                )
        if key.dtype != np.int8:
            key[padding] = np.nan
            value[padding] = np.nan
        return UpdateInputs(kv_cache, key, value, slots.astype(self.slot_dtype))


def _updates() -> Iterator[UpdateCase]:
    for (dtype, short), slot_dtype in product(SHORT_NAMES.items(), ("int32", "int64")):
        name = f"{slot_dtype}-{short}"
        fields: dict[str, Any] = {"dtype": dtype, "slot_dtype": slot_dtype}
        yield UpdateCase(id=f"some-padding-{name}", **fields)
        yield UpdateCase(id=f"all-padding-{name}", num_padding=9, **fields)
        yield UpdateCase(id=f"no-tokens-{name}", num_tokens=0, num_padding=0, **fields)
        yield UpdateCase(id=f"one-token-{name}", num_tokens=1, num_padding=0, **fields)
        yield UpdateCase(
            id=f"large-{name}", num_tokens=150, num_kv_heads=5, head_size=128, **fields
        )
    for block_size, num_kv_heads in product((1, 3, 16), (1, 2, 5)):
        name = f"block-{block_size}-kv{num_kv_heads}"
        yield UpdateCase(id=name, block_size=block_size, num_kv_heads=num_kv_heads, head_size=64)
    yield UpdateCase(id="head-size-1", head_size=1)
    for layout in LAYOUTS:
        yield UpdateCase(id=f"layout-{layout}", kv_layout=layout, head_size=16, num_kv_heads=3)
        yield UpdateCase(id=f"layout-{layout}-odd", kv_layout=layout, dtype="bfloat16")
    for cache_dtype, (dtype, short), scales in product(CACHE_DTYPES, SHORT_NAMES.items(), SCALES):
        for name, factor in {"": 1.0, "-too-large": 100.0, "-subnormal": 2.0**-12}.items():
            yield UpdateCase(
                id=f"{cache_dtype}-{scales}-{short}{name}",
                cache_dtype=cache_dtype,
                dtype=dtype,
                scales=scales,
                key_factor=factor,
                num_tokens=60,
            )
    for layout, cache_dtype in product(LATENT_LAYOUTS, (None, *CACHE_DTYPES)):
        yield UpdateCase(
            id=f"latent-{layout}-{cache_dtype}",
            is_latent=True,
            num_kv_heads=2 if "h" in layout else 1,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            scales="per head" if cache_dtype else None,
            dtype="bfloat16",
        )
    yield UpdateCase(id="latent-large", is_latent=True, num_tokens=150, num_kv_heads=1)
    yield UpdateCase(
        id="float8-layout", cache_dtype="float8_e4m3fn", scales="per head", kv_layout="nhbd"
    )


UPDATE_CASES = list(_updates())
assert len({case.id for case in UPDATE_CASES}) == len(UPDATE_CASES)

SHORT_UPDATE_CASES = [
    case
    for case in UPDATE_CASES
    if case.id
    in {
        "some-padding-int32-f32",
        "some-padding-int64-bf16",
        "no-tokens-int32-f16",
        "layout-n2hbd",
        "layout-nbhd-odd",
        "latent-nbd-None",
        "float8_e4m3fn-per position-bf16",
        "float8_e5m2-None-f16",
        "int8-one-f32",
    }
]
