"""The oracle: the ops as their contract states them, in float64 and plain loops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from harness import layouts
from harness.arrays import packed, quantized, unpacked


def paged_attention(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: Any = None,
    kv_layout: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    tree_mask: Any = None,
    bidirectional_ranges: Any = None,
    causal: Any = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    return_lse: bool = False,
    codes: str | None = None,
    k_global: Any = None,
    v_global: Any = None,
    selected: Any = None,
) -> Any:
    """Returns float64. Reads only the attended positions of the cache and the tables.

    Args:
        selected: for each token and kv head, the positions that it may attend to. Not an argument
            of the op: the oracle of sparse attention.
    """
    is_latent = value_head_size is not None
    kv_cache = layouts.default(
        (kv_cache,) if value_cache is None else (kv_cache, value_cache),
        kv_layout,
        is_latent=is_latent,
        codes=codes,
    )
    values = kv_cache if value_cache is None else unpacked(value_cache, codes)
    num_columns = value_head_size or values.shape[-1]
    of_keys = (k_scale, k_global, query.shape[2])
    of_values = of_keys if is_latent else (v_scale, v_global, num_columns)
    num_heads = query.shape[1]
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    scale = float(np.float32(scale))  # the attribute is float32
    soft_cap = None if soft_cap is None else float(np.float32(soft_cap))
    output = np.zeros((*query.shape[:2], num_columns))
    lse = np.full(query.shape[:2], -np.inf)
    for s in range(int(np.asarray(num_seqs).item())):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        for i in range(end - start):
            position, positions = attended_positions(
                i, s, context_lens, query_start_loc, sliding_window=sliding_window,
                tree_mask=tree_mask, bidirectional_ranges=bidirectional_ranges, causal=causal,
                window_right=window_right,
            )  # fmt: skip
            rows = block_tables[s, positions // block_size], positions % block_size
            attended = kv_cache[rows].astype(np.float64)
            for first, scales in enumerate((of_keys, of_values)):
                factors = scale_factors(rows, *scales)
                attended[:, first::2, : factors.shape[-1]] *= factors
            for h in range(num_heads):
                sink = -np.inf if sinks is None else float(sinks[h])
                kv_head = h // (num_heads // num_kv_heads)
                chosen = np.arange(len(positions))
                if selected is not None:
                    chosen = np.flatnonzero(np.isin(positions, selected[start + i][kv_head]))
                if len(chosen) == 0:
                    lse[start + i, h] = sink
                    continue
                keys = attended[chosen, 2 * kv_head]
                values = attended[chosen, 2 * kv_head + 1, :num_columns]
                with np.errstate(invalid="ignore"):
                    logits = scale * (keys @ query[start + i, h].astype(np.float64))
                    if soft_cap is not None:
                        logits = soft_cap * np.tanh(logits / soft_cap)
                    if alibi_slopes is not None:
                        distances = np.abs(position - positions[chosen])
                        logits = logits - float(alibi_slopes[h]) * distances
                    largest = max(logits.max(), sink)
                    weights = np.exp(logits - largest)
                    total = weights.sum() + np.exp(sink - largest)
                    output[start + i, h] = weights @ values / total
                    lse[start + i, h] = largest + np.log(total)
    return (output, lse) if return_lse else output


def attended_positions(
    i: int,
    sequence: int,
    context_lens: Any,
    query_start_loc: Any,
    *,
    sliding_window: int | None = None,
    tree_mask: Any = None,
    bidirectional_ranges: Any = None,
    causal: Any = True,
    window_right: int | None = None,
    **others: Any,
) -> tuple[int, np.ndarray]:
    """The position of a sequence's token i, and those that it attends to, ascending."""
    start, end = int(query_start_loc[sequence]), int(query_start_loc[sequence + 1])
    context_len = int(context_lens[sequence])
    position = context_len - (end - start) + i
    bits = [] if tree_mask is None else _bits(tree_mask[start + i])
    if bits:
        first_position = position - i
        position = first_position + len(bits) - 1
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    last = context_len - 1
    if _is_causal(causal, sequence):
        last = position
    elif window_right is not None:
        last = min(last, position + window_right)
    positions = np.arange(first, last + 1)
    if bits:
        positions = np.arange(first, first_position + 64)
        in_tree = np.isin(positions - first_position, bits)
        positions = positions[(positions < first_position) | in_tree]
    if bidirectional_ranges is not None:
        more = _range(bidirectional_ranges[start + i], context_len)
        positions = np.union1d(positions, np.array(more, np.int64))
    return position, positions


