"""Random calls that the contract allows, for campaigns and for hypothesis.

`group_rng` draws shapes and options, for which a compiler compiles a program, `trial_rng` what else
differs from call to call.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st

from harness.arrays import CODES, QUANTIZED, SCALE_DTYPES
from harness.layouts import LATENT_LAYOUTS, LAYOUTS, SEPARATE_LAYOUTS
from tests.cases.case import FEATURES, RANGES, SCALES, TREES, Case, Groups
from tests.cases.updates import NORM_OPTIONS, NORMS, UpdateCase
from tests.cases.varlen import VarlenCase

SHARE_OF_LATENT = 0.15  # of the calls: V is a part of K


def attention_cases() -> st.SearchStrategy[Case]:
    """Calls of paged_attention."""
    return st.randoms(use_true_random=False).map(
        lambda rng: attention_case(f"random-{rng.getrandbits(32)}", rng, rng)
    )


def _features(rng: random.Random, is_latent: bool) -> dict[str, Any]:
    """What attention and updates have in common."""
    layouts = LATENT_LAYOUTS if is_latent else LAYOUTS
    large = (64, 80, 128, 256, 512, 576) if is_latent else (64, 80, 128, 256)
    cache_dtype = rng.choice([None, None, *QUANTIZED, "e2m1"])
    head_size = rng.choice([rng.randint(1, 40), 8, 16, 32, rng.choice(large)])
    kv_layout = rng.choice([None, None, *layouts])
    own_value_head_size = None
    if kv_layout in SEPARATE_LAYOUTS and not is_latent:
        own_value_head_size = rng.choice([None, rng.randint(1, head_size), max(1, head_size // 2)])
    value_cache_dtype = None
    if kv_layout in SEPARATE_LAYOUTS and not is_latent and rng.random() < 0.5:
        of_4_bits = rng.choice([*CODES])
        value_cache_dtype = {"int8": of_4_bits, "int4": "int8", "e2m1": "int8"}.get(
            cache_dtype or ""
        )
    if {cache_dtype, value_cache_dtype} & {*CODES}:
        head_size += head_size % 2
        own_value_head_size = own_value_head_size and own_value_head_size + own_value_head_size % 2
    return {
        "head_size": head_size,
        "block_size": rng.choice([1, 2, 3, 4, 8, 16, rng.randint(1, 70)]),
        "dtype": rng.choice(["float32", "float16", "bfloat16"]),
        "cache_dtype": cache_dtype,
        "value_cache_dtype": value_cache_dtype,
        "scales": rng.choice(SCALES) if cache_dtype else None,
        "groups": _groups(rng, head_size, own_value_head_size) if cache_dtype else None,
        "kv_layout": kv_layout,
        "own_value_head_size": own_value_head_size,
    }


def _groups(rng: random.Random, head_size: int, own_value_head_size: int | None) -> Groups | None:
    """Scales of groups for a third of the calls. The groups have an even size."""
    size = rng.choice([2, 4, 6, 8, 16, 32, 48])
    if rng.random() < 0.67 or head_size % size or (own_value_head_size or size) % size:
        return None
    return Groups(size, rng.choice(SCALE_DTYPES), rng.random() < 0.5)


def _num_kv_heads(features: dict[str, Any], is_latent: bool, rng: random.Random) -> int:
    has_heads = not is_latent or "h" in (features["kv_layout"] or "")
    return rng.choice([1, 1, 2, 3, 5]) if has_heads else 1


def update_case(name: str, group_rng: random.Random, trial_rng: random.Random) -> UpdateCase:
    num_tokens = group_rng.choice([0, 1, group_rng.randint(2, 20)])
    is_large = group_rng.random() < 0.03  # enough for several threads
    is_latent = group_rng.random() < SHARE_OF_LATENT
    features = _features(group_rng, is_latent)
    num_kv_heads = _num_kv_heads(features, is_latent, group_rng)
    rotary = {} if is_latent else _rotary(features, num_kv_heads, group_rng)
    norms = {} if is_latent else _norms(features, num_kv_heads, rotary, group_rng)
    hadamard = {} if is_latent else _hadamard(features, group_rng)
    made_scales: tuple[str, ...] = ()
    if features["cache_dtype"] and group_rng.random() < 0.3:
        names = ("k_scale",) if is_latent else ("k_scale", "v_scale")
        made_scales = group_rng.choice([names, names, names[:1], names[-1:]])
    return UpdateCase(
        id=name,
        num_tokens=600 if is_large else num_tokens,
        num_kv_heads=num_kv_heads,
        is_latent=is_latent,
        slot_dtype=group_rng.choice(["int32", "int64"]),
        key_factor=group_rng.choice([1.0, 100.0, 2.0**-12]) if features["cache_dtype"] else 1.0,
        num_padding=trial_rng.choice([0, trial_rng.randint(0, num_tokens), num_tokens]),
        made_scales=made_scales,
        **features,
        **rotary | norms | hadamard,
    )


def _may_be_copied(features: dict[str, Any]) -> bool:
    """Whether keys may have the dtype of a quantized cache."""
    is_scaled = features["scales"] is not None or features["groups"] is not None
    return features["cache_dtype"] and not is_scaled and features["dtype"] == "float16"


def _rotary(features: dict[str, Any], num_kv_heads: int, rng: random.Random) -> dict[str, Any]:
    """A rotary embedding of half of the updates that may have one."""
    dtype, head_size = features["dtype"], features["head_size"]
    if _may_be_copied(features) or head_size < 2 or rng.random() < 0.5:
        return {}
    return {
        "rotary_dim": 2 * rng.choice([head_size // 2, rng.randint(1, head_size // 2)]),
        "interleaved": rng.random() < 0.5,
        "table_dtype": rng.choice(["float32", dtype]),
        "position_dtype": rng.choice(["int32", "int64"]),
        "num_heads": num_kv_heads * rng.choice([0, 1, 3, 4]),
    }


def _norms(
    features: dict[str, Any], num_kv_heads: int, rotary: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Norms of a third of the updates that may have them."""
    dtype = features["dtype"]
    if _may_be_copied(features) or rng.random() < 0.67:
        return {}
    norm, v_norm = rng.choice([*NORMS, NORMS[1]]), rng.random() < 0.3
    may_be_after = rotary and norm == "per head"
    options = [x for x in NORM_OPTIONS if x != "norm_after_rope" or may_be_after]
    return {
        "norm": norm,
        "norm_dtype": rng.choice(["float32", dtype]),
        "v_norm": v_norm,
        "norm_options": tuple(x for x in options if norm and rng.random() < 0.4),
    } | ({"num_heads": num_kv_heads * rng.choice([0, 1, 3])} if norm and not rotary else {})


