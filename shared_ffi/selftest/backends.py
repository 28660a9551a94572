"""Every way to call the ops, and whether it works here: a smoke step in a process of its own, which
may hang or crash without harm to the others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from shared_ffi import _native, cuda_driver

WORKS, FAILS, NOT_INSTALLED, NO_GPU = "works", "fails", "not installed", "no GPU"


@dataclass(frozen=True)
class Backend:
    """A way to call the ops on one platform."""

    name: str
    title: str
    extra: str
    """The extra of xla-paged-attention that installs its packages."""
    script: str
    """Its last line of output is the name of the device."""

    @property
    def platform(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.name.rpartition("-")[2]

    def environment(self) -> dict[str, str]:
        """Selects the platform and turns preallocation off, so that several self-tests share one
        GPU."""
        return {
            "JAX_PLATFORMS": self.platform,
            "PJRT_DEVICE": self.platform.upper(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PJRT_ALLOCATOR_PREALLOCATE": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }


def _step(call: str) -> str:
    return f"from shared_ffi.selftest import smoke_step; print(smoke_step.{call})"


BACKENDS = (
    Backend("jax-cpu", "JAX, CPU", "jax", _step("in_jax()")),
    Backend("torch-cpu", "PyTorch eager, CPU", "torch", _step("in_torch('cpu')")),
    Backend("inductor-cpu", "Inductor, CPU", "torch", _step("in_torch('cpu', 'inductor')")),
    Backend(
        "aot-inductor-cpu", "AOTInductor, CPU", "torch", _step("in_torch('cpu', 'aot_inductor')")
    ),
    Backend("torch-xla-cpu", "torch_xla, CPU", "torch-xla", _step("in_torch('xla')")),
    Backend("openxla-cpu", "openxla, CPU", "torch-xla", _step("in_torch('xla', 'openxla')")),
    Backend("jax-cuda", "JAX, CUDA", "jax", _step("in_jax()")),
    Backend("torch-cuda", "PyTorch eager, CUDA", "torch", _step("in_torch('cuda')")),
    Backend("inductor-cuda", "Inductor, CUDA", "torch", _step("in_torch('cuda', 'inductor')")),
    Backend(
        "aot-inductor-cuda", "AOTInductor, CUDA", "torch", _step("in_torch('cuda', 'aot_inductor')")
    ),
    Backend("torch-xla-cuda", "torch_xla, CUDA", "torch-xla", _step("in_torch('xla')")),
    Backend("openxla-cuda", "openxla, CUDA", "torch-xla", _step("in_torch('cuda', 'openxla')")),
)


class Outcome(NamedTuple):
    """What became of the smoke step through a backend."""

    backend: str
    title: str
    status: str  # WORKS, FAILS, NOT_INSTALLED or NO_GPU
    detail: str  # the device where it works, otherwise what is wrong
    remedy: str  # empty where it works
    seconds: float


def try_backends(backends: Iterable[Backend], timeout_s: float) -> list[Outcome]:
    """Tries the backends, several at a time."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return [*pool.map(lambda backend: try_backend(backend, timeout_s), backends)]


def try_backend(backend: Backend, timeout_s: float) -> Outcome:
    """Tries one backend, unless something that it needs is not there."""
    start = time.monotonic()
    found = _obstacle(backend)
    if found is None:
        problem, output, errors = run(backend.script, timeout_s, backend.environment())
        if problem:
            found = FAILS, problem, _remedy(backend, errors)
        else:
            found = WORKS, f"on {output.splitlines()[-1]}", ""
    seconds = round(time.monotonic() - start, 1)
    return Outcome(backend.name, backend.title, *found, seconds)


def _obstacle(backend: Backend) -> tuple[str, str, str] | None:
    """The status, its detail and the remedy if the backend need not be tried."""
    (driver, _), built = cuda_driver.version(), _native.cuda_version
    if backend.platform == "cuda" and not cuda_driver.gpu_count():
        detail = "the driver shows no GPU" if driver else "no NVIDIA driver"
        return NO_GPU, detail, "use the CPU, or a machine with an NVIDIA GPU"
    if missing := [x.name for x in _requirements(backend.extra) if version(x.name) is None]:
        *others, last = missing
        detail = f"without {', '.join(others)} and {last}" if others else f"without {last}"
        return NOT_INSTALLED, detail, installation(backend.extra)
    if backend.platform == "cuda" and built is None:
        remedy = "install a build that has them, one without XLA_GPU_CUDA=OFF"
        return FAILS, "this build has no CUDA handlers", remedy
    if backend.name == "jax-cuda" and built and importlib.util.find_spec("jax_plugins") is None:
        remedy = f"pip install 'jax[cuda{max(driver, built[0])}]'"
        if driver < built[0]:
            remedy = f"update the driver, then {remedy}"
        return NOT_INSTALLED, "JAX without its CUDA plugin", remedy
    return None


