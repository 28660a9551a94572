"""The check of ``kv_cache_update``. ``csrc/kv_cache_update/params.h`` says what the op means."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi import _native, token_rows
from shared_ffi import kv_layout as _kv_layout
from shared_ffi.spec import (
    CACHE_DTYPES,
    NO_OVERLAP,
    STORAGE_DTYPES,
    ArraySpec,
    Call,
    Operands,
    dtype_error,
    has_shape,
    on_host,
    records_arguments,
    shape_error,
    value_error,
)

OP = "kv_cache_update"
TARGET = "xla_gpu_kv_cache_update"


@records_arguments
def check(
    kv_cache: ArraySpec,
    key: ArraySpec,
    value: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    value_cache: ArraySpec | None = None,
    kv_layout: str | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
) -> Call:
    """Returns the in-place call, or raises ValueError (shape) or TypeError (dtype)."""
    if len(key.shape) != 3:
        raise shape_error(OP, "key", "[num_tokens, num_kv_heads, head_size]", key.shape)
    num_tokens, num_kv_heads, head_size = key.shape
    is_copied = key.dtype == kv_cache.dtype
    if key.dtype not in STORAGE_DTYPES and not (is_copied and key.dtype in CACHE_DTYPES):
        rule = "dtype float32, float16 or bfloat16, or one of 8 bits that kv_cache has, too"
        raise dtype_error(OP, "key", rule, key.dtype)
    columns = value.shape[-1] if value.shape else 0
    is_latent = columns == 0 and head_size != 0
    has_own_columns = is_latent or value_cache is not None
    if not has_shape(value, (num_tokens, num_kv_heads, columns if has_own_columns else head_size)):
        last = f"head_size={head_size}" if value_cache is None else "value_head_size"
        rule = f"[num_tokens={num_tokens}, num_kv_heads={num_kv_heads}, {last}]"
        raise shape_error(OP, "value", rule, value.shape)
    if value.dtype != key.dtype:
        raise dtype_error(OP, "value", f"key's dtype {key.dtype}", value.dtype)
    if is_latent:
        _kv_layout.check_latent(OP, value_cache, v_scale)
    cache, layout, caches = _kv_layout.check(
        OP,
        kv_layout,
        kv_cache,
        value_cache,
        head_size,
        num_kv_heads,
        value_head_size=columns,
        is_latent=is_latent,
    )
    _kv_layout.check_dtypes(OP, kv_cache, value_cache, "key", key.dtype)
    for argument, array in (("kv_cache", kv_cache), ("value_cache", value_cache)):
        if array is not None and _repeats(array):
            got = f"strides {list(array.strides or ())}"
            raise value_error(OP, argument, NO_OVERLAP, got)
    operands = Operands(
        [caches[0], token_rows.as_operand(key), token_rows.as_operand(value), slot_mapping],
        [cache.head_dim, 1, 1, None],
        [*layout, *token_rows.attributes(key, value)],
    )
    _kv_layout.add_features(
        OP,
        operands,
        cache,
        caches,
        k_scale,
        v_scale,
        is_quantized=not is_copied,
        reference_argument="key",
    )
    if not has_shape(slot_mapping, (num_tokens,)):
        raise shape_error(OP, "slot_mapping", f"[num_tokens={num_tokens}]", slot_mapping.shape)
    if slot_mapping.dtype not in ("int32", "int64"):
        raise dtype_error(OP, "slot_mapping", "dtype int32 or int64", slot_mapping.dtype)
    is_strided = bool(key.strides or value.strides)
    return Call(
        OP,
        TARGET,
        operands=tuple(operands.specs),
        results=tuple(caches),
        attributes=tuple(operands.attributes),
        aliases=((0, 0), (4, 1))[: len(caches)],
        num_shared_heads=0 if cache.head_dim is None or is_strided else num_kv_heads,
        head_dims=(*operands.head_dims, *[cache.head_dim] * len(caches)),
    )


def _repeats(array: ArraySpec) -> bool:
    """Whether a dimension repeats the same elements, as ``torch.Tensor.expand`` makes it."""
    pairs = zip(array.shape, array.strides or (), strict=False)
    return any(stride == 0 and size != 1 for size, stride in pairs)


def check_values(kv_cache: Any, slot_mapping: Any, *, kv_layout: str | None = None) -> None:
    """Checks that no slot lies past the end of the cache.

    The CPU handler calls the same native function. The CUDA handler reports nothing and does not
    write such a slot.

    Raises:
        ValueError: the CPU handler's message, which names the token.
    """
    num_blocks, block_size = _kv_layout.num_blocks_and_size(OP, kv_layout, kv_cache.shape)
    slots = np.ascontiguousarray(on_host(slot_mapping), np.int64)
    if fault := _native.slot_fault(slots, num_blocks=num_blocks, block_size=block_size):
        raise ValueError(f"{OP}: {fault}")
