"""The check of the norms that ``kv_cache_update`` applies to queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shared_ffi.spec import (
    STORAGE_DTYPES,
    ArraySpec,
    Operands,
    Scalar,
    dtype_error,
    flag,
    float_attribute,
    has_shape,
    shape_error,
    value_error,
)

_ADDED = "It is what the model adds to weights: 1 in Gemma 3"


class Norms(NamedTuple):
    """The arguments about norms of a call, by their public names."""

    q_norm: ArraySpec | None
    k_norm: ArraySpec | None
    norm_eps: float | None
    norm_offset: int
    norm_after_rope: bool
    v_norm: bool
    norm_round_first: bool

    @property
    def weights(self) -> dict[str, ArraySpec]:
        """The weights that the call has."""
        given = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: array for name, array in given.items() if array is not None}

    @property
    def are_over_heads(self) -> bool:
        """Whether all heads of a token are normalized together, so that devices cannot share
        them."""
        return any(len(array.shape) == 2 for array in self.weights.values())


def add(
    op: str,
    operands: Operands,
    norms: Norms,
    key: ArraySpec,
    query: ArraySpec | None,
    *,
    is_rotated: bool,
    is_latent: bool,
) -> None:
    """Checks the norms and adds their weights and attributes to a call's.

    Raises:
        ValueError: a shape or number is wrong, or an argument is given that needs another one.
        TypeError: a dtype or type is wrong.
    """
    attributes = _attributes(op, norms, is_rotated=is_rotated)
    if not norms.weights and not norms.v_norm:
        return
    if is_latent:
        shapes = {name: f"shape {list(array.shape)}" for name, array in norms.weights.items()}
        name, got = next(iter(shapes.items()), ("v_norm", True))
        rule = (
            f"be {None if shapes else False} where V is a part of K, of which a part is normalized"
        )
        raise value_error(op, name, rule, got, "Normalize it before")
    if key.dtype not in STORAGE_DTYPES:
        raise dtype_error(op, "key", "dtype float32, float16 or bfloat16 with norms", key.dtype)
    if norms.q_norm is not None:
        if query is None:
            raise value_error(op, "query", "be given with q_norm", None, "Pass the queries, too")
        _check_weight(op, "q_norm", norms.q_norm, ("num_heads", query.shape[1]), key)
    if norms.k_norm is not None:
        _check_weight(op, "k_norm", norms.k_norm, ("num_kv_heads", key.shape[1]), key)
    for name, weight in norms.weights.items():
        operands.add_feature(name, weight, None)
    operands.attributes.extend(attributes.items())


def _check_weight(
    op: str, argument: str, weight: ArraySpec, heads: tuple[str, int], key: ArraySpec
) -> None:
    head_size = key.shape[2]
    if not has_shape(weight, (heads[1], head_size) if len(weight.shape) == 2 else (head_size,)):
        rule = f"[head_size={head_size}] or [{heads[0]}={heads[1]}, head_size]"
        remedy = "It is the weight of a head, or those of all heads, which are normalized together"
        raise shape_error(op, argument, rule, weight.shape, remedy)
    if weight.dtype not in ("float32", key.dtype):
        raise dtype_error(op, argument, f"dtype float32, or key's dtype {key.dtype}", weight.dtype)


def _attributes(op: str, norms: Norms, *, is_rotated: bool) -> Mapping[str, Scalar]:
    """The attributes of the norms, of which there may be none."""
    flags = {
        name: flag(op, name, getattr(norms, name))
        for name in ("norm_after_rope", "v_norm", "norm_round_first")
    }
    offset: Any = norms.norm_offset
    if isinstance(offset, bool) or not isinstance(offset, int | float | np.integer | np.floating):
        raise dtype_error(op, "norm_offset", "type int", type(offset).__name__)
    if offset not in (0, 1):
        raise value_error(op, "norm_offset", "be 0 or 1", offset, _ADDED)
    of_weights = {x: flags[x] for x in ("norm_after_rope", "norm_round_first") if flags[x]}
    of_weights |= {"norm_offset": offset} if offset else {}
    for name, given in of_weights.items():
        if not norms.weights:
            must = "0" if name == "norm_offset" else "False"
            remedy = f"Leave {name} out"
            raise value_error(op, name, f"be {must} without q_norm and k_norm", given, remedy)
    if flags["norm_after_rope"]:
        for rule, is_broken in (
            ("be False without cos_sin_cache", not is_rotated),
            ("be False with weights for all heads, [heads, head_size]", norms.are_over_heads),
        ):
            if is_broken:
                raise value_error(op, "norm_after_rope", rule, True, "Leave norm_after_rope out")
    has_norm = bool(norms.weights) or flags["v_norm"]
    if norms.norm_eps is None:
        if has_norm:
            names = "q_norm, k_norm and v_norm"
            remedy = "It is in the model's configuration, mostly 1e-6"
            raise value_error(op, "norm_eps", f"be given with {names}", None, remedy)
        return {}
    eps = float_attribute(op, "norm_eps", norms.norm_eps)
    if not has_norm:
        rule = "be None without q_norm, k_norm and v_norm"
        raise value_error(op, "norm_eps", rule, eps, "Leave norm_eps out")
    if not (np.isfinite(eps) and eps >= 0):
        rule = "be finite in float32, and at least 0"
        raise value_error(op, "norm_eps", rule, norms.norm_eps, "It is mostly 1e-6")
    ones = [name for name, given in flags.items() if given] + (["norm_offset"] if offset else [])
    return {"norm_eps": eps} | {name: np.int64(1) for name in ones}
