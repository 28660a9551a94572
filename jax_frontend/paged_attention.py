"""``paged_attention`` for JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_frontend import _call, _vmap
from shared_ffi import kv_layout as _kv_layout
from shared_ffi import paged_attention as op


@overload
def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    causal: bool = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...


@overload
def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    causal: bool = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    causal: bool = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed query tokens over a paged key/value cache.

    Prefill, chunked prefill, decode, and any mix of them in one call. The query tokens' own keys
    and values must be in the cache already (``kv_cache_update``). Under ``jax.vmap`` many calls
    become one, with a longer batch (docs/features/vmap.md).

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
            1 to 512.
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, dtype of ``query``, or
            float8_e4m3fn, float8_e5m2 or int8; the K of kv head h at index 2h, its V at 2h + 1. Any
            block_size from 1.
        context_lens: ``[max_seqs]`` int32: tokens of the sequence in the cache, the query tokens
            of this call included. May be 0.
        block_tables: ``[max_seqs, max_blocks_per_seq]`` int32: the pool's block for each logical
            block of the sequence. Entries that no query attends to may hold anything.
        query_start_loc: ``[max_seqs + 1]`` int32, non-decreasing up to entry ``num_seqs``.
        num_seqs: ``[]`` or ``[1]`` int32, from 0 to max_seqs. Read when the op runs: changing it
            recompiles nothing. What the arrays above hold past it may be anything.
        scale: factor of ``q . k``, usually ``head_size ** -0.5``; finite.
        sliding_window: how many positions a query attends to, itself included; at least 1. None:
            all of them.
        soft_cap: c > 0 turns a logit into ``c * tanh(logit / c)``, before the softmax. None: off.
        value_cache: where K and V are two arrays, that of V; ``kv_cache`` is that of K. Shape and
            dtype of ``kv_cache``.
        kv_layout: which dimension is which, where that is not as above: ``n`` num_blocks, ``b``
            block_size, ``h`` num_kv_heads, ``2`` K then V, ``d`` head_size, in any order that ends
            with ``d``, two of them joined by parentheses; what lies along several dimensions, side
            by side, is named for each. None is ``"nb(h2)d"``, and with ``value_cache`` ``"nbhd"``.
            ``"n2bhd"``, for one, is
            ``[num_blocks, 2, block_size, num_kv_heads, head_size]``.
        k_scale: float32, what the keys in a cache of 8 bits are multiplied by: of shape ``[]`` or
            ``[1]``, one for all; ``[num_kv_heads]``; or ``[num_blocks, block_size, num_kv_heads]``.
            None: 1.
        v_scale: likewise, of the values.
        sinks: ``[num_heads]`` float32, one more logit in the softmax of each head, already
            scaled, with no value. -inf: none.
        alibi_slopes: ``[num_heads]`` float32: ``slope * abs(p - j)`` is taken from the logit of
            position j, after the soft cap.
        causal: False lets a query attend to positions after its own. Then ``context_lens`` may be
            less than the number of the sequence's queries: the first of these stand at negative
            positions, before all keys.
        window_right: with ``causal=False``, how many positions after its own a query attends to; at
            least 0, which is causal. None: all of them. (``sliding_window - 1, window_right`` is
            what FlashAttention calls ``window_size``.)
        max_query_len: a promise about the values of ``query_start_loc``: no sequence has more query
            tokens than this, at least 1; more are an error. On GPUs the program is smaller and, at
            1, for decoding, another; the result is the same. None: nothing is known.
        return_lse: return the rows' log-sum-exp, too, which ``merge_attention`` takes.

    Returns:
        ``[num_tokens, num_heads, head_size]``, dtype of ``query``. Logits, softmax and sums are
        float32 whatever the storage. Rows of no sequence, and of tokens that attend to nothing,
        are zero. A row's bits depend on its own sequence alone: not on the rest of the batch, nor
        on the number of threads. NaN or infinity in memory that a row does not attend to does not
        reach it.

        With ``return_lse`` a pair of that and of ``[num_tokens, num_heads]`` float32: the natural
        logarithm of the softmax's denominator, the sink included; -inf where a row has nothing to
        attend to, nor a sink.

    Raises:
        ValueError: a shape, or the value of an argument that is no array, is wrong.
        TypeError: a dtype or type is wrong.
        jax.errors.JaxRuntimeError: when it runs, INVALID_ARGUMENT naming sequence and entry:
            lengths, tables or ``num_seqs`` contradict each other or point outside the pool.

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
        arXiv:2108.12409; sinks as a learned logit per head are GPT-OSS's, arXiv:2508.10925.
    """
    results = _call.run(
        op.check,
        {
            "query": query,
            "kv_cache": kv_cache,
            "context_lens": context_lens,
            "block_tables": block_tables,
            "query_start_loc": query_start_loc,
            "num_seqs": num_seqs,
            "value_cache": value_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
        },
        {
            "scale": scale,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "causal": causal,
            "window_right": window_right,
            "max_query_len": max_query_len,
            "kv_layout": kv_layout,
            "return_lse": return_lse,
        },
        _fold,
    )
    return (results[0], results[1]) if return_lse else results[0]


