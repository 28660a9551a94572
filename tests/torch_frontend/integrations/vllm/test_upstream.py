"""vLLM's own tests of attention run on our backend and operators, with other imports only.

The wheels hold no tests. They are in the source distribution, which pip brings with

    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.32.0 pip download --no-deps \\
        --no-build-isolation --no-binary vllm vllm==0.32.0

in an environment with torch, setuptools-scm and setuptools-rust. Without it they are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shared_ffi import _native

ARCHIVE = os.environ.get("XLA_GPU_VLLM_SOURCE")
"""The path of ``vllm-0.32.0.tar.gz``."""

OURS = Path(__file__).parent / "upstream"
FILES = (
    "tests/v1/attention/utils.py",
    "tests/v1/attention/test_attention_backends.py",
    "tests/kernels/attention/test_cpu_attn.py",
    "tests/kernels/attention/test_mla_decode_cpu.py",
    "tests/v1/attention/test_cpu_mla_backend.py",
)
REPLACED = (
    r"from vllm(\.(config|_custom_ops|v1\.attention\.backends\.registry))? import",
    r"import vllm\._custom_ops as",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One of vLLM's tests expects values near zero as float32 weights give them.
    "XLA_GPU_CPU_ISA": _native.cpu_instruction_set().removesuffix("_bf16"),
}

pytestmark = pytest.mark.skipif(
    not ARCHIVE, reason="XLA_GPU_VLLM_SOURCE is not set: the path of vllm-0.32.0.tar.gz"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's tests, with imports from `ours` instead of those from vLLM's backends."""
    root = tmp_path_factory.mktemp("upstream")
    with tarfile.open(ARCHIVE) as archive:
        for name in FILES:
            source = archive.extractfile(f"vllm-0.32.0/{name}")
            assert source is not None
            text, count = re.subn(REPLACED[0], "from ours import", source.read().decode())
            text, others = re.subn(REPLACED[1], "import ours as", text)
            assert count + others
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, copy in (("ours.py", "ours.py"), ("fixtures.py", "conftest.py")):
        (root / copy).write_text((OURS / name).read_text())
    for package in ("tests", "tests/v1", "tests/v1/attention"):
        (root / package / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    ("file", "chosen", "every"),
    [
        (FILES[1], "causal_backend_correctness or sliding_window_backend_correctness", 6),
        (FILES[2], "vec or vec16 or softcap or alibi or sink", 60),
        (FILES[3], "mla_decode", 1),
        (FILES[4], "smoke", 1),
    ],
    ids=["backend", "kernel", "latent-kernel", "latent-engine"],
)
def test_vllm_attention_tests(folder: Path, file: str, chosen: str, every: int) -> None:
    """Some of many, where each takes seconds. The others of the last file are of vLLM's own code."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", chosen]
    result = subprocess.run(
        [*command, "--every", str(every)],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    wanted = {FILES[3]: 6, FILES[4]: 1}.get(file, 11)
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) >= wanted
