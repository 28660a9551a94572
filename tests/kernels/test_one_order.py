"""What makes the one order of sums one: a row's bits are its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import one_order
from tests.support.one_order import F, Part, Rows, attend, fold, leaf_at

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows_of(dtype: str, capability: int, deviation: float = 4, length: int = 2600) -> Rows:
    rng = np.random.default_rng(0)
    shapes = ((12, 64), (length, 64), (length, 32))
    query, keys, values = (rng.standard_normal(shape) for shape in shapes)
    keys[length // 2 :] *= 3  # references that follow
    end = np.sort(rng.integers(1, length + 1, 12))
    end[-1] = length
    return Rows(
        (query * deviation).astype(DTYPES[dtype]), keys.astype(DTYPES[dtype]),
        values.astype(DTYPES[dtype]), np.maximum(end - 900, 0), end, 64**-0.5, capability,
        sinks=rng.standard_normal(12).astype(F), holes=rng.random((12, length)) < 0.1,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", [80, 90])
def test_a_row_has_its_own_bits(capability: int, dtype: str) -> None:
    """Alone, as in decoding; in chunks; and beside rows that attend to other leaves."""
    rows = rows_of(dtype, capability)
    together = attend(rows)[0]
    for step in (1, 5):
        parts = [attend(rows.of(slice(i, i + step)))[0] for i in range(0, 12, step)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def leaf_off_by_32(position: int) -> range:
    leaf = leaf_at(max(position - 32, 0))
    return range(leaf.start + 32 if position >= 32 else 0, leaf.stop + 32 if position >= 32 else 32)


def forgetful(total: Part | None, part: Part) -> Part:
    return part if total is not None and total.sum[-1] > 0 else fold(total, part)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("leaf_at", leaf_off_by_32),
        ("fold", forgetful),
        ("SLACK", {"bfloat16": F(8)}),
        ("GROUP", 1024),
        ("ROOM", F(0)),
    ],
)
def test_a_fault_changes_bits(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("bfloat16", 90)
    expected = attend(rows)[0]
    monkeypatch.setattr(one_order, name, fault)
    assert (attend(rows)[0] != expected).any()


@pytest.mark.parametrize("deviation", [1, 3])
def test_errors_are_those_of_rounded_weights(deviation: float) -> None:
    """Weights of 8 bits, the largest of which is not 1: before the output is rounded."""
    rows = rows_of("bfloat16", 90, deviation)
    query, keys, values = (x.astype(np.float64) for x in (rows.query, rows.keys, rows.values))
    logits = query @ keys.T * (rows.scale * np.log2(np.e))
    positions = np.arange(len(keys))
    attends = (rows.begin[:, None] <= positions) & (positions < rows.end[:, None])
    assert rows.holes is not None and rows.sinks is not None
    logits = np.where(attends & ~rows.holes, logits, -np.inf)
    weights = np.exp2(logits - logits.max(axis=1, keepdims=True))
    divisor = weights.sum(axis=1) + np.exp2(rows.sinks - logits.max(axis=1))
    expected = weights @ values / divisor[:, None]
    error = np.sqrt(np.mean((attend(rows)[0] - expected) ** 2) / np.mean(expected**2))
    assert error < 2.5e-3
