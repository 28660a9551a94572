"""The table of docs/features/README.md, which says which features are tested on which backends.

A test with the mark `proves("a column", ...)` belongs to these columns, for every feature of its
cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any


def _is_latent(case: Any) -> bool:
    return case.is_latent if hasattr(case, "is_latent") else case.value_head_size is not None


def _is_separate(case: Any) -> bool:
    return case.kv_layout is not None and "2" not in case.kv_layout and not _is_latent(case)


def _has_cache_of(dtype: str) -> Callable[[Any], bool]:
    return lambda case: case.cache_dtype == dtype and not case.value_cache_dtype


_OF_ATTENTION: dict[str, Callable[[Any], Any]] = {
    "paged_attention": lambda case: True,
    "sliding window": lambda case: case.sliding_window is not None,
    "soft cap": lambda case: case.soft_cap is not None,
    "log-sum-exp": lambda case: case.return_lse,
    "sinks": lambda case: case.sinks,
    "ALiBi": lambda case: case.alibi_slopes,
    "tree mask": lambda case: case.tree is not None,
    "bidirectional ranges": lambda case: case.ranges is not None,
    "not causal": lambda case: not case.causal,
    "causal by sequence": lambda case: case.causal_seqs,
    "window to the right": lambda case: case.window_right is not None,
    "max_query_len": lambda case: case.max_query_len is not None,
    "fewer keys than queries": lambda case: any(q > context for q, context in case.sequences),
    "another layout": lambda case: case.kv_layout is not None,
    "K and V in two arrays": _is_separate,
    "V with a head size of its own": lambda case: case.own_value_head_size is not None,
    "V as a part of K": _is_latent,
    "float8_e4m3fn cache": _has_cache_of("float8_e4m3fn"),
    "float8_e5m2 cache": _has_cache_of("float8_e5m2"),
    "int8 cache": _has_cache_of("int8"),
    "int4 cache": _has_cache_of("int4"),
    "int8 and int4 cache": lambda case: case.value_cache_dtype is not None,
    "a scale for each kv head": lambda case: case.scales == "per head",
    "a scale for each position": lambda case: case.scales == "per position",
}
_OF_UPDATES: dict[str, Callable[[Any], Any]] = {
    "kv_cache_update": lambda case: True,
    "kv_cache_update in another layout": lambda case: case.kv_layout is not None,
    "kv_cache_update of two arrays": _is_separate,
    "kv_cache_update of K alone": _is_latent,
    "kv_cache_update to 8 bits": lambda case: case.cache_dtype not in (None, "int4"),
    "kv_cache_update to 4 bits": lambda case: "int4" in (case.cache_dtype, case.value_cache_dtype),
    "kv_cache_update with a scale for each position": lambda case: case.scales == "per position",
    "kv_cache_update that makes the scales": lambda case: bool(case.made_scales),
    "kv_cache_update with a rotary embedding": lambda case: case.rotary_dim is not None,
}
"""By name, whether a case uses a feature; in the table's order."""


def _features_of(case: Any) -> list[str]:
    features = _OF_ATTENTION if hasattr(case, "sequences") else _OF_UPDATES
    return [name for name, is_used in features.items() if is_used(case)]


def summary(tests: Iterable[Callable[..., None]]) -> str:
    """The page's table: features that are tested on the same backends share a row."""
    columns: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        marks = getattr(test, "pytestmark", ())
        found = [name for mark in marks if mark.name == "proves" for name in mark.args]
        for mark in marks if found else ():
            if mark.name == "parametrize" and "case" in mark.args[0]:
                for case in mark.args[1]:
                    features = _features_of(case[-1] if isinstance(case, tuple) else case)
                    for column in found:
                        columns[column].update(features)
    merged: dict[frozenset[str], list[str]] = defaultdict(list)
    for column, features in columns.items():
        merged[frozenset(features)].append(column)
    rows: dict[tuple[bool, ...], list[str]] = defaultdict(list)
    for feature in (*_OF_ATTENTION, *_OF_UPDATES):
        rows[tuple(feature in features for features in merged)].append(feature)
    lines = [["", *map(", ".join, merged.values())], ["---"] * (len(merged) + 1)]
    lines += [[", ".join(names), *("✓" if x else "" for x in row)] for row, names in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in lines)
