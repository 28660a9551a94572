"""Draws the trials of a campaign. Each is a function of the campaign's seed and its own number.

Trials of one group have the same shapes and attributes, so that a compiler compiles once for them.
"""

from __future__ import annotations

import random
from typing import Any

from tests.cases.case import FEATURES, Case
from tests.cases.random_calls import attention_case, update_case, varlen_case
from tests.cases.updates import NORM_OPTIONS, UpdateCase
from tests.cases.varlen import VarlenCase
from tests.reliability.fuzz.trials import AnyCase, Change, Trial

GROUP = 64
SHARE_OF_UPDATES = 0.2  # of the groups: calls of kv_cache_update
SHARE_OF_TRAINING = 0.2  # of the groups: calls of varlen_attention and its backward pass

_HUGE = (2**31 - 1, -(2**31), 2**31 - 2)
_HUGE_64 = (2**31, 2**32, 2**62, 2**63 - 1, -(2**62), -(2**63))
_SCALARS: dict[str, tuple[Any, ...]] = {
    "scale": (float("nan"), float("inf"), 2.0**126, 2.0**127, -3e38, 1e300, 0.0, 0.1),
    "soft_cap": (0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e-50, 3e38, 2.0),
    "sliding_window": (0, -1, 1, 2, 2**63 - 1, -(2**63)),
    "window_right": (-1, 0, 1, 2**63 - 1, -(2**63)),
    "max_query_len": (0, -1, 1, 2, 5, 2**63 - 1, -(2**63)),
    "value_head_size": (0, -1, 1, 2, 512, 2**63 - 1, -(2**63)),
}
_LAYOUT = ("num_blocks", "block_size", "num_kv_heads", "block_stride", "position_stride")
_LAYOUT += ("head_stride", "value_offset", "key_unit", "value_unit")


def trial(seed: int, family: str, number: int) -> Trial:
    """The trial of a number."""
    group_rng = random.Random(f"{seed} {family} {number // GROUP}")
    trial_rng = random.Random(f"{seed} {family} {number} values")
    name = f"fuzz {seed} {family} {number}"
    share = group_rng.random()
    if share < SHARE_OF_UPDATES:
        case: AnyCase = update_case(name, group_rng, trial_rng)
    elif share > 1 - SHARE_OF_TRAINING:
        case = varlen_case(name, group_rng, trial_rng)
    else:
        case = attention_case(name, group_rng, trial_rng)
    more_columns = group_rng.choice([0, 0, 0, 1, 5, 8, 64])
    handler_only = False
    if family == "valid":
        changes: tuple[Change, ...] = ()
    elif family == "handler" and isinstance(case, VarlenCase):
        handler_only = True
        changes = _handler_changes(case, trial_rng)
    elif family == "handler":
        handler_only = True
        changes = (
            _layout_changes(case, trial_rng)
            if trial_rng.random() < 0.7
            else _row_changes(case, more_columns, trial_rng)
        )
    elif (isinstance(case, UpdateCase) and case.num_tokens == 0) or trial_rng.random() < 0.15:
        handler_only = True
        changes = _handler_changes(case, trial_rng)
    else:
        change: Any = {Case: _attention_change, VarlenCase: _varlen_change}.get(type(case))
        change = change or _token_change
        changes = tuple(change(case, trial_rng) for _ in range(trial_rng.choice([1, 1, 1, 2, 3])))
    return Trial(case, changes, handler_only, more_columns)


def _varlen_change(case: VarlenCase, rng: random.Random) -> Change:
    is_causal = "causal" not in case.options and "causal" not in case.arrays
    if rng.random() < 0.2:
        unused = {"value_head_size", *(["window_right"] if is_causal else [])}
        name = rng.choice([x for x in _SCALARS if x not in unused])
        return Change(name, rng.choice(_SCALARS[name]))
    max_seqs, num_tokens = len(case.lengths) + case.padding, case.num_tokens + case.padding
    choices = [("num_seqs", max_seqs, (0,))]
    choices.append(("query_start_loc", num_tokens, (rng.randint(0, len(case.lengths)),)))
    if "causal" in case.arrays and max_seqs > 0:
        choices.append(("causal", 1, (rng.randrange(max_seqs),)))
    if "prefix_seqs" in case.arrays and max_seqs > 0:
        s = rng.randrange(max_seqs)
        choices.append(("prefix_seqs", s, (s,)))
    if "bidirectional_ranges" in case.arrays and num_tokens > 0:
        token = (rng.randrange(num_tokens), rng.randint(0, 1))
        choices.append(("bidirectional_ranges", num_tokens, token))
    name, limit, index = rng.choice(choices)
    return Change(name, _number(rng, limit), index)


def _number(rng: random.Random, limit: int) -> int:
    """An int32, mostly around 0 and a limit, where the rules change."""
    near = (-1, 0, 1, limit - 1, limit, limit + 1)
    return rng.choice([rng.choice(near), rng.randint(0, limit + 2), rng.choice(_HUGE)])


