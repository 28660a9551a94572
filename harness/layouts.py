"""Converts a paged cache from the default layout to others and back."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYOUTS = (
    *("2nbhd", "n2bhd", "n2hbd", "nbh(2d)", "nhb(2d)", "nb(2h)d", "2hnbd"),
    *("nbhd", "nhbd", "hnbd"),  # K and V in two arrays
)


def arrange(kv_cache: np.ndarray, kv_layout: str | None) -> tuple[np.ndarray, ...]:
    """Converts a cache in the default layout: returns one array, or K and V."""
    if kv_layout is None:
        return (kv_cache,)
    blocks, positions, rows, head_size = kv_cache.shape
    split = kv_cache.reshape(blocks, positions, rows // 2, 2, head_size)
    letters = kv_layout.replace("(", "").replace(")", "")
    caches = [split] if "2" in letters else [split[:, :, :, :1], split[:, :, :, 1:]]
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


def default(caches: Any, kv_layout: str | None) -> np.ndarray:
    """The inverse of arrange. It arranges the indices of the default layout and inverts the
    permutation."""
    if kv_layout is None:
        return np.array(caches[0])
    shape = default_shape(caches, kv_layout)
    places = arrange(np.arange(np.prod(shape)).reshape(shape), kv_layout)
    found = np.empty(np.prod(shape, dtype=int), caches[0].dtype)
    for cache, place in zip(caches, places, strict=True):
        found[place] = cache
    return found.reshape(shape)


def default_shape(caches: Any, kv_layout: str | None) -> tuple[int, ...]:
    """The shape of a cache in the default layout."""
    if kv_layout is None:
        return tuple(caches[0].shape)
    heads, width = caches[0].shape[_place(kv_layout, "h")], caches[0].shape[-1]
    heads //= 1 + ("(h2)" in kv_layout or "(2h)" in kv_layout)
    width //= 1 + ("(2d)" in kv_layout)
    blocks, positions = (caches[0].shape[_place(kv_layout, x)] for x in "nb")
    return (blocks, positions, 2 * heads, width)


def _place(kv_layout: str, letter: str) -> int:
    for joined in ("(h2)", "(2h)", "(2d)"):
        kv_layout = kv_layout.replace(joined, joined.strip("(2)"))
    return kv_layout.index(letter)
