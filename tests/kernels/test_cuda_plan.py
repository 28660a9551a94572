"""Which CUDA kernels a call launches (plan.h), in every build and without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from shared_ffi import _native

ANY = 2**63 - 1
PORTABLE = {"is_hopper": False}
ZEROS, DECODE, COMBINE = ("zero arrivals", 1, 4), ("decode", 1, 4), ("combine", 1, ANY)
HOPPER = ("Hopper prefill", 5, ANY)
REST = [("portable", 5, 16), ("portable prefill", 17, ANY)]


def plan(**changes: Any) -> list[tuple[str, int, int, int, bool]]:
    """A call with 4 query heads for each kv head, on a Hopper GPU."""
    sizes = {"num_tokens": 64, "num_heads": 8, "num_kv_heads": 2, "max_seqs": 4, "capacity": 4096}
    options = {"sliding_window": 0, "max_query_len": 0}
    kernels = {"has_decode": True, "long_rows": 128, "is_hopper": True, "launches_early": True}
    return _native.cuda_plan(**sizes | options | kernels | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, [ZEROS, DECODE, HOPPER, COMBINE], id="hopper"),
        pytest.param(PORTABLE, [ZEROS, DECODE, *REST, COMBINE], id="portable"),
        pytest.param({"max_query_len": 4}, [ZEROS, DECODE], id="short"),
        pytest.param({"max_query_len": 5}, [ZEROS, DECODE, HOPPER, COMBINE], id="one-too-long"),
        pytest.param(
            PORTABLE | {"max_query_len": 16}, [ZEROS, DECODE, REST[0], COMBINE], id="one-tile"
        ),
        pytest.param({"capacity": 256}, [DECODE, HOPPER, COMBINE], id="unsplit"),
        pytest.param({"sliding_window": 256}, [DECODE, HOPPER, COMBINE], id="short-window"),
        pytest.param(
            {"has_decode": False},
            [("portable", 1, 16), ("Hopper prefill", 17, ANY), COMBINE],
            id="without-decode",
        ),
        pytest.param(
            PORTABLE | {"has_decode": False, "long_rows": 0},
            [("portable", 1, ANY), COMBINE],
            id="one-kernel",
        ),
        pytest.param({"max_seqs": 0}, [COMBINE], id="no-sequences"),
        pytest.param({"num_tokens": 0}, [], id="no-tokens"),
    ],
)
def test_each_query_has_a_kernel(changes: dict[str, Any], expected: list[Any]) -> None:
    """Each number of query tokens up to max_query_len is that of one kernel."""
    launches: list[Any] = [launch for *launch, _, _ in plan(**changes)]
    assert launches == [[*launch] for launch in expected]
    attends = [x for x in launches if x[0] not in ("zero arrivals", "combine")]
    assert [least for _, least, _ in attends[1:]] == [most + 1 for _, _, most in attends[:-1]]


def test_no_kernel_begins_early_that_does_not_wait() -> None:
    """Which is the portable one, unless it is for long queries, and the one that combines where
    nothing comes before it in the call."""
    assert [early for *_, early in plan()] == [True, True, True, True]
    assert [early for *_, early in plan(**PORTABLE)] == [True, True, False, True, True]
    assert not any(early for *_, early in plan(launches_early=False))
    assert [early for *_, early in plan(max_seqs=0)] == [False]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # For 2 kv heads: at most 11 leaves of 4,096 positions for each of 4 sequences; at most 6
        # tiles of 32 of the 64 tokens, with at most 17 splits.
        ({}, [1, 2 * 4 * 11, 2 * 6 * 17, 128]),
        ({"capacity": 256}, [2 * 4, 2 * 6 * 2, 128]),
        ({"num_tokens": 4096}, [1, 2 * 4 * 11, 384, 8192]),  # as many as there are slots
        ({"num_tokens": 4, "max_seqs": 1 << 20}, [1 << 15, 2 * 4 * 11]),
    ],
)
def test_the_grid_has_no_more_blocks_than_work(
    changes: dict[str, Any], expected: list[int]
) -> None:
    assert [num_blocks for *_, num_blocks, _ in plan(**changes)] == expected
