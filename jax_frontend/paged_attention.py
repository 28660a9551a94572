"""``paged_attention`` for JAX."""

from __future__ import annotations

from typing import Literal, SupportsFloat, TypedDict, Unpack, overload

import jax

from jax_frontend import _call
from shared_ffi import paged_attention as op
from shared_ffi.spec import number


class _Options(TypedDict, total=False):
    """The keyword-only arguments that both overloads take."""

    value_cache: jax.Array | None
    kv_layout: str | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None
    alibi_slopes: jax.Array | None
    tree_mask: jax.Array | None
    bidirectional_ranges: jax.Array | None
    causal: bool | jax.Array
    window_right: int | None
    max_query_len: int | None
    value_head_size: int | None
    codes: str | None
    k_global: jax.Array | None
    v_global: jax.Array | None


@overload
def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: SupportsFloat,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: SupportsFloat,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: SupportsFloat | None = None,  # required: None is for a message that names it
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    bidirectional_ranges: jax.Array | None = None,
    causal: bool | jax.Array = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    return_lse: bool = False,
    codes: str | None = None,
    k_global: jax.Array | None = None,
    v_global: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed query tokens over a paged key/value cache.

    Prefill, chunked prefill, decode, and any mix of them in one call. The query tokens' own keys
    and values must be in the cache already (``kv_cache_update``). Under ``jax.vmap`` many calls
    become one, with a longer batch (docs/features/jax.md).

    Dimensions: ``num_tokens`` query tokens of all sequences, packed one sequence after the other,
    then padding; ``max_seqs`` places for sequences, the first ``num_seqs`` of them in use; a pool
    of ``num_blocks`` blocks with ``block_size`` positions each. ``num_heads`` is a multiple of
    ``num_kv_heads``: query head h reads kv head ``h // (num_heads // num_kv_heads)``.

    Sequence s has ``q_len = query_start_loc[s + 1] - query_start_loc[s]`` query tokens; its token i
    stands at position ``p = context_lens[s] - q_len + i`` and attends to the positions ``j <= p``,
    with a sliding window w only to ``j > p - w``. Where attention is not causal, it attends to the
    sequence's later positions, too, up to ``j <= p + window_right``.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, float16 or bfloat16; head_size from
            1 to 576.
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, dtype of ``query``, or
            float8_e4m3fn, float8_e5m2, int8 or uint8; the K of kv head h at index 2h, its V at
            2h + 1. Any block_size from 1. uint8 is a cache of 4 bits: its last dimension is
            ``head_size / 2``, and element i holds the numbers 2i, in its low 4 bits, and 2i + 1,
            in its high ones, both in two's complement, from -8 to 7. float4_e2m1fn, on CPUs, keeps
            ``head_size``: XLA packs it.
        context_lens: ``[max_seqs]`` int32: tokens of the sequence in the cache, the query tokens
            of this call included. From 0 to 2**31 - 1024. This array and the next three may have 64
            bits under ``jax_enable_x64``.
        block_tables: ``[max_seqs, max_blocks_per_seq]`` int32: the pool's block for each logical
            block of the sequence. Entries that no query attends to may hold anything.
        query_start_loc: ``[max_seqs + 1]`` int32, non-decreasing up to entry ``num_seqs``.
        num_seqs: ``[]`` or ``[1]`` int32, from 0 to max_seqs. Read when the op runs: changing it
            recompiles nothing. What the arrays above hold past it may be anything.
        scale: factor of ``q . k``, usually ``head_size ** -0.5``; at most 2**126 in magnitude. It
            may be a float array ``[]`` that is not traced, which the host waits for.
        sliding_window: how many positions a query attends to, itself included; at least 1. None:
            all of them.
        soft_cap: c > 0 turns a logit into ``c * tanh(logit / c)``, before the softmax; at least
            ``scale / 2**126`` in magnitude. None: off.
        value_cache: the array of V, if K and V are two arrays; ``kv_cache`` is then the array of K.
            Shape and dtype of ``kv_cache``; its head size may be smaller, and is then that of the
            output. One of the two may be int8 and the other of 4 bits.
        kv_layout: which dimension is which, if not as above: ``n`` num_blocks, ``b`` block_size,
            ``h`` num_kv_heads, ``2`` K then V, ``d`` head_size, in any order that ends with ``d``.
            Without ``b``, blocks have one position.
            ``(h2)``, ``(2h)`` and ``(2d)`` are one dimension that counts both. A letter that is
            repeated, side by side, stands for several dimensions that count one thing. None is
            ``"nb(h2)d"``, with ``value_cache`` ``"nbhd"``, with ``value_head_size`` ``"nbd"``. For
            example, ``"n2bhd"`` is ``[num_blocks, 2, block_size, num_kv_heads, head_size]``.
        k_scale: what the keys in a cache of 8 or 4 bits are multiplied by, float32: one for all, of
            shape ``[]`` or ``[1]``; ``[num_kv_heads]``; or ``[num_blocks, block_size,
            num_kv_heads]``. None: 1, which a cache of int8 or uint8 must say: ``jnp.float32(1)``.
            Also ``[num_blocks, block_size, num_kv_heads, groups]``, float32, float16,
            bfloat16, float8_e4m3fn or float8_e8m0fnu: a scale for each group of
            ``head_size / groups`` numbers, of which a group of uint8 has an even number. All
            products are of float32 numbers then.
        v_scale: the same for the values.
        sinks: ``[num_heads]`` float32, one more logit in the softmax of each head, already
            scaled, with no value. -inf: none. One of 2**127 or more, inf included, takes all
            of the weight: the row is zero.
        alibi_slopes: ``[num_heads]`` float32: ``slope * abs(p - j)`` is taken from the logit of
            position j, after the soft cap. One of 2**95 or more, inf included, gives all of the
            weight to the nearest position.
        tree_mask: ``[num_tokens, 2]`` int32, for draft trees of speculative decoding: 64 bits for
            each query token, the low word first. Token i of a sequence attends to the sequence's
            query token j where bit j is set, and to the positions before all query tokens. A token
            without bits is causal. A sequence with bits has at most 64 query tokens, and no bits
            past them. A sliding window, of at least 64, counts back from the position that the
            number of bits gives: ``p = context_lens[s] - q_len + bits - 1``, in a tree the depth of
            the token. Not with ``alibi_slopes``, ``bidirectional_ranges`` or another ``causal``
            than True. None: no trees.
        bidirectional_ranges: ``[num_tokens, 2]`` int32, for image tokens in a prompt, which attend
            to each other. A query token also attends to the positions of its sequence from its
            first number up to but not including the second, whatever ``causal`` and the windows
            say. The part of a range outside of the sequence counts for nothing, and a range without
            positions changes no bit. What lies between a range and the window costs time, and its
            entries of ``block_tables`` are needed. Not with ``tree_mask``. None: no ranges.
        causal: False lets a query attend to positions after its own. Then ``context_lens`` may be
            less than the number of the sequence's queries: the first of these stand at negative
            positions, before all keys. An array ``[max_seqs]``, of integers or bool, says it for
            each sequence: 0 or False is not causal.
        window_right: how many positions after its own a query attends to where it is not causal; at
            least 0. None: all of them. (FlashAttention's ``window_size`` is
            ``sliding_window - 1, window_right``.)
        max_query_len: a promise that no sequence has more query tokens than this, at least 1. A
            sequence with more is an error. The result is the same; on GPUs the program is smaller,
            and 1 selects the program for decoding. None: no promise.
        value_head_size: for multi-head latent attention, where V is a part of K: the V of a
            position is the first ``value_head_size`` numbers of its K, from 1 to head_size. The
            cache holds K alone, ``[num_blocks, block_size, head_size]`` for one kv head, or in a
            ``kv_layout`` without ``2``; ``value_cache`` and ``v_scale`` are None, and ``k_scale``
            is that of V, too. None: V has an array or a row of its own.
        return_lse: also return the log-sum-exp of each row, for ``merge_attention``.
        codes: what an array of uint8 holds. None: whole numbers from -8 to 7. "e2m1":
            floats of 4 bits, 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with both signs; they need no scales.
            A cache of float4_e2m1fn holds them without it.
        k_global: ``[]`` or ``[1]`` float32, with ``k_scale`` of groups: what each of these scales
            is multiplied by first, in float32.
        v_global: the same for the values.

    Returns:
        ``[num_tokens, num_heads, head_size]``, dtype of ``query``; the head size is that of V, if
        it has one of its own. Logits, softmax and sums are float32 whatever the storage; where
        ``scale``, ``k_scale`` and ``q . k`` together exceed its range, a row may be NaN. Rows of no
        sequence, and of tokens that attend to nothing, are zero. A row's bits depend on its own
        sequence alone: not on the rest of the batch, nor on the number of threads. NaN or infinity
        in memory that a row does not attend to does not reach it.

        With ``return_lse``, a pair: the above, and ``[num_tokens, num_heads]`` float32, the natural
        logarithm of the softmax's denominator, the sink included; -inf for a row that has neither
        a position to attend to nor a sink.

    Raises:
        ValueError: a shape is wrong, or the value of an argument that is not an array.
        TypeError: a dtype or type is wrong.
        jax.errors.JaxRuntimeError, or ValueError: when it runs, INVALID_ARGUMENT naming sequence
            and entry: lengths, tables or ``num_seqs`` contradict each other or point outside the
            pool. Which of the two JAX raises depends on when it notices: catch both.

    Example:
        ``block_size=16``, one sequence of 45 tokens in the cache (45 = 2 * 16 + 13), decoding its
        last token::

            context_lens    = [45]         # two full blocks and 13 positions of a third
            block_tables    = [[7, 2, 5]]  # positions 0..15 in block 7, 16..31 in 2, 32..44 in 5
            query_start_loc = [0, 1]       # one query token, at position 44
            num_seqs        = 1

    Reference:
        Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", SOSP 2023. The argument names are those of vLLM and of the TPU's ragged
        paged attention kernel; soft capping is Gemma 2's, arXiv:2408.00118; ALiBi is Press et al.,
        arXiv:2108.12409; sinks as a learned logit per head are GPT-OSS's, arXiv:2508.10925; draft
        trees verified in one call are SpecInfer's, arXiv:2305.09781; multi-head latent attention is
        DeepSeek-V2's, arXiv:2405.04434.
    """
    arrays = _call.Arrays(op.OP, op.check)
    call = op.check(
        **arrays.read(query=query, kv_cache=kv_cache, value_cache=value_cache),
        **arrays.int32(
            context_lens=context_lens,
            block_tables=block_tables,
            query_start_loc=query_start_loc,
            num_seqs=num_seqs,
        ),
        **arrays.float32(k_scale=k_scale, v_scale=v_scale, sinks=sinks, alibi_slopes=alibi_slopes),
        **arrays.float32(k_global=k_global, v_global=v_global),
        **arrays.words(tree_mask=tree_mask),
        **arrays.int32(bidirectional_ranges=bidirectional_ranges),
        **arrays.read(causal=causal),
        scale=number(scale),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_layout=kv_layout,
        window_right=window_right,
        max_query_len=max_query_len,
        value_head_size=value_head_size,
        return_lse=return_lse,
        codes=codes,
    )
    results = arrays.call(call)
    return (results[0], results[1]) if return_lse else results[0]