def installation(extra: str) -> str:
    """The command that installs an extra. PyPI's PyTorch brings CUDA, with several GB."""
    command = f"pip install 'xla-paged-attention[{extra}]'"
    if extra != "torch" or version("torch") or cuda_driver.gpu_count():
        return command
    return f"pip install torch --index-url https://download.pytorch.org/whl/cpu, then {command}"


_lock = threading.RLock()  # a second Ctrl-C may find the first one's
_running: set[int] = set()  # the processes' ids
_is_over = threading.Event()


def run(
    script: str, timeout_s: float, environment: dict[str, str] | None = None
) -> tuple[str, str, str]:
    """Runs a script in a process of its own. Returns what went wrong in one line, empty if nothing
    did, its output and its errors. Nothing that it compiles is kept."""
    with tempfile.TemporaryDirectory(prefix="xla-gpu-") as folder:
        temporary = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        # With -P, which the caller may have given, the working folder's packages are not found.
        options = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *options, "-c", script]
        env = os.environ | temporary | (environment or {})
        streams: dict[str, Any] = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE, "text": True}
        with _lock:
            if _is_over.is_set():
                raise KeyboardInterrupt
            process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
            _running.add(process.pid)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # A child in a session of its own goes on. It may hold the pipes: nobody reads them to
            # their end.
            with process:
                os.killpg(process.pid, signal.SIGKILL)  # its other children, too
            return f"no answer within {timeout_s:.0f} seconds", "", ""
        finally:
            _running.discard(process.pid)
    return _problem(process.returncode, errors), output, errors


def end_all(*_: Any) -> None:
    """Ends all processes that `run` began: each leads a session, which Ctrl-C does not reach."""
    with _lock:
        _is_over.set()
        for leader in [*_running]:  # a process may end meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
    raise KeyboardInterrupt


def _problem(returncode: int, errors: str) -> str:
    if returncode <= 0:
        return f"ended by {signal.Signals(-returncode).name}" if returncode else ""
    # The last exception of a traceback; what follows it are its further lines.
    exceptions = re.findall(r"^[\w.]*(?:Error|Exception|Failed|Exit)\b:? ?.*$", errors, re.M)
    lines = exceptions or errors.strip().splitlines() or [f"exit status {returncode}"]
    return lines[-1].strip()


_REMEDIES = {
    r"No working C\+\+ compiler|InvalidCxxCompiler": "install g++ or clang, or name one in CXX",
    r"Python\.h: No such file": "install the headers of this Python, such as python3-dev",
    r"[Cc]annot find a working triton|TritonMissing": "pip install triton",
    r"not compiled with CUDA": "install a PyTorch that is built for CUDA",
    r"no CUDA plugin .*installed": "pip install jax-cuda12-pjrt==0.8.0",
    r"built with CUDA .* this machine's NVIDIA driver": "update the driver, or use the CPU",
    r"RESOURCE_EXHAUSTED|out of memory": (
        "free the GPU's memory, or name another GPU in CUDA_VISIBLE_DEVICES"
    ),
    r"No space left on device": "free some disk, or name another folder in TMPDIR",
}


def _remedy(backend: Backend, errors: str) -> str:
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, errors):
            return remedy
    if unsupported := [x for x in _requirements(backend.extra) if not _is_met(x)]:
        return "pip install " + " ".join(f"'{x.name}{x.specifier}'" for x in unsupported)
    return f"see docs/troubleshooting.md; all of the message: python -c {backend.script!r}"


def _requirements(extra: str) -> list[Requirement]:
    """What an extra of xla-paged-attention installs."""
    is_installed = version("xla-paged-attention") is not None  # else these are the sources
    texts = importlib.metadata.requires("xla-paged-attention") if is_installed else None
    requirements = map(Requirement, texts or ())
    return [x for x in requirements if x.marker and x.marker.evaluate({"extra": extra})]


def _is_met(requirement: Requirement) -> bool:
    """Compares releases: vendors call theirs 2.9.0a0+name."""
    found = version(requirement.name)
    return found is not None and requirement.specifier.contains(Version(found).base_version)


def version(package: str) -> str | None:
    """The installed version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
