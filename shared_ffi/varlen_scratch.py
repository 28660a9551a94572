"""The sizes of the CUDA scratch of ``varlen_attention`` and of its derivative, as
``csrc/varlen_attention`` computes them; the handlers compare the two."""

from __future__ import annotations

from shared_ffi import paged_attention
from shared_ffi.spec import NUMBERS, ArraySpec, Call, Extremes


def forward_bytes(call: Call, extremes: Extremes = NUMBERS) -> int:
    """Lengths, K and V if these are copied, block tables where sequences continue others, then the
    scratch of ``paged_attention``. Its longest sequence is the block of positions that
    ``MakeTable`` of ``handler.cc`` makes, or all tokens."""
    attributes = dict(call.attributes)
    num_tokens, num_heads, value_head_size = call.results[0].shape
    _, key, value, query_start_loc, *_ = call.operands
    if len(key.shape) == 3:
        num_kv_heads = key.shape[1]
    elif len(value.shape) == 3:
        num_kv_heads = value.shape[1]
    else:
        num_kv_heads = int(attributes.get("row_kv_heads", attributes["row_heads"]))
    max_seqs = query_start_loc.shape[0] - 1
    has_prefixes = "prefix_seqs" in call.names
    paged = paged_attention.scratch_bytes(
        num_tokens,
        num_heads,
        num_kv_heads,
        value_head_size,
        max_seqs,
        num_tokens if has_prefixes else num_tokens // 2 * 2 + 1,
        attributes,
        extremes,
    )
    copied = 0
    if len(key.shape) == 2 or len(value.shape) == 2:
        is_key = len(key.shape) == 3
        head_size = key.shape[2] if is_key else int(attributes["row_head_size"])
        columns = [num_kv_heads * size for size in (head_size, value_head_size)]
        strides = [_stride(rows) for rows in (key, value)]
        if num_kv_heads > 1 and strides[0] * value_head_size != strides[1] * head_size:
            itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}[key.dtype]
            copied = -(-num_tokens * sum(columns) * itemsize // 16) * 16
    tables = -(-max_seqs * num_tokens // 4) * 16 if has_prefixes else 0
    return _lengths_bytes(call, max_seqs) + copied + tables + paged


def backward_bytes(call: Call, extremes: Extremes = NUMBERS) -> int:
    """Lengths, then two numbers for each row, and one more where there are slopes."""
    num_tokens, num_heads, _ = call.results[0].shape
    max_seqs = call.operands[6].shape[0] - 1
    numbers = 3 if "alibi_slopes" in call.names else 2
    return _lengths_bytes(call, max_seqs) + 4 * numbers * num_tokens * num_heads


def _lengths_bytes(call: Call, max_seqs: int) -> int:
    of_prefixes = -(-3 * max_seqs // 4) * 16 if "prefix_seqs" in call.names else 0
    return 16 * (max_seqs + 1) + of_prefixes


def _stride(rows: ArraySpec) -> int:
    """The elements from one token to the next."""
    return rows.shape[1] if len(rows.shape) == 2 else rows.shape[1] * rows.shape[2]
