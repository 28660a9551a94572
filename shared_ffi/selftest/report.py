"""Tries a smoke step through every installed backend, and reports what is built, what is installed
and what is registered.

The exit status is 0 if a backend works and none of those that could work fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared_ffi import _native, cuda_driver, library_path
from shared_ffi.cuda_driver import dotted
from shared_ffi.selftest import backends
from shared_ffi.selftest.backends import BACKENDS, FAILS, NO_GPU, WORKS, Backend, Outcome
from shared_ffi.xla import pjrt, runtimes

_PACKAGES = ("xla-paged-attention", "numpy", "jax", "jaxlib", "torch", "torch_xla")
# An installation that is broken may end the process that imports it.
_LOADED = "import json; from shared_ffi.selftest import report; print(json.dumps(report.loaded()))"


def diagnose(chosen: Sequence[Backend], timeout_s: float) -> dict[str, Any]:
    """Tries the backends, and reports how that went, what is built and what is installed."""
    with ThreadPoolExecutor(1) as pool:
        frameworks = pool.submit(framework_report, timeout_s)
        outcomes = backends.try_backends(chosen, timeout_s)
    cuda = _native.cuda_version
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: backends.version(name) for name in _PACKAGES},
        "built": {
            "ffi_version": dotted(runtimes.FFI_VERSION),
            "handlers": {name: sorted(targets) for name, targets in _native.handlers().items()},
            "module": _native.__file__,
            "library": str(library_path()),
            "cuda": f"{dotted(cuda)} for {_native.cuda_architectures}" if cuda else "none",
            "cpu_instruction_set": _native.cpu_instruction_set(),
        },
        "cuda": {
            "driver": driver(),
            "GPUs": str(cuda_driver.gpu_count()),
            "plugin": plugin(),
            "kernels": kernels(),
        },
        **frameworks.result(),
        "backends": [outcome._asdict() for outcome in outcomes],
    }


def framework_report(timeout_s: float) -> dict[str, Any]:
    """What `loaded` returns in a process of its own."""
    problem, output, _ = backends.run(_LOADED, timeout_s)
    if problem:
        return {"runtimes": {"problem": problem}, "registered": {}, "frontends": {}}
    return json.loads(output.splitlines()[-1])


def loaded() -> dict[str, Any]:
    """Imports what is installed, registers the handlers, and reports how that went."""
    found = {
        "jaxlib": try_import("jax", "jax", runtimes.jaxlib_ffi_version),
        "torch_xla": try_import("torch_xla", "torch_xla", runtimes.torch_xla_ffi_version),
    }
    try:
        runtimes.register()
    except RuntimeError as error:
        found["problem"] = str(error)
    frontends = {f"{x}_frontend": try_import(f"{x}_frontend", x) for x in ("jax", "torch")}
    return {"runtimes": found, "registered": runtimes.registered(), "frontends": frontends}


def try_import(
    module: str, library: str, ffi_version: Callable[[], tuple[int, int]] | None = None
) -> str:
    """Imports a module that needs a library. Returns how that went, or its version of XLA FFI."""
    if importlib.util.find_spec(library) is None:
        return f"without {library}: {backends.installation(library.replace('_', '-'))}"
    try:
        importlib.import_module(module)
        return f"XLA FFI {dotted(ffi_version())}" if ffi_version else "ok"
    except Exception as error:  # the report is for finding out what is wrong
        return f"{type(error).__name__}: {error}"


def driver() -> str:
    """The newest CUDA that the driver runs, or why it does not run the handlers."""
    version = cuda_driver.version()
    try:
        cuda_driver.check()
    except RuntimeError as error:
        return str(error)
    return f"runs CUDA {dotted(version)} and older" if any(version) else "none"


def kernels() -> str:
    """How the kernels are chosen; the smoke steps on a GPU say which these are."""
    if _native.cuda_version is None:
        return "none"
    return f"chosen {_native.cuda_choice()}; XLA_GPU_CUDA_KERNELS=portable: those for all GPUs"


def plugin() -> str:
    """The PJRT plugin for torch_xla. That there is none matters only where there is a GPU."""
    try:
        return str(pjrt.find_cuda_plugin())
    except RuntimeError as error:
        return str(error) if cuda_driver.gpu_count() else "none"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(part)}" for name, part in value.items())
    return ", ".join(value) if isinstance(value, list) else value or "not installed"


def line(outcome: Outcome) -> str:
    """One line about a backend."""
    what = f", {outcome.seconds:.1f} s" if outcome.status == WORKS else f": {outcome.remedy}"
    return f"  {outcome.title:<22}{outcome.status:<15}{outcome.detail}{what}"


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each backend, and one for all that need a GPU that this machine lacks."""
    without_gpu = [x for x in outcomes if x.status == NO_GPU]
    tried = [x for x in outcomes if x.status != NO_GPU]
    if len(without_gpu) > 1:
        without_gpu = [without_gpu[0]._replace(title=f"{len(without_gpu)} backends on CUDA")]
    return [*map(line, tried), *map(line, without_gpu)]


def _print(report: dict[str, Any]) -> None:
    print(f"Python {report['python']} on {report['machine']}")
    for section in ("packages", "built", "cuda", "runtimes", "registered", "frontends"):
        print(f"\n{'CUDA' if section == 'cuda' else section.capitalize()}")
        for name, value in report[section].items():
            print(f"  {name:<22}{_text(value)}")
    print("\nBackends", *lines([Outcome(**x) for x in report["backends"]]), sep="\n")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m shared_ffi") -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    names = [backend.name for backend in BACKENDS]
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=names,
        metavar="BACKEND",
        help=f"try only these; each of them must work: {', '.join(names)}",
    )
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds for each backend (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    chosen = [backend for backend in BACKENDS if backend.name in (options.backend or names)]
    try:
        signal.signal(signal.SIGINT, backends.end_all)
        report = diagnose(chosen, options.timeout)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as a shell has it
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _print(report)
    statuses = {outcome["status"] for outcome in report["backends"]}
    if options.backend:
        return 0 if statuses == {WORKS} else 1
    return 0 if WORKS in statuses and FAILS not in statuses else 1
