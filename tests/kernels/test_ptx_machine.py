"""The CUDA tests on the PTX machine (tests/ptx): the same cases as on the emulated GPU, with the
kernels as nvcc emits them. `make test` runs a share of them, for sm_90a; `make test-all` all, for
sm_80 too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import native, selection

# Target, tests and the share of them that `make test` runs.
SHARES = [
    (90, "simple_add or kv_cache_update", 4),
    (90, "test_paged_attention and not on and not pipelined and not tall", 12),
    (90, "hopper", 4),
    (90, "pipelined", 4),
    (80, "not hopper and not pipelined and not tall", None),
    (90, "hopper or pipelined or tall", None),
]


@pytest.fixture(scope="module")
def module() -> Path:
    if selection.everything:
        return native.on_ptx_machine("80-real;90a-real", "128;256")
    return native.on_ptx_machine("native", "128")


@pytest.mark.parametrize(("target", "tests", "share"), SHARES)
def test_cuda_kernels(target: int, tests: str, share: int | None, module: Path) -> None:
    if not selection.everything and share is None:
        pytest.skip("only with --all")
    file = Path(__file__).with_name("test_cuda_kernel.py")
    outcome = native.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", file, "--emulated", module),
        *("-k", tests, f"--shard=1/{share or 1}"),
        environment={"XLA_GPU_PTX_TARGET": str(target)},
    )
    assert outcome.returncode == 0, outcome.stdout
    assert re.search(r"[1-9]\d* passed", outcome.stdout)
