"""Calls of kv_cache_update."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from harness.arrays import CODES, DTYPES, QUANTIZED, SCALE_DTYPES, packed, quantized
from harness.layouts import LATENT_LAYOUTS, LAYOUTS, SEPARATE_LAYOUTS, arrange
from tests.cases.case import (
    INTEGERS,
    NVFP4,
    SCALES,
    SHORT_NAMES,
    UNIT_SCALES,
    Groups,
    pack_4_bits,
    quantized_cache,
    scale_arrays,
)


class UpdateInputs(NamedTuple):
    """The arguments of kv_cache_update, in their order."""

    kv_cache: Any
    key: Any
    value: Any
    slot_mapping: Any


NORMS = (None, "per head", "all heads")
NORM_OPTIONS = {"norm_offset": 1, "norm_after_rope": True, "norm_round_first": True}


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
    cache_dtype: str | None = None  # of QUANTIZED
    value_cache_dtype: str | None = None  # of V, where K and V are int8 and int4
    scales: str | None = None  # of SCALES
    groups: Groups | None = None  # in their place
    round_scales_up: bool = False
    zero_scales: bool = False  # per position: every second token's, of which one is zeros
    made_scales: tuple[str, ...] = ()  # of "k_scale" and "v_scale"
    key_factor: float = 1.0
    is_latent: bool = False  # V is a part of K
    own_value_head_size: int | None = None  # of V in an array of its own
    rotary_dim: int | None = None  # numbers of a key that are rotated
    interleaved: bool = False
    table_dtype: str = "float32"
    position_dtype: str = "int32"
    num_heads: int = 0  # of the query that is rotated or normalized, too
    norm: str | None = None  # of NORMS
    norm_dtype: str = "float32"
    v_norm: bool = False
    norm_options: tuple[str, ...] = ()  # of NORM_OPTIONS
    hadamard: str | None = None
    has_signs: bool = False  # hadamard_signs

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if self.kv_layout is not None:
            _, *value_cache = self._arranged(self._in_default_layout().kv_cache)
            attributes |= dict(zip(["value_cache"], value_cache, strict=False))
            attributes["kv_layout"] = self.kv_layout
        if self.scales is not None or self.groups is not None:
            inputs = self._in_default_layout()
            is_unused = np.full(inputs.kv_cache.shape[:2], True)
            slots = inputs.slot_mapping
            is_unused.reshape(-1)[slots[slots >= 0]] = False
            of_positions = self.num_kv_heads, is_unused, self._dtypes()
            if self.groups is not None:
                sizes = self.head_size, self.own_value_head_size or self.head_size
                attributes |= self.groups.arrays(*of_positions, sizes)
            elif self.scales is not None:
                attributes |= scale_arrays(self.scales, *of_positions)
            for name in ("k_scale", "v_scale"):
                if self.zero_scales:
                    scales = attributes[name]
                    scales.reshape(-1, *scales.shape[2:])[slots[::2]] = 0
        elif {*self._dtypes()} & {*INTEGERS} and not self._is_copied():
            attributes |= UNIT_SCALES
        if self.is_latent:
            attributes.pop("v_scale", None)
            attributes.pop("v_global", None)
        if "e2m1" in self._dtypes():
            attributes["codes"] = "e2m1"
        if self.round_scales_up:
            attributes["round_scales_up"] = True
        for name in self.made_scales:
            pool = self._in_default_layout().kv_cache.shape[:2]
            like = attributes.pop(name, np.zeros((*pool, self.num_kv_heads), np.float32))
            if like.ndim < 3:
                like = np.zeros((*pool, self.num_kv_heads), np.float32)
            attributes[f"{name}_cache"] = np.full_like(like, np.nan)
            attributes[f"{name}_cache"][::2] = 7
        return attributes | self._query() | self._rotary() | self._norms() | self._hadamard()

    def _rotary(self) -> dict[str, Any]:
        """A token that has no slot may have no position, either. Rows of the table that no token
        needs are NaN."""
        if self.rotary_dim is None:
            return {}
        rng = np.random.default_rng(zlib.crc32(f"rotary {self.id}".encode()))
        max_positions = self.num_tokens + 5
        positions = rng.integers(0, max_positions, self.num_tokens)
        angles = rng.uniform(0, 7, (max_positions, self.rotary_dim // 2))
        table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(DTYPES[self.table_dtype])
        table[~np.isin(np.arange(max_positions), positions)] = np.nan
        (padding,) = np.nonzero(self._in_default_layout().slot_mapping < 0)
        faulty = padding[::2]
        positions[faulty] = rng.choice([-1, max_positions, -(2**31), 2**31 - 1], len(faulty))
        rotary = {"positions": positions.astype(self.position_dtype), "cos_sin_cache": table}
        return rotary | ({"interleaved": True} if self.interleaved else {})

    def _query(self) -> dict[str, Any]:
        if not self.num_heads:
            return {}
        rng = np.random.default_rng(zlib.crc32(f"query {self.id}".encode()))
        query = rng.standard_normal((self.num_tokens, self.num_heads, self.head_size))
        return {"query": query.astype(DTYPES[self.dtype])}

    def _norms(self) -> dict[str, Any]:
        norms: dict[str, Any] = {"v_norm": True} if self.v_norm else {}
        rng = np.random.default_rng(zlib.crc32(f"norms {self.id}".encode()))
        heads = {"q_norm": self.num_heads, "k_norm": self.num_kv_heads}
        for name, count in heads.items():
            if self.norm is None or count == 0:
                continue
            shape = (self.head_size,) if self.norm == "per head" else (count, self.head_size)
            norms[name] = rng.normal(1, 0.5, shape).astype(DTYPES[self.norm_dtype])
        if not norms:
            return {}
        return norms | {"norm_eps": 1e-6} | {name: NORM_OPTIONS[name] for name in self.norm_options}

    def _hadamard(self) -> dict[str, Any]:
        rng = np.random.default_rng(zlib.crc32(f"signs {self.id}".encode()))
        signs = rng.choice(np.float32([-1, 1]), self.head_size)
        transform: dict[str, Any] = {"hadamard": self.hadamard} if self.hadamard else {}
        return transform | ({"hadamard_signs": signs} if self.has_signs else {})

    def _is_copied(self) -> bool:
        """Whether keys and values have the cache's dtype, and are written unchanged."""
        is_one_dtype = self.cache_dtype is not None and self.value_cache_dtype is None
        is_scaled = self.scales is not None or self.groups is not None or self.made_scales
        return is_one_dtype and self.dtype == "float16" and not is_scaled

    def _dtypes(self) -> tuple[str, str]:
        """The dtypes of K and V in the cache."""
        dtype = self.cache_dtype or self.dtype
        return dtype, self.value_cache_dtype or dtype

    def _arranged(self, kv_cache: np.ndarray) -> tuple[np.ndarray, ...]:
        caches = arrange(
            kv_cache,
            self.kv_layout,
            is_latent=self.is_latent,
            value_head_size=self.own_value_head_size,
        )
        return pack_4_bits(caches, self._dtypes())

    def inputs(self) -> UpdateInputs:
        inputs = self._in_default_layout()
        columns = 0 if self.is_latent else self.own_value_head_size
        inputs = inputs._replace(value=np.ascontiguousarray(inputs.value[..., :columns]))
        if self._is_copied() and self.cache_dtype in CODES:
            packs = (packed(x, self.cache_dtype) for x in (inputs.key, inputs.value))
            inputs = inputs._replace(**dict(zip(("key", "value"), packs, strict=True)))
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
            kv_cache = quantized_cache(kv_cache.astype(np.float32), self._dtypes(), None)
            if self._is_copied():
                key, value = (
                    quantized(x.astype(np.float32), self.cache_dtype) for x in (key, value)
                )
        if self.zero_scales:
            key[0], value[2, 0] = 0, 0
            value[4, 1, :2] = np.nan, np.inf
        if self.made_scales and self.num_tokens > 3:
            key[0], value[0] = 0, value[0] * 0  # zeros with both signs
            key[1, 0, -1], value[2, 0, 0] = np.nan, -np.nan
            key[2, 0, 0], value[1, -1, -1] = -np.inf, np.inf
            key[3, :, 1:], key[3, -1, 0] = 0, -dtype(1e-6)
            value[3] *= dtype(1e-40 if self.dtype != "float16" else 1e-6)
        if key.dtype != np.int8 and not (self._is_copied() and self.cache_dtype == "e2m1"):
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
    for cache_dtype, (dtype, short), scales in product(QUANTIZED, SHORT_NAMES.items(), SCALES):
        for name, factor in {"": 1.0, "-too-large": 100.0, "-subnormal": 2.0**-12}.items():
            yield UpdateCase(
                id=f"{cache_dtype}-{scales}-{short}{name}",
                cache_dtype=cache_dtype,
                dtype=dtype,
                scales=scales,
                key_factor=factor,
                num_tokens=60,
                head_size=18 if cache_dtype == "int4" else 17,
            )
    for cache_dtype, (dtype, short) in product(QUANTIZED, SHORT_NAMES.items()):
        yield UpdateCase(
            id=f"{cache_dtype}-zero-scales-{short}",
            cache_dtype=cache_dtype,
            dtype=dtype,
            scales="per position",
            zero_scales=True,
            num_padding=0,
            head_size=18,
        )
    both = ("k_scale", "v_scale")
    for cache_dtype, (dtype, short) in product(QUANTIZED, SHORT_NAMES.items()):
        made: dict[str, Any] = {"cache_dtype": cache_dtype, "made_scales": both, "dtype": dtype}
        name = f"{cache_dtype}-made-scales-{short}"
        yield UpdateCase(id=name, num_padding=0, head_size=18, **made)
        yield UpdateCase(id=f"{name}-padding", num_tokens=40, num_padding=30, head_size=32, **made)
        yield UpdateCase(
            id=f"{name}-large",
            num_tokens=150,
            num_kv_heads=5,
            head_size=128,
            slot_dtype="int64",
            **made,
        )
        for interleaved in (False, True):
            yield UpdateCase(
                id=f"{name}-rotated-{'interleaved' if interleaved else 'neox'}",
                head_size=32,
                rotary_dim=16,
                interleaved=interleaved,
                num_heads=4,
                **made,
            )
    for made_scales in (("k_scale",), ("v_scale",)):
        for cache_dtype in ("float8_e4m3fn", "int8"):
            yield UpdateCase(
                id=f"{cache_dtype}-made-{made_scales[0]}",
                cache_dtype=cache_dtype,
                made_scales=made_scales,
                scales="per position" if cache_dtype == "int8" else None,
            )
    for layout in SEPARATE_LAYOUTS:
        for cache_dtype, value_cache_dtype in (("int8", "int4"), ("int4", "int8")):
            yield UpdateCase(
                id=f"{cache_dtype}-{value_cache_dtype}-made-scales-{layout}",
                head_size=18,
                own_value_head_size=6,
                kv_layout=layout,
                cache_dtype=cache_dtype,
                value_cache_dtype=value_cache_dtype,
                made_scales=both,
                dtype="bfloat16",
            )
    for layout in ("2nbhd", "n2hbd"):
        yield UpdateCase(
            id=f"int8-made-scales-{layout}", kv_layout=layout, cache_dtype="int8", made_scales=both
        )
    for layout, cache_dtype in product(LATENT_LAYOUTS, QUANTIZED):
        yield UpdateCase(
            id=f"latent-{layout}-{cache_dtype}-made-scales",
            head_size=18,
            is_latent=True,
            num_kv_heads=2 if "h" in layout else 1,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            made_scales=both[:1],
            dtype="bfloat16",
        )
    yield UpdateCase(
        id="int8-made-scales-no-tokens",
        num_tokens=0,
        num_padding=0,
        cache_dtype="int8",
        made_scales=both,
    )
    for layout, cache_dtype in product(LATENT_LAYOUTS, (None, *QUANTIZED)):
        yield UpdateCase(
            id=f"latent-{layout}-{cache_dtype}",
            head_size=18 if cache_dtype == "int4" else 17,
            is_latent=True,
            num_kv_heads=2 if "h" in layout else 1,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            scales="per head" if cache_dtype else None,
            dtype="bfloat16",
        )
    mixed = (("int8", "int4"), ("int4", "int8"))
    same = ((dtype, None) for dtype in (None, *QUANTIZED))
    for layout, (cache_dtype, value_cache_dtype) in product(SEPARATE_LAYOUTS, (*same, *mixed)):
        odd = (18, 6) if "int4" in (cache_dtype, value_cache_dtype) else (17, 5)
        head_size, columns = (24, 16) if layout == "nbhd" else odd
        if (cache_dtype, layout) == ("int8", "hnbd"):
            head_size = 17  # K alone may be odd
        values = f"-{value_cache_dtype}" if value_cache_dtype else ""
        yield UpdateCase(
            id=f"own-value-head-size-{layout}-{cache_dtype}{values}",
            head_size=head_size,
            own_value_head_size=columns,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            value_cache_dtype=value_cache_dtype,
            scales="per position" if cache_dtype else None,
            dtype="bfloat16",
        )
    for (cache_dtype, value_cache_dtype), (dtype, short) in product(mixed, SHORT_NAMES.items()):
        yield UpdateCase(
            id=f"{cache_dtype}-{value_cache_dtype}-{short}",
            num_tokens=150,
            num_kv_heads=5,
            head_size=128,
            kv_layout="nbhd",
            cache_dtype=cache_dtype,
            value_cache_dtype=value_cache_dtype,
            dtype=dtype,
        )
    yield UpdateCase(id="latent-large", is_latent=True, num_tokens=150, num_kv_heads=1)
    yield from _rotated()
    yield UpdateCase(
        id="float8-layout", cache_dtype="float8_e4m3fn", scales="per head", kv_layout="nhbd"
    )


