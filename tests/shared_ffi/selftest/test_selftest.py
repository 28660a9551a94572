"""``python -m shared_ffi`` says of each backend whether it works, and if not, what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from shared_ffi import OPS, _native, cuda_driver
from shared_ffi.selftest import backends, cuda_kernels, report, smoke_step
from shared_ffi.selftest.backends import (
    BACKENDS,
    FAILS,
    NO_GPU,
    NOT_INSTALLED,
    WORKS,
    Backend,
    Outcome,
)
from shared_ffi.xla import pjrt
from tests.cases.case import UNIT_SCALES
from tests.support import gpu
from tests.support.scripts import has_ended, wait_until

ROOT = Path(__file__).parents[3]
TARGETS = sorted(op.TARGET for op in OPS)


def diagnose(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of a run on the CPU."""
    outcome = subprocess.run(
        [sys.executable, "-m", "shared_ffi", "--json", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    return outcome.returncode, json.loads(outcome.stdout)


def test_safe_path_hides_the_working_folder_from_each_process(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('of the working folder')")
    command = [sys.executable, "-P", "-m", "shared_ffi", "--backend", "torch-cpu"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_requested_backends_must_work(capsys: pytest.CaptureFixture[str]) -> None:
    returncode, found = diagnose("--backend", "torch-cpu", "jax-cuda")
    report._print(found)
    text = capsys.readouterr().out
    assert "  torch_xla             XLA FFI 0.1\n" in text
    assert f"  torch_xla             cpu: {', '.join(TARGETS)}\n" in text
    works, fails = found["backends"]
    assert works.pop("seconds") > 0
    assert works == {
        "backend": "torch-cpu",
        "title": "PyTorch eager, CPU",
        "status": WORKS,
        "detail": "on cpu",
        "remedy": "",
    }
    assert (fails["backend"], fails["status"]) == ("jax-cuda", NO_GPU)
    assert returncode == 1
    both = {"cpu": TARGETS, "cuda": TARGETS}
    assert found["built"]["handlers"] == both
    assert found["registered"] == {"jaxlib": both, "torch_xla": {"cpu": TARGETS}}
    assert found["frontends"] == {"jax_frontend": "ok", "torch_frontend": "ok"}


def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *scripts: str
) -> tuple[int, list[str]]:
    """The exit status and what is printed about backends with these scripts."""
    chosen = tuple(
        Backend(f"backend{i}-cpu", f"backend {i}", "torch", script)
        for i, script in enumerate(scripts)
    )

    nothing = {"runtimes": {}, "registered": {}, "frontends": {}}
    monkeypatch.setattr(report, "BACKENDS", chosen)
    monkeypatch.setattr(report, "framework_report", lambda _: nothing)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["shared_ffi", "--timeout", "300"])
    status = report.main()
    return status, capsys.readouterr().out.partition("\nBackends\n")[2].splitlines()


def test_the_status_is_one_line_for_each_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = in_process(monkeypatch, capsys, "print('cpu')", "print('noise\\nGPU 7')")
    assert status == 0
    assert [re.sub(r"[\d.]+ s$", "1 s", line) for line in lines] == [
        "  backend 0             works          on cpu, 1 s",
        "  backend 1             works          on GPU 7, 1 s",
    ]


def test_a_backend_that_fails_changes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "raise RuntimeError('InvalidCxxCompiler: none found')"
    status, lines = in_process(monkeypatch, capsys, "print('cpu')", script)
    assert status == 1
    remedy = "install g++ or clang, or name one in CXX"
    assert lines[1].endswith(f" RuntimeError: InvalidCxxCompiler: none found: {remedy}")
    assert lines[1].split()[:3] == ["backend", "1", "fails"]


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: 0)
    monkeypatch.setattr(cuda_driver, "version", lambda: (0, 0))
    monkeypatch.setattr(importlib.metadata, "version", {"xla-paged-attention": "0.1.0"}.get)
    by_name = {x.name: x for x in BACKENDS}
    on_cuda = [x for x in BACKENDS if x.platform == "cuda"]
    outcomes = [tried(x) for x in (by_name["torch-cpu"], *on_cuda)]
    outcomes.append(Outcome("jax-cpu", by_name["jax-cpu"].title, WORKS, "on cpu", "", 1.8))
    page = (ROOT / "docs/getting-started.md").read_text()
    lines = report.lines(outcomes)
    assert len(lines) == 3
    for line in lines:
        assert f"    {line}\n" in page


def backend(script: str, name: str = "some-cpu", extra: str = "torch") -> Backend:
    return Backend(name, "some backend", extra, script)


def tried(chosen: Backend, timeout_s: float = 60) -> Outcome:
    return backends.try_backend(chosen, timeout_s)


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise ValueError('first line\\nsecond line')", "ValueError: first line"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["crash", "exit", "two-lines", "import"],
)
def test_failure_details(script: str, detail: str) -> None:
    outcome = tried(backend(script))
    assert (outcome.status, outcome.detail) == (FAILS, detail)
    assert "docs/troubleshooting.md" in outcome.remedy and repr(script) in outcome.remedy


