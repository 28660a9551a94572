"""The comparison with the oracle tells padding from sums whose terms cancel."""

from __future__ import annotations

import numpy as np
import pytest

from harness.compare import assert_close, assert_close_on_cuda
from tests.cases.case import Case


def test_padding_is_zero() -> None:
    zeros = np.zeros((2, 1, 4), np.float32)
    almost = zeros + np.float32(1e-9)
    with pytest.raises(AssertionError, match="allowed 0"):
        assert_close(almost, zeros, "float32")
    assert_close(almost, zeros, "float32", is_sum=np.ones(2, bool))


def test_a_sum_whose_terms_cancel_is_no_padding() -> None:
    """Such a sum is as exact as any other. Two equal keys weigh 1/2 each."""
    case = Case(id="cancel", sequences=((1, 2),), head_size=1, num_heads=1, num_kv_heads=1)
    inputs, attributes = case.inputs(), case.attributes()
    block = inputs.kv_cache[inputs.block_tables[0, 0]]
    block[:2, 0], block[:2, 1] = 1, [[0.3], [-0.3]]
    result = np.zeros_like(inputs.query)
    result[0] = 1e-9
    assert_close_on_cuda(result, inputs, attributes)
    result[-1] = 1e-9  # padding
    with pytest.raises(AssertionError, match="allowed 0"):
        assert_close_on_cuda(result, inputs, attributes)
