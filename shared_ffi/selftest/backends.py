"""Tries a tiny step through every installed backend, for ``python -m shared_ffi``.

Each backend has a process of its own, which may hang or crash without harm to the others.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import NamedTuple

from shared_ffi import _native, _pjrt

WORKS, FAILS, NOT_INSTALLED, NO_GPU = "works", "fails", "not installed", "no GPU"


class Package(NamedTuple):
    """A package that a backend needs, in the versions that are known to work."""

    name: str
    oldest: str
    below: str = ""
    module: str = ""
    """What is imported, where that is not the package's name."""

    def __str__(self) -> str:
        """As pip takes it."""
        return f"{self.name}>={self.oldest}" + (f",<{self.below}" if self.below else "")


EXTRAS = {
    "jax": (Package("jax", "0.8.0"),),
    "torch": (Package("torch", "2.9"),),
    "torch-xla": (
        Package("torch", "2.9", "2.10"),
        Package("torch_xla", "2.9.0", "2.9.1"),
        Package("jax", "0.8.0"),
        Package("pyelftools", "0.32", module="elftools"),
    ),
}
"""What each extra of xla-paged-attention installs."""


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
        """Puts every framework on this platform, where backends beside it have memory, too."""
        return {
            "JAX_PLATFORMS": self.platform,
            "PJRT_DEVICE": self.platform.upper(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PJRT_ALLOCATOR_PREALLOCATE": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }


def _in_torch(*arguments: str) -> str:
    return f"from torch_frontend import _try; print(_try.run(*{arguments}))"


_XLA = "import torch_xla; "

BACKENDS = (
    Backend("jax-cpu", "JAX, CPU", "jax", "from jax_frontend import _try; print(_try.run())"),
    Backend("torch-cpu", "PyTorch eager, CPU", "torch", _in_torch("cpu")),
    Backend("inductor-cpu", "Inductor, CPU", "torch", _in_torch("cpu", "inductor")),
    Backend("aot-inductor-cpu", "AOTInductor, CPU", "torch", _in_torch("cpu", "aot_inductor")),
    Backend("torch-xla-cpu", "torch_xla, CPU", "torch-xla", _XLA + _in_torch("xla")),
    Backend("openxla-cpu", "openxla, CPU", "torch-xla", _XLA + _in_torch("xla", "openxla")),
    Backend("jax-cuda", "JAX, CUDA", "jax", "from jax_frontend import _try; print(_try.run())"),
    Backend("torch-cuda", "PyTorch eager, CUDA", "torch", _in_torch("cuda")),
    Backend("inductor-cuda", "Inductor, CUDA", "torch", _in_torch("cuda", "inductor")),
    Backend("aot-inductor-cuda", "AOTInductor, CUDA", "torch", _in_torch("cuda", "aot_inductor")),
    Backend("torch-xla-cuda", "torch_xla, CUDA", "torch-xla", _XLA + _in_torch("xla")),
    Backend("openxla-cuda", "openxla, CUDA", "torch-xla", _XLA + _in_torch("cuda", "openxla")),
)


class Outcome(NamedTuple):
    """What became of the step through a backend."""

    backend: str
    title: str
    status: str
    """WORKS, FAILS, NOT_INSTALLED or NO_GPU."""
    detail: str
    """The device where it works, otherwise what is wrong."""
    remedy: str
    """Empty where it works."""
    seconds: float


def try_backends(backends: Iterable[Backend], timeout_s: float) -> list[Outcome]:
    """Tries the backends, several at a time."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return [*pool.map(lambda backend: try_backend(backend, timeout_s), backends)]


def try_backend(backend: Backend, timeout_s: float) -> Outcome:
    """Tries one backend, unless it is plain that it cannot work."""
    start = time.monotonic()

    def outcome(status: str, detail: str, remedy: str = "") -> Outcome:
        seconds = round(time.monotonic() - start, 1)
        return Outcome(backend.name, backend.title, status, detail, remedy, seconds)

    if backend.platform == "cuda" and not gpu_count():
        what = "the driver shows no GPU" if any(_pjrt.cuda_driver_version()) else "no NVIDIA driver"
        return outcome(NO_GPU, what, "use the CPU, or a machine with an NVIDIA GPU")
    if missing := [x.name for x in EXTRAS[backend.extra] if not _is_installed(x.module or x.name)]:
        remedy = f"pip install 'xla-paged-attention[{backend.extra}]'"
        return outcome(NOT_INSTALLED, f"without {_enumerated(missing)}", remedy)
    if backend.platform == "cuda" and _native.cuda_version is None:
        remedy = "install a build that has them, one without XLA_GPU_CUDA=OFF"
        return outcome(FAILS, "this build has no CUDA handlers", remedy)
    if backend.name == "jax-cuda" and not _is_installed("jax_plugins"):
        (driver, _), (built, _) = _pjrt.cuda_driver_version(), _native.cuda_version or (0, 0)
        remedy = f"pip install 'jax[cuda{max(driver, built)}]'"
        if driver < built:
            remedy = f"update the driver, then {remedy}"
        return outcome(NOT_INSTALLED, "JAX without its CUDA plugin", remedy)
    returncode, output, errors = run(backend.script, backend.environment(), timeout_s)
    if returncode == 0:
        return outcome(WORKS, f"on {output.splitlines()[-1]}")
    detail = what_happened(returncode, errors, timeout_s)
    return outcome(FAILS, detail, _remedy(backend, errors))


def _enumerated(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


class Running:
    """The processes that run. Each leads a session, which Ctrl-C in the terminal does not reach."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaders: set[int] = set()
        self._ended = False

    def add(self, process: subprocess.Popen[str]) -> None:
        """A process that has begun."""
        with self._lock:
            self._leaders.add(process.pid)
            if self._ended:
                self._kill(process.pid)

    def remove(self, process: subprocess.Popen[str]) -> None:
        """A process that has ended."""
        with self._lock:
            self._leaders.discard(process.pid)

    def end(self) -> None:
        """Ends all of them, and those that begin from now on."""
        with self._lock:
            self._ended = True
            for leader in self._leaders:
                self._kill(leader)

    def _kill(self, leader: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


RUNNING = Running()


def run(script: str, environment: dict[str, str], timeout_s: float) -> tuple[int | None, str, str]:
    """Runs a script in a process of its own. Returns its exit status, None if it ran out of time,
    its output and its errors. Nothing that it compiles is kept."""
    with tempfile.TemporaryDirectory(prefix="xla-gpu-") as folder:
        temporary = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | temporary | environment,
            start_new_session=True,  # its children end with it
        )
        RUNNING.add(process)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, "", ""
        finally:
            RUNNING.remove(process)
        return process.returncode, output, errors


def gpu_count() -> int:
    """How many GPUs the driver shows to this process."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # None in sys.modules
        return False


def what_happened(returncode: int | None, errors: str, timeout_s: float) -> str:
    """One line about a script that failed."""
    if returncode is None:
        return f"no answer within {timeout_s:.0f} seconds"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    # The last exception of a traceback; what follows it are its further lines.
    exceptions = re.findall(r"^[\w.]*(?:Error|Exception|Failed|Exit)\b:? ?.*$", errors, re.M)
    lines = exceptions or errors.strip().splitlines() or [f"exit status {returncode}"]
    return lines[-1].strip()


_REMEDIES = (
    (r"No working C\+\+ compiler|InvalidCxxCompiler", "install g++ or clang, or name one in CXX"),
    (r"Python\.h: No such file", "install the headers of this Python, such as python3-dev"),
    (r"[Cc]annot find a working triton|TritonMissing", "pip install triton"),
    (r"not compiled with CUDA", "install a PyTorch that is built for CUDA"),
    (r"no CUDA plugin .*installed", "pip install jax-cuda12-pjrt==0.8.0"),
    (
        r"built with CUDA .* this machine's NVIDIA driver",
        "update the driver, or use the CPU",
    ),
    (
        r"RESOURCE_EXHAUSTED|out of memory",
        "free the GPU's memory, or name another GPU in CUDA_VISIBLE_DEVICES",
    ),
    (r"No space left on device", "free some disk, or name another folder in TMPDIR"),
)


def _remedy(backend: Backend, errors: str) -> str:
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, errors):
            return remedy
    if others := [x for x in EXTRAS[backend.extra] if not _is_known(x)]:
        return "pip install " + " ".join(f"'{x}'" for x in others)
    return f"see docs/troubleshooting.md; all of the message: python -c {backend.script!r}"


def _is_known(package: Package) -> bool:
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(package.oldest) <= _numbers(version) and (
        not package.below or _numbers(version) < _numbers(package.below)
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 9, 1) of 2.9.1+cpu."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