# Writes the id of a child to the file `pid`. Neither ends in time.
HANGS = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session={is_detached})
with open({pid!r}, "w") as file:
    file.write(str(child.pid))
child.wait()
"""


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_backend_that_hangs_ends_with_its_children(
    is_detached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 2 seconds begin when the child is there, however long that takes. A child in a session of
    its own, which holds the pipes, is not waited for."""
    pid, communicate = tmp_path / "pid", subprocess.Popen.communicate

    def communicate_later(process: Any, *arguments: Any, **keywords: Any) -> Any:
        wait_until(lambda: pid.exists() and pid.read_text())
        return communicate(process, *arguments, **keywords)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_later)
    outcome = tried(backend(HANGS.format(pid=str(pid), is_detached=is_detached)), 2)
    assert (outcome.status, outcome.detail) == (FAILS, "no answer within 2 seconds")
    if is_detached:
        assert not has_ended(pid.read_text())
        os.kill(int(pid.read_text()), signal.SIGKILL)
    wait_until(lambda: has_ended(pid.read_text()))


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "install a PyTorch that is built for CUDA"),
        ("RuntimeError: Cannot find a working triton installation", "pip install triton"),
        ("fatal error: Python.h: No such file or directory", "install the headers of this Python, such as python3-dev"),
        ("shared_ffi: no CUDA plugin is installed; pip install", "pip install jax-cuda12-pjrt==0.8.0"),
        ("RESOURCE_EXHAUSTED: Out of memory", "free the GPU's memory, or name another GPU in CUDA_VISIBLE_DEVICES"),
        ("OSError: [Errno 28] No space left on device", "free some disk, or name another folder in TMPDIR"),
    ],
)  # fmt: skip
def test_remedies(message: str, remedy: str) -> None:
    assert backends._remedy(backend(""), message) == remedy


def test_the_message_about_the_driver_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_version", (13, 0))
    monkeypatch.setattr(cuda_driver, "version", lambda: (12, 8))
    message = report.driver()
    assert backends._remedy(backend(""), message) == "update the driver, or use the CPU"


def test_unsupported_version_is_named_as_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {
        "xla-paged-attention": "0.1.0",
        "torch": "2.10.0+cpu",
        "torch_xla": "2.9.0",
        "jax": "0.7.2",
        "pyelftools": "0.32",
    }
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    remedy = backends._remedy(backend("", extra="torch-xla"), "undefined symbol")
    assert remedy == "pip install 'torch==2.9.*' 'jax>=0.8.0'"


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.8.1", False), ("2.9", True), ("2.9.1+cpu", True), ("2.9.0a0", True), ("2.10.0", False), ("3", False)],
)  # fmt: skip
def test_versions(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert backends._is_met(Requirement("torch==2.9.*")) == known


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that seem not to be installed."""
    names: set[str] = set()
    version = importlib.metadata.version

    def version_if_installed(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_if_installed)
    return names


def test_a_missing_package(missing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing.add("torch_xla")
    monkeypatch.setattr(backends, "run", lambda *_: pytest.fail("the backend is tried"))
    outcome = tried(backend("", extra="torch-xla"))
    assert outcome.status == NOT_INSTALLED and outcome.detail == "without torch_xla"
    assert outcome.remedy == "pip install 'xla-paged-attention[torch-xla]'"


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_missing_pytorch(gpus: int, missing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's brings CUDA, which a machine without a GPU does not need."""
    missing.add("torch")
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: gpus)
    of_cpu = "pip install torch --index-url https://download.pytorch.org/whl/cpu, then "
    remedy = ("" if gpus else of_cpu) + "pip install 'xla-paged-attention[torch]'"
    assert tried(backend("")).remedy == remedy


