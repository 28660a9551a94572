"""The kernel tests of jax and tpu-inference pass with our functions in the place of their kernels.

XLA_GPU_SUITES_OF_OTHERS names a folder with checkouts of both, and each suite's tests take minutes to
an hour, most of it in references that are not compiled. XLA_GPU_SUITES_OF_OTHERS_SELECT is the ``-k``
of the run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("XLA_GPU_SUITES_OF_OTHERS", "not-given"))
SELECT = os.environ.get("XLA_GPU_SUITES_OF_OTHERS_SELECT", "")

SUITES = [
    "tpu-inference/tests/kernels/ragged_kv_cache_update_v2_test.py",
    "tpu-inference/tests/kernels/ragged_paged_attention_kernel_v2_test.py",
    "tpu-inference/tests/kernels/ragged_paged_attention_kernel_v3_test.py",
    "tpu-inference/tests/kernels/ragged_paged_attention_kernel_v3_hd64_test.py",
    "jax/tests/pallas/tpu_ragged_paged_attention_test.py",
    "jax/tests/pallas/tpu_paged_attention_kernel_test.py",
    "jax/tests/pallas/gpu_paged_attention_test.py",
]

# It tests the words of errors. test_compat.py tests ours, for the same bad calls.
LEFT_OUT = "ragged_kv_cache_update_v2_test.py::KVCacheUpdateTest::test_invalid_inputs"


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str) -> None:
    if not (SOURCES / suite).exists():
        pytest.skip(f"XLA_GPU_SUITES_OF_OTHERS names no folder with {suite}")
    plugins = ["-p", "no:cacheprovider", "-p", "tests.support.replaced_imports"]
    options = ["-q", "-c", os.devnull, f"--rootdir={SOURCES}", "--noconftest"]
    options += ["--deselect", f"tpu-inference/tests/kernels/{LEFT_OUT}"]
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", *plugins]
    outcome = subprocess.run(
        [*command, "-k", SELECT, str(SOURCES / suite)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
    )
    print(outcome.stdout)
    assert outcome.returncode == 0
    assert re.search(r"\d+ passed", outcome.stdout)