def _hadamard(features: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Walsh-Hadamard transforms of a third of the updates that may have them."""
    if _may_be_copied(features) or rng.random() < 0.67:
        return {}
    hadamard = rng.choice(["k", "v", "kv"])
    is_one_size = features.get("own_value_head_size") in (None, features["head_size"])
    may_have_signs = is_one_size or hadamard == "k"
    return {"hadamard": hadamard, "has_signs": may_have_signs and rng.random() < 0.5}


def attention_case(name: str, group_rng: random.Random, trial_rng: random.Random) -> Case:
    rng = group_rng
    is_latent = rng.random() < SHARE_OF_LATENT
    features = _features(rng, is_latent)
    is_large = rng.random() < 0.03  # enough for several threads and splits
    block_size = features["block_size"]
    longest = rng.choice([300, 700]) if is_large else rng.choice([4, 20, 20, 70])
    num_tokens = rng.randint(8, 40) if is_large else rng.choice([0, 1, 3, rng.randint(0, 12)])
    max_seqs = rng.randint(0, 4)
    width = -(-longest // block_size)
    max_blocks, num_blocks = width + rng.randint(0, 2), max_seqs * width + rng.randint(0, 3)
    num_kv_heads = _num_kv_heads(features, is_latent, rng)
    num_heads = num_kv_heads * rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 16])
    causal = rng.random() < 0.7
    max_query_len = rng.choice([None, None, 1, 3, max(1, num_tokens)])
    fields = features | {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "scale": rng.choice([None, None, 0.0, rng.uniform(-0.5, 0.5)]),
        "sliding_window": rng.choice([None, None, 1, rng.randint(1, 80), 2**63 - 1]),
        "soft_cap": rng.choice([None, None, rng.uniform(0.5, 50)]),
        "sinks": rng.random() < 0.25,
        "alibi_slopes": rng.random() < 0.25,
        "causal": causal,
        "causal_seqs": not causal and rng.random() < 0.4,
        "window_right": None if causal else rng.choice([None, 0, rng.randint(0, 40)]),
        "max_query_len": max_query_len,
        "return_lse": rng.random() < 0.5,
        "num_seqs_shape": rng.choice([(), (1,)]),
        "query_factor": rng.choice([1.0, 1.0, 8.0]),
        "value_head_size": rng.randint(1, features["head_size"]) if is_latent else None,
    }
    window = fields["sliding_window"] or 64
    if causal and not fields["alibi_slopes"] and window >= 64:
        fields["tree"] = rng.choice(TREES)
    if fields.get("tree") is None:
        fields["ranges"] = rng.choice([None, *RANGES])

    first_token = trial_rng.choice([0, 0, trial_rng.randint(0, num_tokens)])
    left, sequences = num_tokens - first_token, []
    for _ in range(trial_rng.randint(0, max_seqs)):
        most = min(left, max_query_len or left, longest)
        q_len = trial_rng.choice([min(1, most), trial_rng.randint(0, most)])
        near = trial_rng.randint(0, width) * block_size + trial_rng.randint(-1, 1)
        context = trial_rng.choice([trial_rng.randint(0, longest), near, q_len])
        is_causal = causal or (fields["causal_seqs"] and len(sequences) % 2 == 0)
        context = min(longest, max(context, q_len if is_causal else 0))
        sequences.append((q_len, context))
        left -= q_len
    blocks = [-(-context // block_size) for _, context in sequences]
    is_full = bool(blocks) and min(blocks) > 0
    return Case(
        id=name,
        sequences=tuple(sequences),
        first_token=first_token,
        padding_tokens=left,
        padding_seqs=max_seqs - len(sequences),
        padding_blocks=max_blocks - max(blocks, default=0),
        unused_blocks=num_blocks - sum(blocks),
        shared_blocks=trial_rng.choice([0, 0, 0, 1, trial_rng.randint(0, width)]),
        nan_in_last_position=is_full and causal and trial_rng.random() < 0.1,
        **fields,
    )


def varlen_case(name: str, group_rng: random.Random, trial_rng: random.Random) -> VarlenCase:
    rng = group_rng
    num_kv_heads, head_size = rng.choice([1, 1, 2, 3, 5]), rng.choice([rng.randint(1, 40), 64, 128])
    num_tokens = rng.choice([0, 1, 5, rng.randint(2, 40), rng.randint(130, 300)])
    max_seqs = rng.randint(0, 4)
    arrays = [x for x in FEATURES["varlen_attention"] if rng.random() < 0.3]
    options: dict[str, Any] = {"scale": rng.choice([head_size**-0.5, 0.0, rng.uniform(-0.5, 0.5)])}
    if rng.random() < 0.4:
        options["sliding_window"] = rng.choice([1, rng.randint(1, 200), 2**63 - 1])
    if rng.random() < 0.3:
        options["soft_cap"] = rng.uniform(0.5, 50)
    if "causal" not in arrays and rng.random() < 0.4:
        options["causal"] = False
    if "causal" in arrays or "causal" in options:
        options["window_right"] = rng.choice([None, 0, rng.randint(0, 150)])
    if rng.random() < 0.3:
        options["max_query_len"] = max(1, num_tokens)
    left, lengths = num_tokens, []
    for _ in range(trial_rng.randint(0, max_seqs)):
        lengths.append(trial_rng.choice([min(1, left), left, trial_rng.randint(0, left)]))
        left -= lengths[-1]
    return VarlenCase(
        name,
        tuple(lengths),
        num_heads=num_kv_heads * rng.choice([1, 1, 2, 3, 4, 7]),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=rng.choice([None, rng.randint(1, head_size)]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        arrays=tuple(arrays),
        options=options,
        padding=rng.choice([0, 1, 3]),
    )
