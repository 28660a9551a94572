"""``torch.ops.xla_gpu.kv_cache_update``, and its function with types and a docstring."""

from __future__ import annotations

from typing import Any

import torch

from shared_ffi import kv_cache_update as op
from torch_frontend.operator.arguments import checked, scale_tensor
from torch_frontend.operator.define import define

_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_SCHEMA = (
    "(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slot_mapping, *, "
    f"Tensor(b!)? value_cache=None, str? kv_layout=None, {_SCALES}, "
    "Tensor(c!)? query=None, Tensor? positions=None, Tensor? cos_sin_cache=None, "
    "bool interleaved=False) -> ()"
)
_MADE = "Tensor(d!)? k_scale_cache=None, Tensor(e!)? v_scale_cache=None"
_NORMS = (
    "Tensor? q_norm=None, Tensor? k_norm=None, float? norm_eps=None, int norm_offset=0, "
    "bool norm_after_rope=False, bool v_norm=False, bool norm_round_first=False, "
    "str? hadamard=None, Tensor? hadamard_signs=None"
)
_GLOBALS = "Tensor? k_global=None, Tensor? v_global=None"
_GROUPS = "str? codes=None, bool round_scales_up=False"
_STRIDED = ("kv_cache", "value_cache", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
_ROWS = ("key", "value", "query")

DEFAULT = define(f"kv_cache_update{_SCHEMA}", op.check, strided=_STRIDED, rows=_ROWS)
_SCHEMA_WITH_SCALES = _SCHEMA.replace(_SCALES, f"{_SCALES}, {_MADE}")
WITH_SCALES = define(
    f"kv_cache_update.with_scales{_SCHEMA_WITH_SCALES}", op.check, strided=_STRIDED, rows=_ROWS
)
"""Makes scales. It is an overload because PyTorch takes time for each argument of a call, also for
those that are not given: 0.1 us for these two."""
_SCHEMA_OF_ALL = _SCHEMA_WITH_SCALES.replace(_MADE, f"{_GLOBALS}, {_MADE}")
FULL = define(
    f"kv_cache_update.full{_SCHEMA_OF_ALL.replace(') -> ', f', {_NORMS}, {_GROUPS}) -> ')}",
    op.check,
    strided=_STRIDED,
    rows=_ROWS,
)
"""Takes all arguments. It is an overload for the same reason."""
_DEFAULT, _WITH_SCALES, _FULL = (
    checked(op.OP, overload) for overload in (DEFAULT, WITH_SCALES, FULL)
)


def kv_cache_update(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    value_cache: torch.Tensor | None = None,
    kv_layout: str | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_offset: int = 0,
    norm_after_rope: bool = False,
    v_norm: bool = False,
    norm_round_first: bool = False,
    hadamard: str | None = None,
    hadamard_signs: torch.Tensor | None = None,
    codes: str | None = None,
    k_global: torch.Tensor | float | None = None,
    v_global: torch.Tensor | float | None = None,
    round_scales_up: bool = False,
) -> None:
    """Writes the keys and values of new tokens into their slots of a paged cache, in place.

    With ``positions`` and ``cos_sin_cache`` it rotates the keys before, and ``query`` in place.
    With ``k_norm``, ``q_norm`` and ``v_norm`` it normalizes keys, ``query`` in place, and values.
    With ``hadamard`` it spreads the largest numbers of a head over all of them.
    With ``k_scale_cache`` and ``v_scale_cache`` it makes the scales of a cache of 8 or 4 bits.

    ``torch.ops.xla_gpu.kv_cache_update`` is the operator itself, with the overloads ``default``,
    ``with_scales``, which makes scales, and ``full``, which takes all arguments. The optional
    arguments mean what they mean in ``jax_frontend.kv_cache_update``, which defines the op.

    Args:
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``; the K of kv head h at
            index 2h, its V at 2h + 1. uint8 holds two numbers of 4 bits in an element. May be a
            strided view.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``kv_cache``; for a cache of 8 or 4
            bits also float32, float16 or bfloat16, to be divided by ``k_scale`` and rounded. May be
            a slice of a fused projection.
        value: as ``key``, but with the head size of ``value_cache`` if there is one;
            ``key[..., :0]`` where V is a part of K.
        slot_mapping: ``[num_tokens]``, int32 or int64: token t goes to slot
            ``block * block_size + offset``. A negative slot is padding and writes nothing.
        value_cache: the cache of V, if K and V are two tensors. One may be int8, the other of 4
            bits.
        kv_layout: which dimension is which, such as ``"n2bhd"``.
        k_scale: what the keys are divided by, float32, or a number. A cache of int8 or uint8 needs
            it or ``k_scale_cache``, unless ``key`` has its dtype: 1.0 rounds to whole numbers.
        v_scale: the same for the values.
        k_scale_cache: ``[num_blocks, block_size, num_kv_heads]``, float32: the call makes the scale
            of each key from its largest magnitude, and writes it here, in place. May be a strided
            view, such as the last bytes of the cache's rows. Give it to ``paged_attention`` as
            ``k_scale``. ``k_scale`` is None then. With a dimension of groups it has a scale for
            each, in one of five dtypes.
        v_scale_cache: the same for the values.
        query: ``[num_tokens, num_heads, head_size]``, dtype of ``key``: the queries to be rotated,
            normalized or transformed. May be a slice of a fused projection. It shares no element
            with another argument.
        positions: ``[num_tokens]``, int32 or int64: the row of ``cos_sin_cache`` for each token.
        cos_sin_cache: ``[max_positions, rotary_dim]``, float32 or dtype of ``key``: cosines, then
            as many sines. None: nothing is rotated.
        interleaved: False: numbers i and i + rotary_dim / 2 of a head are a pair. True: 2i and
            2i + 1.
        q_norm: ``[head_size]``, float32 or dtype of ``key``: the weights of the RMS norm of each
            head of the query; ``[num_heads, head_size]``: all heads are normalized together. Ones
            where a norm has no weights. None: the query has no norm.
        k_norm: the same for keys, ``[head_size]`` or ``[num_kv_heads, head_size]``.
        norm_eps: what a norm adds to the mean of squares. Given with norms, and only then.
        norm_offset: 1 where a norm multiplies by 1 + weights, or 0.
        norm_after_rope: whether heads are rotated before they are normalized.
        v_norm: whether values are normalized, each head alone and without weights.
        norm_round_first: whether a head is rounded to its dtype before the multiplication with
            weights, too.
        hadamard: ``"kv"``, ``"k"`` or ``"v"``: keys, values or both are multiplied by an
            orthonormal Walsh-Hadamard matrix, in float32, after norm and rotation, and ``query``
            with the keys, in place. That of the values is undone by ``torch_frontend.hadamard`` of
            the output, or in the weights of the next projection. None: nothing is.
        hadamard_signs: ``[head_size]``, float32, each 1 or -1: what the numbers of a head are
            multiplied by before. None: 1.
        codes: "e2m1" says that uint8 holds floats of 4 bits, as float4_e2m1fn_x2 does without it.
        k_global: a float32 factor of all scales of groups of the keys, or a number.
        v_global: the same for the values.
        round_scales_up: whether made scales of float8_e8m0fnu are rounded up.

    Raises:
        ValueError: a shape is wrong, an argument is given that needs another one, tensors are on
            several devices, a tensor that is written shares elements with itself or another
            argument, or, on CPU tensors, a slot is past the end or a token's position has no row.
            On XLA tensors the last is a RuntimeError when the graph runs. On CUDA such a token's
            key and value are not written, and if its position has no row its query is NaN.
        TypeError: a dtype or type is wrong.
        RuntimeError: a cache or the query is an inference tensor, outside of inference mode.
        NotImplementedError: a tensor requires grad: the op has no derivative.
    """
    k_scale, v_scale, k_global, v_global = (
        scale_tensor(x, kv_cache) for x in (k_scale, v_scale, k_global, v_global)
    )
    operator = _DEFAULT
    others: dict[str, Any] = {}
    if k_scale_cache is not None or v_scale_cache is not None:
        others = {"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
        operator = _WITH_SCALES
    has_weights = q_norm is not None or k_norm is not None or norm_eps is not None
    has_flags = v_norm is not False or norm_after_rope is not False or norm_round_first is not False
    has_hadamard = hadamard is not None or hadamard_signs is not None
    if has_weights or has_flags or norm_offset != 0 or has_hadamard:
        others |= {
            "q_norm": q_norm,
            "k_norm": k_norm,
            "norm_eps": norm_eps,
            "norm_offset": norm_offset,
            "norm_after_rope": norm_after_rope,
            "v_norm": v_norm,
            "norm_round_first": norm_round_first,
            "hadamard": hadamard,
            "hadamard_signs": hadamard_signs,
        }
        operator = _FULL
    has_globals = k_global is not None or v_global is not None
    if codes is not None or has_globals or round_scales_up is not False:
        others |= {
            "codes": codes,
            "k_global": k_global,
            "v_global": v_global,
            "round_scales_up": round_scales_up,
        }
        operator = _FULL
    operator(
        *(kv_cache, key, value, slot_mapping),
        value_cache=value_cache,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        query=query,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        interleaved=interleaved,
        **others,
    )