def _rotated() -> Iterator[UpdateCase]:
    for (dtype, short), interleaved in product(SHORT_NAMES.items(), (False, True)):
        name = f"{'interleaved' if interleaved else 'neox'}-{short}"
        fields: dict[str, Any] = {"dtype": dtype, "interleaved": interleaved, "head_size": 32}
        whole = fields | {"rotary_dim": 32, "num_heads": 6}
        yield UpdateCase(id=f"rotated-{name}", **whole)
        yield UpdateCase(id=f"rotated-all-padding-{name}", num_padding=9, **whole)
        yield UpdateCase(id=f"rotated-keys-alone-{name}", rotary_dim=32, **fields)
        yield UpdateCase(id=f"rotated-part-{name}", rotary_dim=16, num_heads=2, **fields)
        yield UpdateCase(
            id=f"rotated-large-{name}",
            num_tokens=150,
            num_kv_heads=5,
            rotary_dim=64,
            num_heads=15,
            **fields | {"head_size": 128},
        )
        yield UpdateCase(id=f"rotated-table-{name}", table_dtype=dtype, **whole)
        yield UpdateCase(
            id=f"rotated-int64-{name}", position_dtype="int64", slot_dtype="int64", **whole
        )
        for cache_dtype in QUANTIZED:
            yield UpdateCase(
                id=f"rotated-{cache_dtype}-{name}",
                cache_dtype=cache_dtype,
                scales="per position" if interleaved else "per head",
                **whole,
            )
        yield UpdateCase(id=f"rotated-two-arrays-{name}", kv_layout="nbhd", **whole)
    for rotary_dim, interleaved in product((2, 6, 16), (False, True)):
        yield UpdateCase(
            id=f"rotated-{rotary_dim}-of-17-{interleaved}",
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            num_heads=2,
        )
    for rotary_dim, interleaved in product((2, 6, 16), (False, True)):
        yield UpdateCase(
            id=f"rotated-{rotary_dim}-of-18-{interleaved}-int4",
            head_size=18,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            num_heads=2,
            cache_dtype="int4" if interleaved else "int8",
            value_cache_dtype="int8" if interleaved else "int4",
            kv_layout="nbhd",
            scales="one",
        )
        yield UpdateCase(
            id=f"rotated-{rotary_dim}-of-18-{interleaved}-int4-keys",
            head_size=18,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            cache_dtype="int4",
            scales="one",
        )
    yield UpdateCase(id="rotated-12-of-32", head_size=32, rotary_dim=12, num_heads=2)
    yield UpdateCase(id="rotated-no-tokens", num_tokens=0, num_padding=0, rotary_dim=8, num_heads=4)
    yield UpdateCase(id="rotated-one-kv-head", num_kv_heads=1, rotary_dim=8, num_heads=5)


