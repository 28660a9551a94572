"""Settings that must precede the first import of a framework, command line options and fixtures."""

import atexit
import gc
import importlib.util
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.scripts import dump_flags

if TYPE_CHECKING:
    from harness.hlo import CompiledPrograms

pytest.register_assert_rewrite("tests.support.kernel_tests")  # which holds tests

if os.environ.get("XLA_GPU_TEST_ON") != "cuda":
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # for tests of sharding

# JAX's plugin for CUDA, for the tests that compile for GPUs, and for the processes that tests start.
if (plugin := Path(sys.prefix) / "jax-cuda").exists():
    sys.path.append(str(plugin))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(plugin)])
    )

# The frameworks and the processes that tests start write their temporary files into one folder,
# which is removed at the end. The folders of xdist's workers are in the folder of their controller.
TEMPORARY = Path(tempfile.mkdtemp(prefix="xla-gpu-tests-"))
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
# What tools keep between runs, such as the Zig compiler and matplotlib, is among the builds.
BUILD = Path(__file__).parents[1] / "build"
os.environ.setdefault("XDG_CACHE_HOME", str(BUILD / "cache"))
os.environ.setdefault("MPLCONFIGDIR", str(BUILD / "cache/matplotlib"))
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(BUILD / "hypothesis"))
# pytest keeps what failed tests wrote, so its folders stay where they are.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{TEMPORARY}/inductor")  # one for all workers
DUMP_DIR = TEMPORARY / "hlo"
os.environ["XLA_FLAGS"] = dump_flags(DUMP_DIR)

# These tests need a GPU, and these need vLLM.
collect_ignore = [] if os.environ.get("XLA_GPU_TEST_ON") == "cuda" else ["backends/test_gpu.py"]
if importlib.util.find_spec("vllm") is None:
    collect_ignore.append("torch_frontend/integrations/vllm")
    collect_ignore += ["benchmarks/test_vllm_benchmark.py", "examples/test_load_test.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native", help="a build of shared_ffi._native to test instead of the installed one"
    )
    parser.addoption(
        "--emulated", help="a build of it for the emulated GPU; without this option one is built"
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run the full products of parameters and the long tests too, as make test-all does",
    )
    parser.addoption(
        "--shuffle",
        action="store_true",
        help="run the tests in a random order, the same every time",
    )
    parser.addoption("--shard", default="1/1", help="I/N: only every Nth test, from the Ith on")


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "pairwise(each=None): without --all, some sets of parameters: see tests/support/selection.py",
        "nightly: only with --all",
    ):
        config.addinivalue_line("markers", marker)
    from tests.support import selection  # noqa: PLC0415  (settings above come first)

    selection.everything = config.getoption("--all")
    examples = 300 if selection.everything else 40
    settings.register_profile("tests", max_examples=examples, deadline=None, derandomize=True)
    settings.load_profile("tests")
    if path := config.getoption("--native"):
        from tests.support import native  # noqa: PLC0415  (settings above come first)

        native.load(path, "shared_ffi._native")


@pytest.hookimpl(trylast=True)  # of the tests that -k chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.support import selection  # noqa: PLC0415  (settings above come first)

    if not selection.everything:
        chosen = selection.select(items)
        config.hook.pytest_deselected(items=[*{*items}.difference(chosen)])
        items[:] = chosen
    if config.getoption("--shuffle"):
        random.Random(0).shuffle(items)
    first, step = map(int, config.getoption("--shard").split("/"))
    items[:] = items[first - 1 :: step]


def pytest_collection_finish() -> None:
    """Leaves the frameworks and the tests, millions of objects, out of garbage collections.
    transformers collects after each generation, JAX whenever its caches are cleared.
    Starts XLA: PyTorch's first backward pass, whichever test makes it, takes the devices that are
    there, and later passes know no others."""
    if torch_xla := sys.modules.get("torch_xla"):
        torch_xla.device()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def compiled() -> "CompiledPrograms":
    """The programs that torch_xla has compiled so far."""
    from harness.hlo import CompiledPrograms  # noqa: PLC0415  (imports the frameworks)

    return CompiledPrograms(DUMP_DIR)


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> Any:
    """The native module whose CUDA kernels run on the emulated GPU (tools/emulated_gpu)."""
    from tests.support import native  # noqa: PLC0415  (settings above come first)

    return native.emulated(request.config.getoption("--emulated"))


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Any:
    """The GPU that runs the CUDA handlers: emulated, unless XLA_GPU_TEST_ON=cuda."""
    from shared_ffi import _native  # noqa: PLC0415
    from tests.support.gpu import ON_CUDA, EmulatedGpu, RealGpu  # noqa: PLC0415

    return RealGpu(_native) if ON_CUDA else EmulatedGpu(request.getfixturevalue("emulated"))