def _attention_change(case: Case, rng: random.Random) -> Change:
    if rng.random() < 0.15:
        unused = {"window_right": case.causal, "value_head_size": case.value_head_size is None}
        names = [x for x in _SCALARS if not unused.get(x)]
        name = rng.choice(names)
        return Change(name, rng.choice(_SCALARS[name]))
    longest = [-(-context // case.block_size) for _, context in case.sequences]
    max_seqs = len(case.sequences) + case.padding_seqs
    width = max(longest, default=0) + case.padding_blocks
    num_blocks = sum(longest) + case.unused_blocks
    num_tokens = sum(q for q, _ in case.sequences) + case.first_token + case.padding_tokens
    # Mostly entries of real sequences, and in a table those that are needed.
    s = rng.randrange(max(1, rng.choice([max_seqs, len(case.sequences)])))
    entries = longest[s] if s < len(longest) and rng.random() < 0.8 else width
    choices = [("num_seqs", max_seqs, (0,) * len(case.num_seqs_shape))]
    if max_seqs > 0:
        choices.append(("query_start_loc", num_tokens, (s + rng.randint(0, 1),)))
        choices.append(("context_lens", width * case.block_size, (s,)))
    if max_seqs > 0 and entries > 0:
        choices.append(("block_tables", num_blocks, (s, rng.randrange(entries))))
    if case.causal_seqs and max_seqs > 0:
        choices.append(("causal", 1, (s,)))
    if case.ranges is not None and num_tokens > 0:
        token = rng.randrange(num_tokens)
        choices.append(
            ("bidirectional_ranges", width * case.block_size, (token, rng.randint(0, 1)))
        )
    if case.tree is not None and num_tokens > 0:
        # One bit, mostly just past those that are allowed.
        token, bit = rng.randrange(num_tokens), rng.choice([0, 1, 2, 3, 5, 30])
        choices.append(("tree_mask", 2**bit, (token, rng.randint(0, 1))))
    name, limit, index = rng.choice(choices)
    return Change(name, _number(rng, limit), index)


def _token_change(case: UpdateCase, rng: random.Random) -> Change:
    token = (rng.randrange(case.num_tokens),)
    if case.rotary_dim is not None and rng.random() < 0.5:
        return Change("positions", _number(rng, case.num_tokens + 5), token)
    num_slots = (-(-case.num_tokens // case.block_size) + 3) * case.block_size
    value = _number(rng, num_slots)
    if case.slot_dtype == "int64" and rng.random() < 0.3:
        value = rng.choice(_HUGE_64)
    return Change("slot_mapping", value, token)


_OF_UPDATES = ["interleaved", "query_heads", *NORM_OPTIONS, "v_norm", "k_hadamard", "v_hadamard"]


def _handler_changes(case: AnyCase, rng: random.Random) -> tuple[Change, ...]:
    """Attributes that no check in Python lets through."""
    op = Trial(case).op
    names = [*_LAYOUT, *FEATURES[op]]
    names += _OF_UPDATES if isinstance(case, UpdateCase) else _SCALARS
    changes_layout = rng.random() < 0.5 and not isinstance(case, VarlenCase)
    chosen = _LAYOUT if changes_layout else rng.sample(names, rng.choice([1, 1, 2]))
    changes = []
    for name in chosen:
        if name in ("scale", "soft_cap"):
            value = rng.choice([x for x in _SCALARS[name] if abs(x) != 1e300])
        else:
            sizes = (getattr(case, "block_size", 1), case.head_size)
            small = rng.choice([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, *sizes])
            value = rng.choice([small, small, small * 2, rng.choice(_HUGE), rng.choice(_HUGE_64)])
        changes.append(Change(name, value))
    return tuple(changes)


def _row_changes(case: Case | UpdateCase, more: int, rng: random.Random) -> tuple[Change, ...]:
    """Sizes of rows that mostly fit them, at least one of which is another."""
    heads = case.num_heads if isinstance(case, Case) else case.num_kv_heads
    size = case.head_size
    changed = rng.choice([("row_heads",), ("row_head_size",), ("row_heads", "row_head_size")])
    near = (0, -1, 1, heads, heads + 1, 2 * heads, size, size + 1, 2 * size, heads * size + more)
    return tuple(
        Change(name, rng.choice([rng.choice(near), rng.choice(_HUGE), rng.choice(_HUGE_64)]))
        for name in changed
    )


def _layout_changes(case: Case | UpdateCase, rng: random.Random) -> tuple[Change, ...]:
    """A layout with the sizes of the cache and strides that mostly fit it, some numbers replaced by
    huge ones."""
    head_size = case.head_size
    numbers = {
        "num_blocks": rng.choice([1, 2, 3]),
        "block_size": case.block_size,
        "num_kv_heads": case.num_kv_heads,
        "block_stride": rng.choice([0, 1, head_size, case.block_size * head_size]),
        "position_stride": rng.choice([0, 1, head_size]),
        "head_stride": rng.choice([0, 1, head_size]),
        "value_offset": rng.choice([0, 1, head_size, head_size + 1]),
        "key_unit": rng.choice([1, 1, 2, head_size]),
        "value_unit": rng.choice([1, 1, 2, head_size + 1]),
    }
    for name in rng.sample([*numbers], rng.choice([0, 1, 1, 2, 3])):
        numbers[name] = rng.choice([0, -1, *_HUGE, *_HUGE_64])
    return tuple(Change(name, value) for name, value in numbers.items())
