"""``python -m shared_ffi`` reports what is built, what is installed and what is registered."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from typing import Any

from shared_ffi import OPS, _native, _pjrt, library_path, runtimes

_PACKAGES = ("xla-paged-attention", "numpy", "jax", "jaxlib", "torch", "torch_xla")
_PROBLEM = "problem"


def diagnose() -> dict[str, Any]:
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
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {package: _version(package) for package in _PACKAGES},
        "built": {
            "ffi_version": _dotted(runtimes.FFI_VERSION),
            "handlers": {name: sorted(targets) for name, targets in _native.handlers().items()},
            "module": _native.__file__,
            "library": str(library_path()),
            "cuda": _dotted(_native.cuda_version) if _native.cuda_version else "none",
            "cpu_instruction_set": _native.cpu_instruction_set(),
        },
        "runtimes": runtimes_found,
        "cuda": {"driver": _cuda_driver(), "plugin": _cuda_plugin()},
        "registered": runtimes.registered(),
        "frontends": {name: _try_import(name) for name in ("jax_frontend", "torch_frontend")},
    }


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
        return str(error)


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


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m shared_ffi", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    report = diagnose()
    if parser.parse_args().json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _print(report)


if __name__ == "__main__":
    main()
