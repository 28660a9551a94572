"""The tables of features and backends: `make test-all` counts passed tests in one, and
docs/features/README.md has one that says which features are tested where.

A test with the mark `proves("a column", ...)` belongs to these columns, for every feature of its
case. Names in braces stand for the test's parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


class FeatureTable:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        for name, value in report.user_properties:
            if name == "proves":
                features, columns = value  # type: ignore[misc]
                self._counts.update((f, c) for f in features for c in columns)

    def pytest_sessionfinish(self) -> None:
        rows = list(dict.fromkeys(feature for feature, _ in self._counts))
        columns = sorted({column for _, column in self._counts})
        lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for row in sorted(rows, key=FEATURES.index):
            cells = [str(self._counts[row, column] or "") for column in columns]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        self._path.write_text("\n".join([*lines, ""]))


FEATURES = [
    "paged_attention",
    "sliding window",
    "soft cap",
    "log-sum-exp",
    "sinks",
    "ALiBi",
    "tree mask",
    "bidirectional ranges",
    "not causal",
    "causal by sequence",
    "window to the right",
    "max_query_len",
    "fewer keys than queries",
    "another layout",
    "K and V in two arrays",
    "V with a head size of its own",
    "V as a part of K",
    "float8_e4m3fn cache",
    "float8_e5m2 cache",
    "int8 cache",
    "int4 cache",
    "int8 and int4 cache",
    "a scale for each kv head",
    "a scale for each position",
    "kv_cache_update",
    "kv_cache_update in another layout",
    "kv_cache_update of two arrays",
    "kv_cache_update of K alone",
    "kv_cache_update to 8 bits",
    "kv_cache_update to 4 bits",
    "kv_cache_update with a scale for each position",
    "kv_cache_update that makes the scales",
    "kv_cache_update with a rotary embedding",
]


def features_of(case: Any) -> list[str]:
    """The features of FEATURES that a case uses."""
    is_latent = getattr(case, "is_latent", False) or (
        hasattr(case, "sequences") and case.value_head_size is not None
    )
    is_separate = case.kv_layout is not None and "2" not in case.kv_layout and not is_latent
    if not hasattr(case, "sequences"):
        used = {
            "kv_cache_update": True,
            "kv_cache_update in another layout": case.kv_layout is not None,
            "kv_cache_update of two arrays": is_separate,
            "kv_cache_update of K alone": is_latent,
            "kv_cache_update to 8 bits": case.cache_dtype not in (None, "int4"),
            "kv_cache_update to 4 bits": "int4" in (case.cache_dtype, case.value_cache_dtype),
            "kv_cache_update with a scale for each position": case.scales == "per position",
            "kv_cache_update that makes the scales": bool(case.made_scales),
            "kv_cache_update with a rotary embedding": case.rotary_dim is not None,
        }
    else:
        used = {
            "paged_attention": True,
            "sliding window": case.sliding_window is not None,
            "soft cap": case.soft_cap is not None,
            "log-sum-exp": case.return_lse,
            "sinks": case.sinks,
            "ALiBi": case.alibi_slopes,
            "tree mask": case.tree is not None,
            "bidirectional ranges": case.ranges is not None,
            "not causal": not case.causal,
            "causal by sequence": case.causal_seqs,
            "window to the right": case.window_right is not None,
            "fewer keys than queries": any(q > context for q, context in case.sequences),
            "max_query_len": case.max_query_len is not None,
            "another layout": case.kv_layout is not None,
            "K and V in two arrays": is_separate,
            "V with a head size of its own": case.own_value_head_size is not None,
            "V as a part of K": is_latent,
            f"{case.cache_dtype} cache": case.cache_dtype and not case.value_cache_dtype,
            "int8 and int4 cache": case.value_cache_dtype is not None,
            "a scale for each kv head": case.scales == "per head",
            "a scale for each position": case.scales == "per position",
        }
    return [feature for feature, is_used in used.items() if is_used]


def summary(tests: Iterable[Callable[..., None]]) -> str:
    """The page's table: features that are tested on the same backends share a row."""
    columns: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        marks = getattr(test, "pytestmark", ())
        found = [name for mark in marks if mark.name == "proves" for name in mark.args]
        for mark in marks if found else ():
            if mark.name == "parametrize" and "case" in mark.args[0]:
                for case in mark.args[1]:
                    features = features_of(case[-1] if isinstance(case, tuple) else case)
                    for column in found:
                        columns[column].update(features)
    merged: dict[frozenset[str], list[str]] = defaultdict(list)
    for column, features in columns.items():
        merged[frozenset(features)].append(column)
    rows: dict[tuple[bool, ...], list[str]] = defaultdict(list)
    for feature in FEATURES:
        rows[tuple(feature in features for features in merged)].append(feature)
    lines = [["", *map(", ".join, merged.values())], ["---"] * (len(merged) + 1)]
    lines += [[", ".join(names), *("✓" if x else "" for x in row)] for row, names in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in lines)


def record_proven_features(item: pytest.Item) -> None:
    """Records the features and columns that a test proves when it passes."""
    marker = item.get_closest_marker("proves")
    if marker is not None:
        parameters = item.callspec.params  # type: ignore[attr-defined]
        columns = [column.format(**parameters) for column in marker.args]
        item.user_properties.append(("proves", (features_of(parameters["case"]), columns)))  # type: ignore[arg-type]
