"""The CUDA tests on the PTX machine (tests/ptx): the same cases as on the emulated GPU, with the
kernels as nvcc emits them, which takes minutes to build. Only with --all."""

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

pytestmark = pytest.mark.skipif(not selection.everything, reason="builds for minutes: --all")

TESTS = "test_paged_attention or long_queries or faulty_metadata or simple_add or kv_cache_update"
# There the first kernel's result holds the lengths, which the second one reads before that has ended.
NOT_EARLY = "lengths_that_change"


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest) -> Path:
    """A build of the module on the PTX machine: that of the option --emulated, or a new one."""
    if path := request.config.getoption("--emulated"):
        return Path(path)
    return native.on_ptx_machine("80-real;90a-real", "128;256;512;576")


@pytest.fixture(scope="module")
def ptx_native(module: Path) -> Any:
    return native.load(module, "ptx._native")


def run(module: Path, capability: int, *options: str) -> None:
    """Runs the tests of the emulated GPU."""
    folder = Path(__file__).parent
    outcome = native.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--emulated", module),
        *(folder / "test_cuda_kernel.py", folder / "test_cuda_errors.py", *options),
        environment={"XLA_GPU_TEST_CAPABILITY": str(capability)},
    )
    assert outcome.returncode == 0, outcome.stdout
    assert re.search(r"[1-9]\d* passed", outcome.stdout)


@pytest.mark.parametrize("capability", [80, 90])
def test_all_cases(capability: int, module: Path) -> None:
    run(module, capability, "--all", "-k", TESTS)


@pytest.mark.parametrize("capability", [80, 90])
def test_a_share_of_everything_else(capability: int, module: Path) -> None:
    """Bits in any batch, random calls, extreme numbers, errors of CUDA."""
    run(module, capability, "-k", f"not ({TESTS}) and not {NOT_EARLY}")


def test_small_head_sizes() -> None:
    """The kernels for them, where the module above pads the heads."""
    run(native.on_ptx_machine("80-real", "64;80;96;112", 64), 80, "-k", "test_paged_attention")


# Kernels, and what chooses them.
KERNELS = {
    "TensorCoreAttention": "portable",
    "Combine": "portable",
    "HopperAttention": "by GPU",
    "DecodeAttention": "by GPU",
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
    for number in itertools.count():
        monkeypatch.setenv("XLA_GPU_PTX_FAULT", f"{kernel} {number}")
        error = run_all()
        if error is not None and "no such wait" in error:  # all were removed
            break
        said = capfd.readouterr().err
        if "reached" in said:  # by these calls
            (found if error else missed).append(said.split("\n")[0])
    assert found and len(missed) <= len(found), missed
