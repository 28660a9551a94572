"""The CUDA tests on the PTX machine (tests/ptx): the same cases as on the emulated GPU, with the
kernels as nvcc emits them. `make test` runs a share of them, for sm_90a; `make test-all` all, for
sm_80 too."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.compare import assert_close_on_cuda
from tests.cases.case import Case
from tests.support import native, selection
from tests.support.gpu import EmulatedGpu, attend

# The decode kernel reads query rows past the last one, which it never writes and does not use.
ALLOWED = {"XLA_GPU_PTX_UNWRITTEN": "1"}

# Target, tests and the share of them that `make test` runs.
SHARES = [
    (90, "simple_add or kv_cache_update", 4),
    (90, "test_paged_attention and not on_hopper and not pipelined and not tall", 24),
    (90, "hopper", 8),
    (90, "pipelined", 8),
    (80, "not hopper and not pipelined and not tall", None),
    (90, "hopper or pipelined or tall", None),
]


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest) -> Path:
    """A build of the module on the PTX machine: that of the option --emulated, or a new one."""
    if path := request.config.getoption("--emulated"):
        return Path(path)
    if selection.everything:
        return native.on_ptx_machine("80-real;90a-real", "128;256")
    return native.on_ptx_machine("native", "128")


@pytest.fixture(scope="module")
def ptx_native(module: Path) -> Any:
    return native.load(module, "ptx._native")


@pytest.mark.parametrize(("target", "tests", "share"), SHARES)
def test_cuda_kernels(target: int, tests: str, share: int | None, module: Path) -> None:
    if not selection.everything and share is None:
        pytest.skip("only with --all")
    file = Path(__file__).with_name("test_cuda_kernel.py")
    outcome = native.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", file, "--emulated", module),
        *("-k", tests, f"--shard=1/{share or 1}"),
        environment={"XLA_GPU_PTX_TARGET": str(target)} | (ALLOWED if "pipelined" in tests else {}),
    )
    assert outcome.returncode == 0, outcome.stdout
    assert re.search(r"[1-9]\d* passed", outcome.stdout)


# Kernels, and what chooses them.
KERNELS = {
    "TensorCoreAttention": {},
    "Combine": {},
    "HopperAttention": {"prefill": "hopper"},
    "DecodeAttention": {"decode": "pipelined"},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_missing_wait_is_found(
    kernel: str, ptx_native: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each barrier, wait and fence of a kernel is removed, one at a time. Without that, the same
    calls pass."""
    gpu = EmulatedGpu(ptx_native, KERNELS[kernel])
    cases = [
        Case(id="faults", sequences=sequences, num_heads=4, head_size=128, dtype="bfloat16")
        for sequences in [((1, 900), (70, 200)), ((1, 70), (1, 700), (3, 5))]
    ]
    if kernel == "DecodeAttention":
        monkeypatch.setenv(*next(iter(ALLOWED.items())))
    monkeypatch.setenv("XLA_GPU_PTX_MOST_INSTRUCTIONS", "3000000")  # of a thread block
    calls = [(case.inputs(), case.attributes()) for case in cases]

    def run_all() -> str | None:
        for (inputs, attributes), seed in itertools.product(calls, (1, 2)):
            try:
                result = attend(gpu, inputs, **attributes, seed=seed)
                assert_close_on_cuda(result, inputs, attributes)
            except (RuntimeError, AssertionError) as error:
                return str(error)
        return None

    assert run_all() is None
    found, missed = [], []
    for number in itertools.count(0, 1 if selection.everything else 7):
        monkeypatch.setenv("XLA_GPU_PTX_FAULT", f"{kernel} {number}")
        error = run_all()
        if error is not None and "no such wait" in error:  # all were removed
            break
        said = capfd.readouterr().err
        if "reached" in said:  # by these calls
            (found if error else missed).append(said.split("\n")[0])
    assert found and len(missed) <= len(found), missed