def _normalized() -> Iterator[UpdateCase]:
    both = ("norm_offset", "norm_round_first")
    for (dtype, short), norm in product(SHORT_NAMES.items(), NORMS[1:]):
        name = f"{norm}-{short}"
        fields: dict[str, Any] = {"dtype": dtype, "norm": norm, "head_size": 64}
        rotated = fields | {"rotary_dim": 32, "num_heads": 6}
        yield UpdateCase(id=f"normalized-{name}", num_heads=4, v_norm=True, **fields)
        yield UpdateCase(id=f"normalized-keys-alone-{name}", norm_options=both, **fields)
        yield UpdateCase(id=f"normalized-rotated-{name}", norm_options=both[1:], **rotated)
        yield UpdateCase(id=f"normalized-weights-{name}", norm_dtype=dtype, **rotated)
        yield UpdateCase(
            id=f"normalized-int64-{name}",
            position_dtype="int64",
            slot_dtype="int64",
            interleaved=True,
            norm_options=both[:1],
            **rotated,
        )
        yield UpdateCase(id=f"normalized-all-padding-{name}", num_padding=9, **rotated)
        yield UpdateCase(
            id=f"normalized-large-{name}",
            num_tokens=40,
            num_kv_heads=9,
            num_heads=27,
            v_norm=True,
            norm_options=both[1:],
            **fields | {"head_size": 128},
        )
        for cache_dtype in QUANTIZED:
            yield UpdateCase(
                id=f"normalized-{cache_dtype}-{name}",
                cache_dtype=cache_dtype,
                scales="per head" if norm == "per head" else "per position",
                v_norm=True,
                **rotated,
            )
            yield UpdateCase(
                id=f"normalized-{cache_dtype}-made-scales-{name}",
                cache_dtype=cache_dtype,
                made_scales=("k_scale", "v_scale"),
                v_norm=norm == "per head",
                **rotated,
            )
    for (dtype, short), interleaved in product(SHORT_NAMES.items(), (False, True)):
        fields = {"dtype": dtype, "interleaved": interleaved, "norm_options": ("norm_after_rope",)}
        fields |= {"norm": "per head", "num_heads": 4}
        name = f"{interleaved}-{short}"
        yield UpdateCase(id=f"normalized-after-{name}", head_size=64, rotary_dim=64, **fields)
        yield UpdateCase(id=f"normalized-after-part-{name}", rotary_dim=6, **fields)
        yield UpdateCase(
            id=f"normalized-after-int4-{name}",
            head_size=18,
            rotary_dim=12,
            cache_dtype="int4",
            scales="one",
            **fields,
        )
    for head_size in (1, 7, 8, 17, 40, 80, 100, 512, 520):
        for norm in NORMS[1:]:
            yield UpdateCase(
                id=f"normalized-{head_size}-{norm}",
                norm=norm,
                head_size=head_size,
                num_heads=8,
                num_tokens=3,
                num_padding=1,
                v_norm=True,
            )
    yield UpdateCase(
        id="normalized-long-sums",
        norm="all heads",
        head_size=256,
        num_heads=36,
        num_kv_heads=36,
        num_tokens=2,
        num_padding=0,
    )
    for layout, cache_dtype in product(SEPARATE_LAYOUTS, (None, "int8")):
        yield UpdateCase(
            id=f"normalized-own-value-head-size-{layout}-{cache_dtype}",
            head_size=18,
            own_value_head_size=6,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            value_cache_dtype="int4" if cache_dtype else None,
            scales="per position" if cache_dtype else None,
            v_norm=True,
            norm="per head",
            dtype="bfloat16",
        )
    yield UpdateCase(id="normalized-values-alone", v_norm=True)
    yield UpdateCase(
        id="normalized-no-tokens", num_tokens=0, num_padding=0, norm="per head", num_heads=4
    )


