"""The sizes of the CUDA scratch of ``varlen_attention`` and of its derivative, as
``csrc/varlen_attention`` computes them; the handlers compare the two."""

from __future__ import annotations

from shared_ffi import paged_attention
from shared_ffi.spec import Call, Smaller


def forward_bytes(call: Call, smaller: Smaller = min) -> int:
    """Lengths, then the scratch of ``paged_attention``. Its longest sequence is the block of
    positions that ``MakeTable`` of ``handler.cc`` makes."""
    num_tokens, num_heads, value_head_size = call.results[0].shape
    num_kv_heads = dict(call.attributes).get("row_kv_heads", call.operands[1].shape[1])
    max_seqs = call.operands[3].shape[0] - 1
    longest = num_tokens // 2 * 2 + 1
    paged = paged_attention.scratch_bytes(
        num_tokens,
        num_heads,
        int(num_kv_heads),
        value_head_size,
        max_seqs,
        longest,
        dict(call.attributes),
        smaller,
    )
    return _lengths_bytes(max_seqs) + paged


def backward_bytes(call: Call, smaller: Smaller = min) -> int:
    """Lengths, then two numbers for each row, and one more where there are slopes."""
    num_tokens, num_heads, _ = call.results[0].shape
    max_seqs = call.operands[6].shape[0] - 1
    numbers = 3 if "alibi_slopes" in call.names else 2
    return _lengths_bytes(max_seqs) + 4 * numbers * num_tokens * num_heads


def _lengths_bytes(max_seqs: int) -> int:
    return 16 * (max_seqs + 1)