def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    query_start_loc: Any,
    num_seqs: Any,
    *,
    prefix_seqs: Any = None,
    **options: Any,
) -> Any:
    """Returns float64."""
    operands, value_cache = as_paged(query, key, value, query_start_loc, num_seqs, prefix_seqs)
    options |= {"value_cache": value_cache, "kv_layout": PAGED_LAYOUT}
    return paged_attention(*operands, **options)


PAGED_LAYOUT = "nbhd"


def as_paged(
    query: Any,
    key: Any,
    value: Any,
    query_start_loc: Any,
    num_seqs: Any,
    prefix_seqs: Any = None,
) -> tuple[tuple[Any, Any, Any, Any, Any, Any], Any]:
    """The operands of ``paged_attention``, and ``value_cache``, for the arrays of
    ``varlen_attention``: K and V are a cache with blocks of one position, in PAGED_LAYOUT. A
    sequence that cannot continue the one it names has a length of -1."""
    starts, count = query_start_loc.astype(np.int64), int(np.asarray(num_seqs).item())
    tables, lens = starts[:-1, None] + np.arange(len(query)), np.diff(starts)
    for s, prefix in enumerate([] if prefix_seqs is None else prefix_seqs[: max(0, count)]):
        before = 0 if prefix == -1 else lens[prefix] if 0 <= prefix < s else -1
        if not 0 <= before <= len(query):
            lens[s] = -1
        elif before > 0:
            tables[s] = [*tables[prefix, :before], *tables[s, : len(query) - before]]
            lens[s] += before
    operands = (query, key[:, None], lens, tables, query_start_loc, num_seqs)
    return operands, value[:, None]