def _transformed() -> Iterator[UpdateCase]:
    made = ("k_scale", "v_scale")
    for dtype, short in SHORT_NAMES.items():
        fields: dict[str, Any] = {"dtype": dtype, "head_size": 64, "hadamard": "kv"}
        queries = fields | {"num_heads": 6}
        all_changes = queries | {"rotary_dim": 32, "norm": "per head", "v_norm": True}
        yield UpdateCase(id=f"hadamard-{short}", **queries)
        yield UpdateCase(id=f"hadamard-keys-{short}", **queries | {"hadamard": "k"})
        yield UpdateCase(id=f"hadamard-values-{short}", **fields | {"hadamard": "v"})
        yield UpdateCase(id=f"hadamard-signs-{short}", has_signs=True, **queries)
        yield UpdateCase(id=f"hadamard-rotated-{short}", rotary_dim=64, **queries)
        yield UpdateCase(id=f"hadamard-after-all-{short}", **all_changes)
        yield UpdateCase(
            id=f"hadamard-after-norm-{short}", norm_options=("norm_after_rope",), **all_changes
        )
        for cache_dtype in QUANTIZED:
            yield UpdateCase(
                id=f"hadamard-{cache_dtype}-{short}",
                cache_dtype=cache_dtype,
                scales="per position",
                has_signs=True,
                **all_changes | {"interleaved": True},
            )
            yield UpdateCase(
                id=f"hadamard-{cache_dtype}-made-scales-{short}",
                cache_dtype=cache_dtype,
                made_scales=made,
                **queries,
            )
        yield UpdateCase(
            id=f"hadamard-large-{short}",
            num_tokens=150,
            num_kv_heads=5,
            num_heads=15,
            cache_dtype="int4",
            made_scales=made,
            **fields | {"head_size": 128},
        )
    for head_size in (1, 2, 4, 6, 8, 17, 24, 32, 80, 96, 192, 256, 512, 576):
        yield UpdateCase(
            id=f"hadamard-{head_size}",
            head_size=head_size,
            num_heads=2,
            num_tokens=3,
            num_padding=1,
            hadamard="kv",
            has_signs=True,
        )
    for layout, signs, cache_dtype in product(SEPARATE_LAYOUTS, (False, True), (None, "int8")):
        yield UpdateCase(
            id=f"hadamard-own-value-head-size-{layout}-{signs}-{cache_dtype}",
            head_size=24,
            own_value_head_size=6,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            value_cache_dtype="int4" if cache_dtype else None,
            made_scales=made if cache_dtype else (),
            hadamard="k" if signs else "kv",
            has_signs=signs,
            dtype="bfloat16",
        )
    yield UpdateCase(id="hadamard-together", norm="all heads", num_heads=4, hadamard="kv")
    yield UpdateCase(
        id="hadamard-no-tokens", num_tokens=0, num_padding=0, num_heads=4, hadamard="k"
    )


