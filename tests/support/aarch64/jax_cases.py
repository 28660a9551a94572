"""A part of the cases in JAX, compared with the oracle. This runs on the emulated machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

import jax_frontend
from harness import reference
from harness.compare import assert_close_on_cpu, assert_same_bits
from tests.cases.all import SHORT_CASES, SHORT_UPDATE_CASES
from tests.support.calls import split_keywords

STEP = 4  # of three dtypes each, so that the dtypes take turns


def in_jax(op: str, inputs: Any, attributes: dict[str, Any]) -> Any:
    arrays, options = split_keywords(attributes)
    jitted = jax.jit(partial(getattr(jax_frontend, op), **options))
    return jax.tree.map(np.asarray, jitted(*inputs, **arrays))


def run() -> int:
    """How many cases there are. All must pass."""
    cases, update_cases = SHORT_CASES[::STEP], SHORT_UPDATE_CASES[::STEP]
    for case in cases:
        inputs, attributes = case.inputs(), case.attributes()
        assert_close_on_cpu(in_jax("paged_attention", inputs, attributes), inputs, attributes)
    for case in update_cases:
        inputs, attributes = case.inputs(), case.attributes()
        expected = reference.kv_cache_update(*inputs, **attributes)
        assert_same_bits(in_jax("kv_cache_update", inputs, attributes), expected)
    return len(cases) + len(update_cases)
