"""An NVIDIA driver that is too old for the CUDA handlers is refused by name, where a GPU would run
them and nowhere else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from shared_ffi import _native, cuda_driver, eager, simple_add
from shared_ffi.selftest import report
from shared_ffi.spec import ArraySpec
from shared_ffi.xla import lowering, pjrt, runtimes
from tests.support import scripts

REFUSAL = (
    r"^shared_ffi: the CUDA handlers of xla-paged-attention are built with CUDA 13\.0, but this "
    r"machine's NVIDIA driver runs CUDA 12\.8 and older; update the driver to 580 or later"
)
CALL = simple_add.check(*[ArraySpec((2,), "float32")] * 2)


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 whose version is in the environment."""
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "driver.c"
    source.write_text("""
        #include <stdlib.h>
        int cuDriverGetVersion(int* version) {
          *version = atoi(getenv("FAKE_CUDA_VERSION"));
          return 0;
        }
    """)
    command = ["cc", "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return folder


CHECK = """
    import sys
    from shared_ffi import _native, cuda_driver
    _native.cuda_version = tuple(map(int, sys.argv[1:]))
    print(cuda_driver.version())
    try:
        cuda_driver.check()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("built", "driver", "refused"),
    [
        ((13, 0), 12080, True),
        ((13, 0), 11040, True),
        ((13, 0), 13000, False),
        ((13, 1), 13000, False),
        ((13, 0), 13010, False),
        ((12, 9), 12080, False),
        ((13, 0), 14000, False),
    ],
)
def test_versions(built: tuple[int, int], driver: int, refused: bool, fake_driver: Path) -> None:
    version, *errors = scripts.output(
        CHECK,
        *map(str, built),
        LD_LIBRARY_PATH=str(fake_driver),
        FAKE_CUDA_VERSION=str(driver),
    )
    runs = (driver // 1000, driver % 1000 // 10)
    assert version == str(runs)
    assert len(errors) == refused
    for error in errors:
        assert f"built with CUDA {built[0]}.{built[1]}," in error
        assert f"driver runs CUDA {runs[0]}.{runs[1]} and older; update the driver to 580" in error


@pytest.mark.skipif(cuda_driver.version() != (0, 0), reason="there is a driver")
def test_without_a_driver_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_version", (13, 0))
    cuda_driver.check()


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_version", (13, 0))
    monkeypatch.setattr(cuda_driver, "version", lambda: (12, 8))


@pytest.mark.usefixtures("old_driver")
def test_a_build_without_cuda_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_version", None)
    cuda_driver.check()


@pytest.mark.usefixtures("old_driver")
def test_eager_calls() -> None:
    with pytest.raises(RuntimeError, match=REFUSAL):
        eager.handler_of(CALL, "cuda")
    assert eager.handler_of(CALL, "cpu")


@pytest.mark.usefixtures("old_driver")
def test_registering_with_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "handlers", lambda: {"cuda": {}})
    monkeypatch.setattr(pjrt, "Plugin", lambda path: pytest.fail("the plugin is loaded"))
    with pytest.raises(RuntimeError, match=REFUSAL):
        runtimes._register_with_cuda_plugin()


def lowered(platform: str) -> str:
    """The program of a call in JAX."""
    traced = jax.jit(lambda a, b: lowering.make(CALL, a, b)).trace(jnp.ones(2), jnp.ones(2))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, on_cuda = lowered("cpu"), lowered("cuda")
    request.getfixturevalue("old_driver")
    monkeypatch.setattr(lowering, "_has_cuda_devices", lambda: False)
    assert lowered("cpu") == on_cpu
    assert lowered("cuda") == on_cuda  # exported for another machine
    monkeypatch.setattr(lowering, "_has_cuda_devices", lambda: True)
    assert lowered("cpu") == on_cpu
    with pytest.raises(RuntimeError, match=REFUSAL):
        lowered("cuda")


@pytest.mark.usefixtures("old_driver")
def test_jax_runs_on_the_cpu() -> None:
    runtimes.register()
    (result,) = jax.jit(lambda a: lowering.make(CALL, a, a))(jnp.float32([1, 2]))
    assert result.tolist() == [2, 4]


@pytest.mark.usefixtures("old_driver")
def test_self_test_names_the_driver() -> None:
    assert "update the driver to 580 or later" in report.driver()