def _groups() -> Iterator[UpdateCase]:
    """Scales of groups, given and made, and codes of e2m1."""
    both = ("k_scale", "v_scale")
    formats: dict[str, dict[str, Any]] = {
        "nvfp4": NVFP4,
        "mxfp4": {"cache_dtype": "e2m1", "groups": Groups(32, "float8_e8m0fnu")},
        "int4-g32": {"cache_dtype": "int4", "groups": Groups(32, "float16")},
    }
    for (name, fields), (dtype, short) in product(formats.items(), SHORT_NAMES.items()):
        common: dict[str, Any] = {"head_size": 64, "dtype": dtype} | fields
        for size, factor in {"": 1.0, "-too-large": 100.0, "-subnormal": 2.0**-12}.items():
            yield UpdateCase(id=f"{name}-{short}{size}", key_factor=factor, **common)
        yield UpdateCase(id=f"{name}-zero-{short}", zero_scales=True, num_padding=0, **common)
        made: dict[str, Any] = {"made_scales": both, "num_padding": 0} | common
        yield UpdateCase(id=f"{name}-made-{short}", **made)
        yield UpdateCase(
            id=f"{name}-made-{short}-large", **made | {"num_tokens": 150, "head_size": 128}
        )
    for scale_dtype, cache_dtype in product(SCALE_DTYPES, (*QUANTIZED, "e2m1")):
        for round_up in (False, True)[: 1 + (scale_dtype == "float8_e8m0fnu")]:
            yield UpdateCase(
                id=f"{cache_dtype}-made-groups-of-{scale_dtype}-{round_up}",
                cache_dtype=cache_dtype,
                groups=Groups(6, scale_dtype, has_globals=cache_dtype == "int8"),
                made_scales=both,
                round_scales_up=round_up,
                num_tokens=40,
                num_padding=3,
                head_size=24,
                rotary_dim=8,
            )
    for dtype, short in SHORT_NAMES.items():
        for scales in (None, "one", "per position"):
            yield UpdateCase(
                id=f"e2m1-{scales}-{short}",
                cache_dtype="e2m1",
                scales=scales,
                dtype=dtype,
                head_size=18,
                num_tokens=60,
            )
    yield UpdateCase(id="e2m1-made-scales", cache_dtype="e2m1", made_scales=both, head_size=18)
    for layout in SEPARATE_LAYOUTS:
        yield UpdateCase(
            id=f"int8-nvfp4-made-{layout}",
            head_size=64,
            own_value_head_size=32,
            kv_layout=layout,
            cache_dtype="int8",
            value_cache_dtype="e2m1",
            groups=Groups(16, "float8_e4m3fn", has_globals=True, of=("v_scale",)),
            made_scales=both,
            dtype="bfloat16",
        )
    for layout in LATENT_LAYOUTS:
        yield UpdateCase(
            id=f"latent-{layout}-nvfp4-made",
            head_size=48,
            is_latent=True,
            num_kv_heads=2 if "h" in layout else 1,
            kv_layout=layout,
            made_scales=both[:1],
            **formats["nvfp4"],
        )
    features: dict[str, dict[str, Any]] = {
        "normalized": {"norm": "per head", "v_norm": True, "rotary_dim": 32},
        "transformed": {"hadamard": "kv", "has_signs": True, "rotary_dim": 8, "interleaved": True},
    }
    for (feature, fields), name in product(features.items(), formats):
        yield UpdateCase(
            id=f"{name}-made-{feature}",
            head_size=96,
            num_heads=4,
            made_scales=both,
            **formats[name] | fields,
        )
    yield UpdateCase(
        id="nvfp4-made-2nbhd", kv_layout="2nbhd", head_size=32, made_scales=both, **formats["nvfp4"]
    )


CASES = [*_updates(), *_normalized(), *_transformed(), *_groups()]
