"""The softmax: its scale, the soft cap, sinks, ALiBi, the log-sum-exp, and extreme numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from tests.cases.case import MIXED, Case, Inputs, each_dtype, feature_cases


def _scales() -> Iterator[Case]:
    for scale in (0.0, -0.3, 0.25, 5.0):
        yield from each_dtype(f"scale-{scale}", sequences=MIXED, scale=scale)
    for name, sequences in {"decode": ((1, 140),), "prefill": ((70, 70),)}.items():
        yield from each_dtype(
            f"large-logits-{name}", sequences=sequences, query_factor=30.0, num_heads=2
        )


def _soft_caps() -> Iterator[Case]:
    batches = {"decode": ((1, 150), (1, 3)), "mixed": ((7, 80), (9, 9), (1, 66))}
    for cap, (name, sequences) in product((0.5, 30.0, 50.0), batches.items()):
        yield from each_dtype(
            f"cap-{cap}-{name}", sequences=sequences, block_size=8, soft_cap=cap, query_factor=8.0
        )
    yield from each_dtype("cap-5-scale-0", sequences=batches["mixed"], scale=0.0, soft_cap=5.0)


CASES = [
    *_scales(),
    *_soft_caps(),
    *feature_cases({"lse": {}, "sinks": {"sinks": True}, "alibi": {"alibi_slopes": True}}),
]


def _extreme_numbers() -> dict[str, dict[str, Any]]:
    """Arguments near the ends of float32, or where its tanh alone would lose the logit."""
    caps = {f"cap-{cap:g}": {"soft_cap": cap} for cap in (64.0, 65.0, 1e4, 1e8, 1e30, 3e38)}
    no_scale = {"scale": 0.0}
    head_arrays = {
        f"{name}-{value:g}": {name: np.array([value, 0.5, value, -1], np.float32)}
        for name, values in {
            "sinks": (3e38, np.inf),
            "alibi_slopes": (3e38, -3e38, np.inf),
        }.items()
        for value in values
    }
    return {
        **caps,
        "logits-beyond-the-cap": {"soft_cap": 65.0, "scale": 40.0},
        "least-cap": no_scale | {"soft_cap": 1e-45},
        "least-cap-of-scale-1": {"scale": 1.0, "soft_cap": 2.0**-126},
        "largest-scale-and-cap": {"scale": 2.0**126, "soft_cap": 1.0},
        "least-scale": {"scale": 1e-45, "soft_cap": 3e38},
        **head_arrays,
    }


EXTREME_NUMBERS = _extreme_numbers()


def extreme_call(name: str, dtype: str) -> tuple[Inputs, dict[str, Any]]:
    """The operands and attributes of a call with EXTREME_NUMBERS[name]."""
    case = Case(
        id="extreme",
        sequences=((3, 40), (1, 9), (9, 9)),
        head_size=16,
        dtype=dtype,
        query_factor=3.0,
        return_lse=True,
    )
    return case.inputs(), case.attributes() | EXTREME_NUMBERS[name]
