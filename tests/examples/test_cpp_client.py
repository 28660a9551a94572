"""The client in C++ decodes with JAX's bits, in a process without Python, on a PJRT plugin for CPUs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

import shared_ffi
from examples.cpp_client import export
from harness.compare import assert_same_bits
from tests.support import native

STEPS = 16


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of a plugin for CPUs and of PJRT's header."""
    if importlib.util.find_spec("xla_plugins") is None:
        pytest.skip("no PJRT plugin for CPUs: pip install xla-cpu-pjrt")
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def client(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    sources = native.ROOT / "examples/cpp_client"
    header = f"-DPJRT_C_API_DIR={package / 'include'}"
    for command in (
        ("cmake", "-S", sources, "-B", folder, header, "-DCMAKE_CXX_FLAGS=-Werror"),
        ("cmake", "--build", folder),
    ):
        outcome = native.run(*command)
        assert outcome.returncode == 0, outcome.stdout
    return folder / "client"


@pytest.fixture
def plugin(package: Path) -> Path:
    return package / "xla_cpu_pjrt.so"


def run(client: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the client without environment variables, so that nothing finds Python's packages."""
    words = [str(word) for word in (client, *arguments)]
    return subprocess.run(words, env={}, text=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decodes_as_jax_does(dtype: str, client: Path, plugin: Path, tmp_path: Path) -> None:
    arrays = export.arguments(4, dtype)
    export.write(tmp_path, arrays)
    outcome = run(client, plugin, shared_ffi.library_path(), tmp_path, STEPS)
    assert outcome.returncode == 0, outcome.stderr
    assert "the cache stayed where it was" in outcome.stdout
    expected = [jax.numpy.asarray(array) for array in arrays]
    for _ in range(STEPS):
        expected[:3] = export.JITTED(*expected)
    results = [
        np.frombuffer((tmp_path / f"result-{i}").read_bytes(), array.dtype).reshape(array.shape)
        for i, array in enumerate(arrays[:3])
    ]
    assert (results[1] == arrays[1] + STEPS).all()
    assert np.isfinite(results[2].astype(np.float32)).all() and results[2].any()
    assert_same_bits(tuple(results), tuple(map(np.asarray, expected[:3])))


def test_says_what_a_handler_refuses(client: Path, plugin: Path, tmp_path: Path) -> None:
    *arrays, tables = export.arguments(4, "float32")
    export.write(tmp_path, [*arrays, np.full_like(tables, 99)])
    outcome = run(client, plugin, shared_ffi.library_path(), tmp_path, 1)
    assert outcome.returncode == 1
    assert "kv_cache_update: slot_mapping[0] must be" in outcome.stderr


def test_says_what_is_missing(client: Path, plugin: Path, tmp_path: Path) -> None:
    library = shared_ffi.library_path()
    for arguments, message in (
        ((library, library, tmp_path, 1), "undefined symbol: GetPjrtApi"),
        ((plugin, plugin, tmp_path, 1), "undefined symbol: xla_gpu_handler"),
        ((plugin, library, tmp_path, 1), f"cannot read {tmp_path}"),
    ):
        outcome = run(client, *arguments)
        assert (outcome.returncode, message in outcome.stderr) == (1, True), outcome.stderr
    assert run(client, plugin, library, tmp_path, 0).returncode == 2
