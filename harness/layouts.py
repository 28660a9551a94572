"""Converts a paged cache from the default layout to others and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.arrays import unpacked

SEPARATE_LAYOUTS = ("nbhd", "nhbd", "hnbd")  # K and V in two arrays
LAYOUTS = (
    *("2nbhd", "n2bhd", "n2hbd", "nbh(2d)", "nhb(2d)", "nb(2h)d", "2hnbd"),
    *SEPARATE_LAYOUTS,
)
LATENT_LAYOUTS = ("nbd", "bnd", "nbhd", "hnbd")  # of K alone, where V is a part of K


def arrange(
    kv_cache: np.ndarray,
    kv_layout: str | None,
    *,
    is_latent: bool = False,
    value_head_size: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Converts a cache in the default layout: returns one array, or K and V, of which V has its
    first `value_head_size` columns. Where V is a part of K, returns K."""
    if is_latent:
        keys = kv_cache[:, :, 0::2]  # nbhd
        kv_layout = kv_layout or "nbd"
        if "h" not in kv_layout:
            keys = keys[:, :, 0]
        order = [("nbhd" if "h" in kv_layout else "nbd").index(letter) for letter in kv_layout]
        return (np.ascontiguousarray(keys.transpose(order)),)
    if kv_layout is None:
        return (kv_cache,)
    blocks, positions, rows, head_size = kv_cache.shape
    split = kv_cache.reshape(blocks, positions, rows // 2, 2, head_size)
    letters = kv_layout.replace("(", "").replace(")", "")
    values = split[:, :, :, 1:, :value_head_size]
    caches = [split] if "2" in letters else [split[:, :, :, :1], values]
    order = ["nbh2d".index(letter) for letter in (letters if "2" in letters else f"2{letters}")]
    arranged = [np.ascontiguousarray(cache.transpose(order)) for cache in caches]
    if "2" not in letters:
        return tuple(cache[0] for cache in arranged)
    joined = letters.index(kv_layout.partition("(")[2][:1]) if "(" in kv_layout else None
    if joined is None:
        return tuple(arranged)
    shape = list(arranged[0].shape)
    shape[joined : joined + 2] = [shape[joined] * shape[joined + 1]]
    return (arranged[0].reshape(shape),)


def default(
    caches: Any, kv_layout: str | None, *, is_latent: bool = False, codes: str | None = None
) -> np.ndarray:
    """The inverse of arrange. It arranges the indices of the default layout and inverts the
    permutation. Where V is a part of K, a row of V is a copy of that of K. Columns that V lacks are
    zero. Arrays of 4 bits, of these `codes`, are unpacked."""
    caches = [unpacked(cache, codes) for cache in caches]
    if kv_layout is None and not is_latent:
        return np.array(caches[0])
    shape = default_shape(caches, kv_layout, is_latent=is_latent)
    indices = arrange(
        np.arange(np.prod(shape)).reshape(shape),
        kv_layout,
        is_latent=is_latent,
        value_head_size=caches[-1].shape[-1],
    )
    dtype = caches[0].dtype if codes is None else np.float32
    found = np.zeros(np.prod(shape, dtype=int), dtype)
    for cache, index in zip(caches, indices, strict=True):
        found[index] = cache
    found = found.reshape(shape)
    if is_latent:
        found[:, :, 1::2] = found[:, :, 0::2]
    return found


def default_shape(
    caches: Any, kv_layout: str | None, *, is_latent: bool = False
) -> tuple[int, ...]:
    """The shape of a cache in the default layout."""
    if is_latent:
        layout = kv_layout or "nbd"
        sizes = {"h": 1, **dict(zip(layout, caches[0].shape, strict=True))}
        return (sizes["n"], sizes["b"], 2 * sizes["h"], sizes["d"])
    if kv_layout is None:
        return tuple(caches[0].shape)
    heads, width = caches[0].shape[_dimension(kv_layout, "h")], caches[0].shape[-1]
    heads //= 1 + ("(h2)" in kv_layout or "(2h)" in kv_layout)
    width //= 1 + ("(2d)" in kv_layout)
    blocks, positions = (caches[0].shape[_dimension(kv_layout, x)] for x in "nb")
    return (blocks, positions, 2 * heads, width)


def _dimension(kv_layout: str, letter: str) -> int:
    for joined in ("(h2)", "(2h)", "(2d)"):
        kv_layout = kv_layout.replace(joined, joined.strip("(2)"))
    return kv_layout.index(letter)
