"""``kv_cache_update`` for JAX."""

from __future__ import annotations

from typing import TypedDict, Unpack, overload

import jax

from jax_frontend import _call
from shared_ffi import kv_cache_update as op


class _Options(TypedDict, total=False):
    """The keyword-only arguments that all overloads take."""

    kv_layout: str | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    positions: jax.Array | None
    cos_sin_cache: jax.Array | None
    interleaved: bool
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    norm_eps: float | None
    norm_offset: int
    norm_after_rope: bool
    v_norm: bool
    norm_round_first: bool
    hadamard: str | None
    hadamard_signs: jax.Array | None
    codes: str | None
    k_global: jax.Array | None
    v_global: jax.Array | None
    round_scales_up: bool


@overload
def kv_cache_update(  # type: ignore[overload-overlap]  # the first that fits says the result
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: None = None,
    query: None = None,
    k_scale_cache: None = None,
    v_scale_cache: None = None,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def kv_cache_update(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: jax.Array | None = None,
    query: jax.Array | None = None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    **options: Unpack[_Options],
) -> tuple[jax.Array, ...]: ...


def kv_cache_update(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    query: jax.Array | None = None,
    positions: jax.Array | None = None,
    cos_sin_cache: jax.Array | None = None,
    interleaved: bool = False,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float | None = None,
    norm_offset: int = 0,
    norm_after_rope: bool = False,
    v_norm: bool = False,
    norm_round_first: bool = False,
    hadamard: str | None = None,
    hadamard_signs: jax.Array | None = None,
    codes: str | None = None,
    k_global: jax.Array | None = None,
    v_global: jax.Array | None = None,
    round_scales_up: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """Writes the keys and values of new tokens into their slots of a paged cache.

    With ``positions`` and ``cos_sin_cache`` it rotates the keys before (rotary position embedding),
    and the queries, if they are given. With ``k_norm``, ``q_norm`` and ``v_norm`` it normalizes
    keys, queries and values (RMS norm). With ``hadamard`` it spreads the largest numbers of a head
    over all of them, so that a cache of few bits keeps more. With ``k_scale_cache`` and
    ``v_scale_cache`` it makes the scales of a cache of 8 or 4 bits.

    The result takes the place of ``kv_cache``. Under ``jax.jit(..., donate_argnums=...)`` it also
    takes its memory: nothing is copied but the new rows. Without donation XLA copies the cache
    first, because the caller still owns the old one.

    Dimensions: ``num_tokens`` new tokens of all sequences; a pool of ``num_blocks`` blocks with
    ``block_size`` positions each.

    Args:
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, float32, float16 or
            bfloat16, or float8_e4m3fn, float8_e5m2, int8, uint8 or float4_e2m1fn; the K of kv head
            h at index 2h, its V at 2h + 1. uint8 holds two numbers of 4 bits in an element: see
            ``paged_attention``.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``kv_cache``. For a cache of 8 or 4
            bits it may be float32, float16 or bfloat16: it is then divided by ``k_scale``, rounded
            to nearest, ties to even, and clamped to what the cache can hold; in a cache of integers
            NaN becomes 0. Keys of uint8 are pairs of numbers, as in the cache.
        value: as ``key``, but with the head size of ``value_cache`` if there is one. Where V is a
            part of K, it is ``key[..., :0]``: then ``kv_cache`` holds K alone, ``[num_blocks,
            block_size, head_size]``, and nothing but ``key`` is written; see ``value_head_size`` of
            ``paged_attention``.
        slot_mapping: ``[num_tokens]``, int32 or int64: token t goes to slot
            ``block * block_size + offset``. A negative slot is padding and writes nothing. If two
            tokens name one slot, the later one wins.
        value_cache: the array of V, if K and V are two arrays; ``kv_cache`` is then the array of K.
            Shape and dtype of ``kv_cache``, but with the head size of ``value``. One of the two may
            be int8 and the other of 4 bits, unless ``key`` is one of them.
        kv_layout: which dimension is which, if not as above; see ``paged_attention``.
        k_scale: what the keys are divided by, float32, of shape ``[]``, ``[1]``,
            ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``, as in
            ``paged_attention``. With the last shape, each key is divided by the scale of its slot.
            Also ``[..., num_kv_heads, groups]``, as there.
            A scale of 0 makes 0 of every finite number. None: 1, which a cache of int8 or uint8
            must say, unless ``key`` has its dtype or there is ``k_scale_cache``:
            ``jnp.float32(1)`` rounds to whole numbers.
        v_scale: the same for the values.
        k_scale_cache: ``[num_blocks, block_size, num_kv_heads]``, float32: the call makes the scale
            of each key that it writes, and writes it to the key's slot here. Donated, the array
            keeps its memory. Give what is returned to ``paged_attention`` as ``k_scale``.
            ``k_scale`` is None then. The scale is the largest magnitude of the head's row (after
            norm and rotation in the dtype of ``key``, after ``hadamard`` in float32) divided, in
            float32, by the largest number of the cache's dtype: 448 for float8_e4m3fn, 57344 for
            float8_e5m2, 127 for int8, 7 for uint8. A row of zeros has the scale 0. A row with NaN
            or an infinity has the scale NaN, and zeros in the cache, so that all of it is NaN when
            it is read. Padding has no scale.
            It may be ``[num_blocks, block_size, num_kv_heads, groups]``: each group of
            ``head_size / groups`` numbers has a scale, float32, float16, bfloat16, float8_e4m3fn or
            float8_e8m0fnu. It is divided by ``k_global``, then rounded to this dtype; numbers are
            divided by the product of what that became and ``k_global``. One of float8_e8m0fnu is
            the largest power of two up to the largest magnitude, divided by the largest power of
            two of the cache's dtype (OCP Microscaling), such as 4 for e2m1; it is never 0.
        v_scale_cache: the same for the values.
        query: ``[num_tokens, num_heads, head_size]``, dtype of ``key``, with ``cos_sin_cache``,
            ``q_norm`` or a ``hadamard`` of K only: the queries that change, too. num_heads is a
            multiple of num_kv_heads. Donated, its memory is that of the new queries.
        positions: ``[num_tokens]``, int32 or int64: the row of ``cos_sin_cache`` for each token.
        cos_sin_cache: ``[max_positions, rotary_dim]``, float32 or dtype of ``key``: the cosines of
            a position's angles, then as many sines. rotary_dim is even and at most head_size: the
            first rotary_dim numbers of each head are rotated, in float32, and rounded once to the
            dtype of ``key``. A pair (x, y) becomes (x cos - y sin, y cos + x sin). The key is
            then written as any other. None: nothing is rotated. Not where V is a part of K.
        interleaved: which numbers are a pair. False: i and i + rotary_dim / 2, as in GPT-NeoX and
            Llama. True: 2i and 2i + 1, as in GPT-J.
        q_norm: ``[head_size]``, float32 or dtype of ``key``: the weights of the norm of queries. A
            head x becomes ``x / sqrt(mean(x * x) + norm_eps) * q_norm``, computed in float32 and
            rounded once to the dtype of ``key``. The weights of a norm that has none are ones.
            ``[num_heads, head_size]``: all heads of a token are normalized together, the mean is
            that of all of them, and devices cannot share the heads. None: queries have no norm.
            Not where V is a part of K.
        k_norm: the same for keys, ``[head_size]`` or ``[num_kv_heads, head_size]``.
        norm_eps: what is added to the mean, at least 0. Given with norms, and only then.
        norm_offset: 1 if a norm multiplies by ``1 + q_norm`` and ``1 + k_norm``, as in Gemma 3, or
            0.
        norm_after_rope: whether heads are rotated before they are normalized. Not with weights for
            all heads.
        v_norm: whether the values are normalized, each head alone and without weights, as in
            Gemma 4.
        norm_round_first: whether a head is rounded to the dtype of ``key`` before the
            multiplication with weights, and again after it, as in Qwen3.
        hadamard: which heads are multiplied by an orthonormal Walsh-Hadamard matrix, after norm and
            rotation: ``"k"`` keys, ``"v"`` values, ``"kv"`` both. A ``query`` is multiplied with
            the keys: give the query of attention here, or to ``jax_frontend.hadamard``. That
            function also undoes the matrix of values, in the output or in the next projection. The
            matrix extends over the largest power of two that divides head_size, and is repeated:
            128 of 128 numbers, 32 of 96, 16 of 80. All of it is float32, and rounded once, to the
            dtype that is written. Heads have at most 576 numbers. None: no heads. Not where V is a
            part of K.
        hadamard_signs: ``[head_size]``, float32, each 1 or -1, which is not checked: what the
            numbers of a head are multiplied by before the matrix. Not for a V with another head
            size. None: 1.
        codes: what the numbers of a cache of uint8 are, see ``paged_attention``. The largest of
            "e2m1" is 6.
        k_global: ``[]`` or ``[1]`` float32, with ``k_scale`` or ``k_scale_cache`` of groups: what
            each of these scales is multiplied by.
        v_global: the same for the values.
        round_scales_up: whether scales of float8_e8m0fnu that the call makes are the next power of
            two from the largest magnitude divided by the cache's largest number: then no number is
            clamped.

    Returns:
        The updated cache, shape and dtype of ``kv_cache``. With ``value_cache``, ``k_scale_cache``,
        ``v_scale_cache`` or ``query`` a tuple: the updated ``kv_cache``, then what these became, in
        this order. The query of a token with a negative slot changes, too.

    Raises:
        ValueError: a shape or ``hadamard`` is wrong, or an argument is given that needs another
            one.
        TypeError: a dtype or type is wrong.
        jax.errors.JaxRuntimeError, or ValueError: when it runs, INVALID_ARGUMENT: a slot is past
            the end, or the position of a token with a slot has no row in ``cos_sin_cache``. The
            query of a token without a slot then stays as it is. Which of the two JAX raises depends
            on when it notices: catch both. Nothing is written, but a donated cache is lost, because
            JAX has deleted it. Where slots or positions may be wrong, call
            ``shared_ffi.kv_cache_update.check_values(kv_cache, slot_mapping)``, with ``positions``
            and ``cos_sin_cache``, before the step that donates.

    Example:
        With ``block_size=16``, position 37 of a sequence lies in its logical block 2 at offset 5
        (37 = 2 * 16 + 5). If that block is the pool's block 9, the slot is 9 * 16 + 5 = 149.

    Reference:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        arXiv:2104.09864. The order of ``cos_sin_cache`` is that of vLLM and FlashInfer.
        Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    arrays = _call.Arrays(op.OP, op.check)
    call = op.check(
        **arrays.read(
            kv_cache=kv_cache,
            key=key,
            value=value,
            slot_mapping=slot_mapping,
            value_cache=value_cache,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
            query=query,
            positions=positions,
        ),
        **arrays.float32(
            k_scale=k_scale,
            v_scale=v_scale,
            cos_sin_cache=cos_sin_cache,
            q_norm=q_norm,
            k_norm=k_norm,
            hadamard_signs=hadamard_signs,
            k_global=k_global,
            v_global=v_global,
        ),
        kv_layout=kv_layout,
        interleaved=interleaved,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        norm_after_rope=norm_after_rope,
        v_norm=v_norm,
        norm_round_first=norm_round_first,
        hadamard=hadamard,
        codes=codes,
        round_scales_up=round_scales_up,
    )
    updated = arrays.call(call)
    return updated[0] if len(updated) == 1 else updated
