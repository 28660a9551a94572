"""``python -m shared_ffi`` tries a tiny step through every installed backend, and reports what is
built, what is installed and what is registered.

The exit status is 0 if a backend works and none of those that could work fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared_ffi import OPS, _backends, _native, _pjrt, library_path, runtimes
from shared_ffi._backends import BACKENDS, FAILS, WORKS, Backend, Outcome

_PACKAGES = ("xla-paged-attention", "numpy", "jax", "jaxlib", "torch", "torch_xla")
_PROBLEM = "problem"
_FRONTENDS = {"jax_frontend": "jax", "torch_frontend": "torch"}
"""What each of them needs: a library, and the extra that installs it."""

# Frameworks are imported in a process of its own, too: an installation that is broken may end it.
_LOADED = "import json; from shared_ffi import __main__ as m; print(json.dumps(m.loaded()))"


def diagnose(backends: Sequence[Backend] = BACKENDS, timeout_s: float = 180) -> dict[str, Any]:
    """Tries the backends, and reports how that went, what is built and what is installed."""
    with ThreadPoolExecutor(1) as pool:
        of_frameworks = pool.submit(_frameworks, timeout_s)
        outcomes = _backends.try_backends(backends, timeout_s)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {package: _version(package) for package in _PACKAGES},
        "built": {
            "ffi_version": _dotted(runtimes.FFI_VERSION),
            "handlers": {name: sorted(targets) for name, targets in _native.handlers().items()},
            "module": _native.__file__,
            "library": str(library_path()),
            "cuda": _cuda_build(),
            "cpu_instruction_set": _native.cpu_instruction_set(),
        },
        "cuda": {
            "driver": _cuda_driver(),
            "GPUs": str(_backends.gpu_count()),
            "plugin": _cuda_plugin(),
        },
        **of_frameworks.result(),
        "backends": [outcome._asdict() for outcome in outcomes],
    }


def loaded() -> dict[str, Any]:
    """Imports what is installed, registers the handlers, and reports how that went."""
    runtimes_found: dict[str, Any] = {
        "jaxlib": _try_runtime("jax", runtimes.jaxlib_ffi_version),
        "torch_xla": _try_runtime("torch_xla", runtimes.torch_xla_ffi_version),
    }
    try:
        runtimes.register()
    except RuntimeError as error:
        runtimes_found[_PROBLEM] = str(error)
    return {
        "runtimes": runtimes_found,
        "registered": runtimes.registered(),
        "frontends": {name: _try_frontend(name) for name in _FRONTENDS},
    }


def _frameworks(timeout_s: float) -> dict[str, Any]:
    returncode, output, errors = _backends.run(_LOADED, {}, timeout_s)
    if returncode == 0:
        return json.loads(output.splitlines()[-1])
    problem = _backends.what_happened(returncode, errors, timeout_s)
    return {"runtimes": {_PROBLEM: problem}, "registered": {}, "frontends": {}}


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try_import(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # the report is for finding out what is wrong
        return f"{type(error).__name__}: {error}"
    return "ok"


def _try_frontend(name: str) -> str:
    library = _FRONTENDS[name]
    if importlib.util.find_spec(library) is None:
        return f"without {library}: pip install 'xla-paged-attention[{library}]'"
    return _try_import(name)


def _try_runtime(module: str, ffi_version: Any) -> dict[str, str]:
    if importlib.util.find_spec(module) is None:
        return {_PROBLEM: "not installed"}
    outcome = _try_import(module)
    if outcome != "ok":
        return {_PROBLEM: outcome}
    try:
        return {"ffi_version": _dotted(ffi_version())}
    except Exception as error:
        return {_PROBLEM: f"{type(error).__name__}: {error}"}


def _cuda_build() -> str:
    if _native.cuda_version is None:
        return "none"
    return f"{_dotted(_native.cuda_version)} for {_native.cuda_architectures}"


def _cuda_driver() -> str:
    version = _pjrt.cuda_driver_version()
    if not any(version):
        return "none"
    try:
        runtimes.check_cuda_driver()
    except RuntimeError as error:
        return str(error)
    return f"runs CUDA {_dotted(version)} and older"


def _cuda_plugin() -> str:
    try:
        return str(_pjrt.find_cuda_plugin())
    except RuntimeError as error:
        return str(error) if _backends.gpu_count() else "none"


def _print(report: dict[str, Any]) -> None:
    print(f"Python {report['python']} on {report['machine']}\n\nInstalled")
    for package, version in report["packages"].items():
        print(f"  {package:<22}{version or 'not installed'}")
    built = report["built"]
    print(f"\nBuilt for XLA FFI {built['ffi_version']}: {built['module']}")
    for platform_name, targets in built["handlers"].items():
        print(f"  {platform_name:<22}{', '.join(targets)}")
    print(f"  {'CPU kernels use':<22}{built['cpu_instruction_set']}")
    print(f"  {'built with CUDA':<22}{built['cuda']}")
    print("\nXLA runtimes")
    for runtime, found in report["runtimes"].items():
        what = found if isinstance(found, str) else found.get(_PROBLEM)
        print(f"  {runtime:<22}{what or 'XLA FFI ' + found['ffi_version']}")
        for platform_name, targets in report["registered"].get(runtime, {}).items():
            print(f"  {'':<22}registered for {platform_name}: {len(targets)} of {len(OPS)} ops")
    print("\nCUDA")
    for part, outcome in report["cuda"].items():
        print(f"  {part:<22}{outcome}")
    print("\nFrontends")
    for frontend, outcome in report["frontends"].items():
        print(f"  {frontend:<22}{outcome}")
    print("\nBackends")
    for outcome in map(Outcome._make, map(dict.values, report["backends"])):
        print(_line(outcome))


def _line(outcome: Outcome) -> str:
    what = f"{outcome.seconds:.1f} s" if outcome.status == WORKS else outcome.remedy
    separator = ", " if outcome.status == WORKS else ": "
    return f"  {outcome.title:<22}{outcome.status:<15}{outcome.detail}{separator}{what}"


def main() -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shared_ffi", description=__doc__)
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
    arguments = parser.parse_args()
    chosen = [backend for backend in BACKENDS if backend.name in (arguments.backend or names)]
    report = diagnose(chosen, arguments.timeout)
    if arguments.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _print(report)
    statuses = {outcome["status"] for outcome in report["backends"]}
    is_well = WORKS in statuses and (
        not statuses - {WORKS} if arguments.backend else FAILS not in statuses
    )
    return 0 if is_well else 1


def _interrupted(*_: Any) -> None:
    _backends.RUNNING.end()  # else the threads that wait for them would not end
    sys.exit(128 + signal.SIGINT)  # as a shell has it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupted)
    sys.exit(main())