def _fold(
    size: int, operands: Mapping[str, _vmap.Operand], options: Mapping[str, Any]
) -> _vmap.Folded | None:
    """One ragged batch, and where each call has blocks of its own, one pool of them."""
    query, context_lens, block_tables = (
        operands[x] for x in ("query", "context_lens", "block_tables")
    )
    num_tokens, max_seqs = query.shape[0], context_lens.shape[0]
    ragged = {"query", "context_lens", "block_tables", "query_start_loc", "num_seqs"}
    arrays = {name: x for name, x in operands.items() if name not in ragged}
    pool = _one_pool(size, arrays, block_tables, options["kv_layout"])
    if pool is None or size * max(num_tokens, max_seqs + 1) > _vmap.MAX_INT32:
        return None
    changed, tables, changed_options = pool
    everything = {name: x.array for name, x in arrays.items()} | changed
    lengths, starts, (calls, tokens), places = _one_batch(
        num_tokens,
        context_lens.of_each(size),
        operands["query_start_loc"].of_each(size),
        operands["num_seqs"].of_each(size).reshape(size),
    )
    return _vmap.Folded(
        everything
        | {
            "query": query.array.at[(calls, tokens) if query.is_mapped else tokens].get(
                mode="clip"
            ),
            "context_lens": lengths,
            # One row more for the sequence that _sequences adds.
            "block_tables": _vmap.joined(jnp.pad(tables, ((0, 0), (0, 1), (0, 0)))),
            "query_start_loc": starts,
            "num_seqs": jnp.array(len(lengths), jnp.int32),
        },
        lambda result: result[places],
        changed_options,
    )


def _one_pool(
    size: int,
    arrays: Mapping[str, _vmap.Operand],
    block_tables: _vmap.Operand,
    kv_layout: str | None,
) -> tuple[dict[str, jax.Array], jax.Array, dict[str, Any]] | None:
    """Of arrays that tell of blocks those that become others, ``[size, ...]`` block tables, and the
    options that become others. None: what each call has of its own is not for its own blocks."""
    caches = [name for name in ("kv_cache", "value_cache") if name in arrays]
    have_own_blocks = any(arrays[name].is_mapped for name in caches)
    scales = [name for name in ("k_scale", "v_scale") if name in arrays]
    per_position = [name for name in scales if len(arrays[name].shape) == 3]
    changed = [*caches, *per_position] if have_own_blocks else []
    if any(x.is_mapped for name, x in arrays.items() if name not in changed):
        return None
    tables = block_tables.of_each(size)
    if not have_own_blocks:
        return {}, tables, {}
    num_blocks, _ = _kv_layout.num_blocks_and_size(op.OP, kv_layout, arrays["kv_cache"].shape)
    if size * num_blocks > _vmap.MAX_INT32:
        return None
    layout, dim = _kv_layout.stacked(kv_layout, is_separate=len(caches) == 2)
    pool = {name: jnp.moveaxis(arrays[name].of_each(size), 0, dim) for name in caches}
    pool |= {name: _vmap.joined(arrays[name].of_each(size)) for name in per_position}
    return pool, _vmap.renumbered(tables, num_blocks), {"kv_layout": layout}


def _one_batch(
    num_tokens: int, context_lens: jax.Array, query_start_loc: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """The sequences of many calls as those of one. That has no place for padding between them, so
    all padding comes after the last.

    Args:
        num_tokens: of each call. The arrays are those of the calls, one below the other.

    Returns:
        The one call's ``context_lens`` and ``query_start_loc``; from its tokens to those of the
        calls, ``[size * num_tokens]``: number of the call, and of the token in it; and back,
        ``[size, num_tokens]``.
    """
    size = len(num_seqs)
    lengths, starts, ends = jax.vmap(partial(_sequences, num_tokens))(
        context_lens, query_start_loc, num_seqs
    )
    ends_in_batch = jnp.cumsum(ends - starts[:, 0], dtype=jnp.int32)
    shifts = ends_in_batch - ends
    starts_in_batch = (starts + shifts[:, None]).reshape(-1)

    of_call = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    is_real = (starts[:, :1] <= of_call) & (of_call < ends[:, None])
    last = size * num_tokens - 1  # which is padding, if there is any
    places = jnp.where(is_real, of_call + shifts[:, None], last)

    of_batch = jnp.arange(size * num_tokens, dtype=jnp.int32)
    calls = jnp.searchsorted(ends_in_batch, of_batch, side="right", method="scan_unrolled")
    tokens = of_batch - shifts.at[calls].get(mode="clip")
    query_start_loc = jnp.concatenate([starts_in_batch, ends_in_batch[-1:]])
    return lengths.reshape(-1), query_start_loc, (calls, tokens), places


def _sequences(
    num_tokens: int, context_lens: jax.Array, query_start_loc: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of one call: the length of each sequence, where each starts, and where the last one ends.

    There is one more than the call has places for. It has the tokens that a faulty
    ``query_start_loc`` or ``num_seqs`` gives to no sequence, and a length for which the handler
    refuses it, so that no other call's tokens suffer. Places that are not in use are empty.
    """
    max_seqs = len(context_lens)
    count = jnp.where((num_seqs >= 0) & (num_seqs <= max_seqs), num_seqs, -1)
    begins, ends = query_start_loc[:-1], query_start_loc[1:]
    numbers = jnp.arange(max_seqs + 1, dtype=jnp.int32)
    has_rows = (begins >= 0) & (begins <= ends) & (ends <= num_tokens)
    first_broken = jnp.min(numbers[:-1], initial=max_seqs, where=~has_rows)
    num_sound = jnp.maximum(0, jnp.minimum(count, first_broken))
    is_broken = num_sound != count
    end = jnp.max(ends, initial=0, where=numbers[:-1] < num_sound)
    starts = jnp.where(numbers < num_sound, query_start_loc, end)
    lengths = jnp.where(numbers[:-1] < num_sound, context_lens, 0)
    return (
        jnp.append(lengths, jnp.where(is_broken, -1, 0)),
        starts,
        jnp.where(is_broken, num_tokens, end),
    )