def legal_sequences(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    *,
    kv_layout: str | None = None,
    value_cache: Any = None,
    sliding_window: int | None = None,
    causal: Any = True,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    tree_mask: Any = None,
    bidirectional_ranges: Any = None,
    **others: Any,
) -> list[bool] | None:
    """Whether the lengths, the tree mask and the block table of each sequence of paged_attention
    obey the contract. None: num_seqs or the starts do not."""
    num_blocks, block_size, *_ = _shape(
        kv_cache, value_cache, kv_layout, is_latent=value_head_size is not None
    )
    max_seqs, width = block_tables.shape
    count = int(np.asarray(num_seqs).item())
    if not 0 <= count <= max_seqs:
        return None
    starts = [int(start) for start in query_start_loc[: count + 1]]
    if count > 0 and not (starts[0] >= 0 and starts == sorted(starts) and starts[-1] <= len(query)):
        return None
    legal = []
    for s in range(count):
        q_len, context = starts[s + 1] - starts[s], int(context_lens[s])
        is_legal = 0 <= context <= width * block_size
        is_legal &= q_len <= context or not _is_causal(causal, s)
        is_legal &= max_query_len is None or q_len <= max_query_len
        if tree_mask is not None:
            bits = [bit for words in tree_mask[starts[s] : starts[s + 1]] for bit in _bits(words)]
            is_legal &= not bits or max(bits) < q_len <= 64
        if is_legal and q_len > 0 and context > 0:
            window = context if sliding_window is None else sliding_window
            first = max(0, context - q_len - window + 1)
            if bidirectional_ranges is not None:
                ranges = [
                    _range(x, context) for x in bidirectional_ranges[starts[s] : starts[s + 1]]
                ]
                first = min([first, *(x.start for x in ranges if x)])
            blocks = block_tables[s, first // block_size : (context - 1) // block_size + 1]
            is_legal = bool(((blocks >= 0) & (blocks < num_blocks)).all())
        legal.append(is_legal)
    return legal


def numbers_are_legal(
    head_size: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    causal: Any = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    tree_mask: Any = None,
    **others: Any,
) -> bool:
    """Whether the numbers of a call of paged_attention obey the contract."""
    with np.errstate(over="ignore"):
        scale = abs(float(np.float32(scale)))
        cap = None if soft_cap is None else float(np.float32(soft_cap))
    return (
        scale <= 2.0**126
        and (cap is None or (0 < cap < np.inf and scale <= cap * 2.0**126))
        and (sliding_window is None or sliding_window >= (1 if tree_mask is None else 64))
        and (max_query_len is None or max_query_len >= 1)
        and (value_head_size is None or 1 <= value_head_size <= head_size)
        and (window_right is None or (causal is not True and window_right >= 0))
    )


def tokens_are_legal(
    kv_cache: Any,
    slot_mapping: Any,
    *,
    positions: Any = None,
    cos_sin_cache: Any = None,
    kv_layout: str | None = None,
    value_cache: Any = None,
    is_latent: bool = False,
    **others: Any,
) -> bool:
    """Whether no slot of kv_cache_update is past the end of the cache, and each token with a slot
    has a row of cosines and sines."""
    num_blocks, block_size, *_ = _shape(kv_cache, value_cache, kv_layout, is_latent=is_latent)
    slots = np.asarray(slot_mapping)
    is_legal = slots < num_blocks * block_size
    if positions is not None:
        is_legal &= (slots < 0) | have_rows(positions, cos_sin_cache)
    return bool(is_legal.all())


def have_rows(positions: Any, cos_sin_cache: Any) -> np.ndarray:
    """Whether the position of each token has a row of cosines and sines."""
    positions = np.asarray(positions)
    return (positions >= 0) & (positions < len(cos_sin_cache))


def _range(bounds: Any, context_len: int) -> range:
    """A token's range of positions, cut to its sequence."""
    return range(max(0, int(bounds[0])), min(int(bounds[1]), context_len))


def _is_causal(causal: Any, sequence: int) -> bool:
    return causal if isinstance(causal, bool) else bool(causal[sequence])


def _bits(words: Any) -> list[int]:
    """The bits that are set in a token's two words of a tree mask."""
    return [j for j in range(64) if int(words[j // 32]) >> j % 32 & 1]


def _shape(
    kv_cache: Any, value_cache: Any, kv_layout: str | None, *, is_latent: bool
) -> tuple[int, ...]:
    """The shape of a cache in the default layout."""
    caches = (kv_cache,) if value_cache is None else (kv_cache, value_cache)
    return layouts.default_shape(caches, kv_layout, is_latent=is_latent)


def scale_factors(
    rows: tuple[Any, Any], scales: Any, global_scale: Any, row_size: int
) -> np.ndarray:
    """The scales of positions, given as blocks and offsets, as what a row of `row_size` numbers is
    multiplied by: [..., num_kv_heads or 1, row_size]."""
    if scales is None:
        return np.ones((1, row_size))
    scales = np.asarray(scales, np.float32)
    if scales.ndim < 3:
        return scales.reshape(-1, 1).repeat(row_size, -1).astype(np.float64)
    if scales.ndim == 3:
        scales = scales[..., None]
    if global_scale is not None:
        scales = scales * np.float32(global_scale).reshape(())
    return scales[rows].repeat(row_size // scales.shape[3], -1).astype(np.float64)


def kv_cache_update(
    kv_cache: Any,
    key: Any,
    value: Any,
    slot_mapping: Any,
    *,
    value_cache: Any = None,
    kv_layout: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    query: Any = None,
    positions: Any = None,
    cos_sin_cache: Any = None,
    interleaved: bool = False,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 0.0,
    norm_offset: int = 0,
    norm_after_rope: bool = False,
    v_norm: bool = False,
    norm_round_first: bool = False,
    hadamard: str | None = None,
    hadamard_signs: Any = None,
    codes: str | None = None,
    k_global: Any = None,
    v_global: Any = None,
    round_scales_up: bool = False,
) -> Any:
    """Returns the updated cache or caches, then the scales that the call makes, then the new query.
    The arguments keep their values."""

    def changed(rows: Any, weight: Any) -> Any:
        def normalized(rows: Any) -> Any:
            if weight is None:
                return rows
            return _normalized(rows, weight, norm_eps, norm_offset, rounds_first=norm_round_first)

        if positions is None:
            return normalized(rows)
        rows = rows if norm_after_rope else normalized(rows)
        rows = _rotated(rows, positions, cos_sin_cache, interleaved=interleaved)
        return normalized(rows) if norm_after_rope else rows

    key = changed(key, k_norm)
    if v_norm:
        value = _normalized(value, np.ones(value.shape[2], np.float32), norm_eps)
    caches = (kv_cache,) if value_cache is None else (kv_cache, value_cache)
    of_4_bits = codes or "int4"
    dtypes = [of_4_bits if cache.dtype == np.uint8 else cache.dtype.name for cache in caches]
    is_copied = key.dtype == kv_cache.dtype
    key, value = unpacked(key, codes), unpacked(value, codes)
    has_keys, has_values = ("k" in (hadamard or ""), "v" in (hadamard or ""))
    key = transformed(key, hadamard_signs) if has_keys else key
    value = transformed(value, hadamard_signs) if has_values else value
    is_latent = value.shape[2] == 0
    updated = layouts.default(caches, kv_layout, is_latent=is_latent, codes=codes)
    block_size = updated.shape[1]
    made = [None if x is None else np.array(x) for x in (k_scale_cache, v_scale_cache)]
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        row = divmod(int(slot), block_size)
        new = ((0, key[token], k_scale, dtypes[0]), (1, value[token], v_scale, dtypes[-1]))
        for first, rows, scale, dtype in new[:1] if is_latent else new:
            scale_cache, global_scale = made[first], (k_global, v_global)[first]
            if scale_cache is not None:
                scale_cache[row], rows = _made_scales(
                    rows, dtype, scale_cache[row], global_scale, round_up=round_scales_up
                )
                scale = scale_cache
            if not is_copied:
                divisors = scale_factors(row, scale, global_scale, rows.shape[-1]).astype(
                    np.float32
                )
                if scale_cache is not None:
                    divisors = np.nan_to_num(divisors)
                divisors[divisors == 0] = np.inf
                with np.errstate(invalid="ignore"):  # infinity / infinity is NaN
                    scaled = rows.astype(np.float32) / divisors
                rows = quantized(scaled, dtype)
            updated[row][first::2, : rows.shape[-1]] = rows
    columns = unpacked(caches[-1]).shape[-1]
    results = layouts.arrange(updated, kv_layout, is_latent=is_latent, value_head_size=columns)
    results = tuple(
        packed(x, dtype) if dtype == of_4_bits else x.astype(dtype)
        for x, dtype in zip(results, dtypes, strict=True)
    )
    results += tuple(x for x in made if x is not None)
    if query is not None:
        changed_query = changed(query, q_norm)
        if has_keys:
            changed_query = transformed(changed_query, hadamard_signs).astype(query.dtype)
        if positions is not None:  # a token without a row keeps its query
            has_row = have_rows(positions, cos_sin_cache)[:, None, None]
            changed_query = np.where(has_row, changed_query, query)
        results += (changed_query,)
    return results[0] if len(results) == 1 else results


def _made_scales(
    rows: Any, dtype: str, scales: np.ndarray, global_scale: Any, *, round_up: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each row, or of each group of one, and the rows to be divided by them. The scale
    of a row with NaN or an infinity is NaN, and its numbers become zeros.

    Args:
        scales: [num_kv_heads] or [num_kv_heads, groups], what the scales replace.
    """
    numbers = np.asarray(rows, np.float32).reshape(len(rows), *scales.shape[1:] or (1,), -1)
    is_finite = np.isfinite(numbers).all(-1, keepdims=True)
    finite = np.where(is_finite, numbers, np.float32(0))
    largest = abs(finite).max(-1, keepdims=True, initial=0)
    quotient = np.float32(1 if global_scale is None else np.reshape(global_scale, ()))
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        power = {"int4": 4, "e2m1": 4, "int8": 64, "float8_e4m3fn": 256, "float8_e5m2": 32768}
        divisor = largest_number(dtype) if round_up else power[dtype]
        exact = largest / np.float32(divisor) / quotient
        exponents = np.frexp(np.maximum(exact, np.float32(2.0**-127)))[1] - 1  # rounded down
        exponents += round_up & (np.ldexp(1.0, exponents) < exact)
        made = np.ldexp(1.0, np.minimum(exponents, 127))
    else:
        made = largest / np.float32(largest_number(dtype)) / quotient
        if scales.dtype != np.float32:
            limit = float(ml_dtypes.finfo(scales.dtype).max)
            made = np.clip(made, -limit, limit)
    made = np.where(is_finite, made, np.nan).astype(np.float32).astype(scales.dtype)
    return made.reshape(scales.shape), finite.reshape(np.shape(rows))


def largest_number(dtype: str) -> float:
    """The largest number that a cache of a dtype holds."""
    known = {"int4": 7.0, "e2m1": 6.0, "int8": 127.0}
    return known.get(dtype) or float(ml_dtypes.finfo(dtype).max)


def _rotated(rows: Any, positions: Any, cos_sin_cache: Any, *, interleaved: bool) -> np.ndarray:
    """Rows of tokens after the rotary embedding. A product, a difference and a sum are each rounded
    to float32, as they are in float64 and then rounded; rows of tokens without a position stay."""
    rotated = np.array(rows)
    num_pairs = cos_sin_cache.shape[1] // 2
    for token in np.flatnonzero(have_rows(positions, cos_sin_cache)):
        table = np.asarray(cos_sin_cache[int(positions[token])], np.float64)
        for i in range(num_pairs):
            pair = [2 * i, 2 * i + 1] if interleaved else [i, i + num_pairs]
            x, y = np.asarray(rows[token][:, pair], np.float64).T
            products = [np.float32(a * table[j]) for a in (x, y) for j in (i, num_pairs + i)]
            x_cos, x_sin, y_cos, y_sin = (np.float64(product) for product in products)
            turned = np.array([x_cos - y_sin, y_cos + x_sin], np.float32).T
            rotated[token][:, pair] = turned.astype(rotated.dtype)
    return rotated


def _normalized(
    rows: Any, weight: Any, eps: float, offset: int = 0, *, rounds_first: bool = False
) -> np.ndarray:
    """Rows of tokens after an RMS norm of each head, or of all heads if they have weights each.
    Every operation is rounded to float32, as in the sums, whose order is a part of the result."""
    numbers, weight = np.asarray(rows, np.float32), np.asarray(weight, np.float32)
    together = numbers.reshape(*numbers.shape[: 3 - weight.ndim], weight.size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sums = _sum_in_order(together * together)
        inverse = np.float32(1) / np.sqrt(sums / np.float32(together.shape[-1]) + np.float32(eps))
        scaled = numbers * inverse.reshape(*inverse.shape, *[1] * (3 - inverse.ndim))
        if rounds_first:
            scaled = scaled.astype(rows.dtype).astype(np.float32)
        return (scaled * (np.float32(1) + weight if offset else weight)).astype(rows.dtype)


def _sum_in_order(numbers: np.ndarray) -> np.ndarray:
    """Sums of float32 numbers over the last dimension, in PyTorch's order on x86: 32 chains, in
    which sums of 16 numbers are added up, and sums of 16 such sums; then the chains."""
    count = numbers.shape[-1]
    whole, of_lanes = count // 32 * 32, count // 8 * 8
    rows = numbers[..., :whole].reshape(*numbers.shape[:-1], whole // 32, 32)
    levels = [np.zeros((*numbers.shape[:-1], 32), np.float32) for _ in range(3)]
    for i in range(whole // 32):
        levels[0] = levels[0] + rows[..., i, :]
        for level in (1, 2):
            if (i + 1) % 16**level == 0:
                levels[level] = levels[level] + levels[level - 1]
                levels[level - 1] = np.zeros_like(levels[0])
    chains = (levels[0] + levels[1]) + levels[2]
    for i in range(whole, of_lanes, 8):
        chains[..., :8] += numbers[..., i : i + 8]
    total = np.zeros(numbers.shape[:-1], np.float32)
    for i in range(of_lanes, count):
        total = total + numbers[..., i]
    for lane in range(8):
        of_lane = chains[..., lane]
        for chain in (lane + 8, lane + 16, lane + 24):
            of_lane = of_lane + chains[..., chain]
        total = total + of_lane
    return total


def transformed(rows: Any, signs: Any = None) -> np.ndarray:
    """Rows times signs, and each block times the Walsh-Hadamard matrix over the root of its size.
    Every operation is rounded to float32, in the order that is a part of the result."""
    numbers = np.array(rows, np.float32)
    if signs is not None:
        numbers *= signs
    block = numbers.shape[-1] & -numbers.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        for distance in (1 << i for i in range(block.bit_length() - 1)):
            pairs = numbers.reshape(-1, 2, distance)
            first, second = pairs[:, 0], pairs[:, 1]
            pairs[:, 0], pairs[:, 1] = first + second, first - second
        return numbers * np.float32(block**-0.5)


def simple_add(a: Any, b: Any) -> np.ndarray:
    """Returns a + b."""
    return np.asarray(a + b)