def test_backends_without_a_gpu_share_a_line() -> None:
    outcome = Outcome("", "JAX, CPU", WORKS, "on cpu", "", 1.0)
    no_gpu = Outcome("", "JAX, CUDA", NO_GPU, "no NVIDIA driver", "use the CPU", 0.0)
    assert report.lines([no_gpu, outcome, no_gpu]) == [
        "  JAX, CPU              works          on cpu, 1.0 s",
        "  2 backends on CUDA    no GPU         no NVIDIA driver: use the CPU",
    ]
    assert report.lines([no_gpu]) == [
        "  JAX, CUDA             no GPU         no NVIDIA driver: use the CPU"
    ]


def test_several_missing_packages(missing: set[str]) -> None:
    missing.update(("torch", "torch_xla", "jax", "pyelftools"))
    outcome = tried(backend("", extra="torch-xla"))
    assert outcome.detail == "without torch, torch_xla, jax and pyelftools"


def test_sources_without_an_installation_name_no_requirements(missing: set[str]) -> None:
    missing.add("xla-paged-attention")
    assert tried(backend("print('cpu')")).status == WORKS


def test_a_missing_framework_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    remedy = "pip install 'xla-paged-attention[torch]'"
    assert report.try_import("torch_frontend", "torch") == f"without torch: {remedy}"


@pytest.mark.parametrize(("gpus", "shown"), [(0, "none"), (1, "pip install jax-cuda12-pjrt")])
def test_a_missing_plugin_matters_where_there_is_a_gpu(
    gpus: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: gpus)
    monkeypatch.setattr(pjrt.importlib.util, "find_spec", lambda _: None)
    assert shown in report.plugin()


def test_the_help_names_each_backend_once() -> None:
    command = [sys.executable, "-m", "shared_ffi", "--help"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert text.count("aot-inductor-cuda") == 1


def test_an_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    """With what it tries, which would not end by itself."""
    pid = tmp_path / "pid"
    chosen = Backend(
        "some-cpu", "some backend", "torch", HANGS.format(pid=str(pid), is_detached=False)
    )
    script = "from shared_ffi.selftest import backends, report; "
    script += f"report.BACKENDS = (backends.{chosen},); raise SystemExit(report.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--timeout", "3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: pid.exists() and pid.read_text())
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output, errors) == (130, "", "")
    wait_until(lambda: has_ended(pid.read_text()))


def test_a_second_interrupt_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come while the first ends the processes, on the same thread."""

    def ends(*_: Any) -> None:
        assert backends._lock.acquire(blocking=False), "the second would wait for ever"
        backends._lock.release()

    monkeypatch.setattr(backends, "_is_over", threading.Event())
    monkeypatch.setattr(backends, "_running", {1, 2})
    monkeypatch.setattr(os, "killpg", ends)
    with pytest.raises(KeyboardInterrupt):
        backends.end_all()


def test_source_folder_without_build_is_explained() -> None:
    # Without the packages of the environment, among them the finder of an editable installation.
    command = [sys.executable, "-S", "-c", "import shared_ffi"]
    outcome = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert outcome.returncode == 1
    message = outcome.stderr.splitlines()[-1]
    assert message.startswith(
        f"ImportError: shared_ffi: {ROOT / 'shared_ffi'} has no compiled module"
    )
    assert message.endswith("pip install --editable .")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: 0)
    monkeypatch.setattr(cuda_driver, "version", lambda: (13, 0))
    outcome = tried(backend("", "torch-cuda"))
    assert (outcome.status, outcome.detail) == (NO_GPU, "the driver shows no GPU")


def test_a_build_without_cuda_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: 1)
    monkeypatch.setattr(_native, "cuda_version", None)
    outcome = tried(backend("", "torch-cuda"))
    assert (outcome.status, outcome.detail) == (FAILS, "this build has no CUDA handlers")
    assert "XLA_GPU_CUDA=OFF" in outcome.remedy


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ((13, 1), "pip install 'jax[cuda13]'"),
        ((12, 8), "update the driver, then pip install 'jax[cuda13]'"),
    ],
)
def test_jax_without_its_cuda_plugin(
    driver: tuple[int, int], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "gpu_count", lambda: 1)
    monkeypatch.setattr(_native, "cuda_version", (13, 0))
    monkeypatch.setattr(cuda_driver, "version", lambda: driver)
    monkeypatch.setitem(sys.modules, "jax_plugins", None)
    outcome = tried(backend("", "jax-cuda", "jax"))
    assert (outcome.status, outcome.remedy) == (NOT_INSTALLED, remedy)


def test_framework_that_aborts_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_LOADED", "import os; os.abort()")
    assert report.framework_report(60)["runtimes"] == {"problem": "ended by SIGABRT"}


def test_wrong_result_fails() -> None:
    with pytest.raises(ArithmeticError, match=r"must be 2; got \[1.0, 2.0\]"):
        smoke_step.check(np.float32([1, 2]))


class EmulatedCalls:
    """Computes the calls that compare kernels on the emulated GPU."""

    def __init__(self, native: Any, spoil: Callable[[str, int], bool] = lambda *_: False) -> None:
        """`spoil`: whether a result is made wrong, by choice of kernels and limit of thread
        blocks."""
        self.native, self.spoil, self.max_blocks = native, spoil, 2**31
        chosen = {"set_cuda_choice": lambda _: None, "set_cuda_max_blocks": lambda _: None}
        own = {"EagerCall": native.EagerCall, "handlers": native.handlers}
        self.gpu = gpu.EmulatedGpu(SimpleNamespace(__file__=native.__file__, **own, **chosen))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def set_cuda_max_blocks(self, limit: int) -> None:
        self.max_blocks = limit
        self.native.set_cuda_max_blocks(limit)

    def attend(self, call: cuda_kernels.Call, is_plain: bool) -> np.ndarray:
        query, cache = call.query.astype(call.dtype), call.kv_cache.astype(call.cache_dtype)
        if is_plain:
            query = query.astype(np.float32)
            cache = cache.astype(np.float32) if call.cache_dtype == call.dtype else cache
        scales = UNIT_SCALES if call.has_scales else {}
        result = gpu.attend(self.gpu, (query, cache, *call.metadata), scale=call.scale, **scales)
        result = np.array(result, np.float32)
        if not is_plain and self.spoil(self.native.cuda_choice(), self.max_blocks):
            result[-1, -1, -1] += 1
        return result


def test_cuda_kernels_are_compared(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_SEQUENCES", ((1, 70), (9, 40)))
    monkeypatch.setenv("EMULATED_GPU_CAPABILITY", "90")
    each = enumerate(cuda_kernels.calls())
    some = [call for i, call in each if i % 5 == 0 or call.cache_dtype == "uint8"]
    monkeypatch.setattr(cuda_kernels, "calls", lambda: some)
    emulated.set_cuda_choice("by GPU")
    sound = EmulatedCalls(emulated)
    in_use = "kernels in use, equal to the plain one: "
    assert cuda_kernels.compare(sound.attend, sound) == f"{in_use}decode, prefill, portable"
    message = r"kernels chosen 'by GPU' differ from the plain one by .* bfloat16, a cache of .* 64"
    wrong = EmulatedCalls(emulated, lambda choice, _: choice == "by GPU")
    with pytest.raises(ArithmeticError, match=message):
        cuda_kernels.compare(wrong.attend, wrong)
    unsteady = EmulatedCalls(emulated, lambda _, max_blocks: max_blocks == 3)
    with pytest.raises(ArithmeticError, match="'portable' compute other bits with 3 thread blocks"):
        cuda_kernels.compare(unsteady.attend, unsteady)
    assert emulated.cuda_choice() == "by GPU"
    monkeypatch.setenv("EMULATED_GPU_CAPABILITY", "120")
    assert cuda_kernels.compare(sound.attend, sound) == f"{in_use}decode, portable"


def test_the_choice_of_cuda_kernels_is_shown(
    emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_native", emulated)
    monkeypatch.setattr(emulated, "cuda_version", (13, 0))
    back = "XLA_GPU_CUDA_KERNELS=portable: those for all GPUs"
    for choice in ("portable", "by GPU"):
        emulated.set_cuda_choice(choice)
        assert report.kernels() == f"chosen {choice}; {back}"
    monkeypatch.setattr(emulated, "cuda_version", None)
    assert report.kernels() == "none"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_frameworks_compute_the_calls_that_compare_kernels(framework: str) -> None:
    """On the CPU here."""
    in_torch = partial(smoke_step.attend_in_torch, device="cpu")
    attend = smoke_step.attend_in_jax if framework == "jax" else in_torch
    for call in [*cuda_kernels.calls()][::3]:
        cuda_kernels.check("the CPU kernels", call, attend(call, False), attend(call, True))


def test_every_backend_has_its_own_name() -> None:
    assert len({x.name for x in BACKENDS}) == len({x.title for x in BACKENDS}) == len(BACKENDS)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.tempfile, "tempdir", str(tmp_path))
    script = "import os; open(os.environ['TORCHINDUCTOR_CACHE_DIR'], 'w'); print('cpu')"
    assert tried(backend(script)).status == WORKS
    assert [*tmp_path.iterdir()] == []
