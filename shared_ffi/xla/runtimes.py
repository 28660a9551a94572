"""Registers the handlers with every XLA runtime that this process has loaded.

A runtime is a copy of XLA with its own registry: jaxlib's, the one inside torch_xla, and that of
the CUDA plugin that torch_xla loads. (JAX hands its own CUDA plugin what is registered with jaxlib;
where both load the same file, that is one registry.) A handler built against the FFI headers of
version x.y loads in every runtime of version x.z with z >= y.

An NVIDIA driver that is too old for the CUDA handlers is refused where a GPU is about to run them:
when they are registered with torch_xla's CUDA plugin, before the first eager call (``eager.py``),
and when JAX lowers a call for its CUDA devices (``lowering.py``). Registering with jaxlib does not
refuse it, because JAX may use only the CPU of that machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shared_ffi import _native, cuda_driver
from shared_ffi.xla import elf, pjrt

FFI_VERSION: tuple[int, int] = _native.ffi_version
"""(major, minor) of the XLA FFI API that the handlers were built against."""

_XLA_FFI_GET_API = "_ZN3xla3ffi12GetXlaFfiApiEv"  # XLA_FFI_Api const* xla::ffi::GetXlaFfiApi()

_JAX_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}

_lock = threading.Lock()
_registered: dict[str, dict[str, list[str]]] = {}


def register() -> None:
    """Registers every handler with every loaded runtime that does not have it yet.

    Both frontends call this before they need it. Call it yourself before running a program that
    was serialized elsewhere (``jax.export``) and never passes through a frontend. It is cheap when
    there is nothing to do, and safe to call from several threads.

    Raises:
        RuntimeError: a runtime's XLA FFI version is too old for this build.
    """
    for runtime, (is_present, register_with) in _RUNTIMES.items():
        if runtime not in _registered and is_present():
            with _lock:
                if runtime not in _registered:
                    _registered[runtime] = register_with()


def registered() -> dict[str, dict[str, list[str]]]:
    """Returns what has been registered so far: {runtime: {platform: [target]}}."""
    return {runtime: dict(platforms) for runtime, platforms in _registered.items()}


def check_version(runtime: str, version: tuple[int, int]) -> None:
    """Raises RuntimeError, naming both versions, when a runtime cannot load this build."""
    if version[0] == FFI_VERSION[0] and version[1] >= FFI_VERSION[1]:
        return
    built, offered = cuda_driver.dotted(FFI_VERSION), cuda_driver.dotted(version)
    raise RuntimeError(
        f"shared_ffi: handlers built for XLA FFI {built} cannot be registered with {runtime}, "
        f"which speaks XLA FFI {offered}; install a {runtime} that speaks {built} or a later "
        f"version of XLA FFI {FFI_VERSION[0]}"
    )


def _register_with_jaxlib() -> dict[str, list[str]]:
    import jax  # noqa: PLC0415  (optional)

    from shared_ffi.xla import partitioning  # noqa: PLC0415  (needs JAX)

    check_version("jaxlib", jaxlib_ffi_version())
    for platform, handlers in _native.handlers().items():
        for target, capsule in handlers.items():
            jax.ffi.register_ffi_target(target, capsule, platform=_JAX_PLATFORMS[platform])
    partitioning.register()
    return {platform: sorted(handlers) for platform, handlers in _native.handlers().items()}


def jaxlib_ffi_version() -> tuple[int, int]:
    """Reads the FFI version of the installed jaxlib from the headers that it ships."""
    import jaxlib  # noqa: PLC0415  (optional)

    header = Path(jaxlib.__path__[0], "include/xla/ffi/api/c_api.h").read_text()
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")
    )
    if major is None or minor is None:
        raise RuntimeError("shared_ffi: jaxlib's c_api.h names no XLA FFI version")
    return int(major[1]), int(minor[1])


def _register_with_torch_xla() -> dict[str, list[str]]:
    api = _torch_xla_api()
    check_version("torch_xla", _native.api_version_at(api))
    handlers = _native.handlers()["cpu"]
    for target, capsule in handlers.items():
        _native.register_at(api, target, "Host", capsule)
    return {"cpu": sorted(handlers)}


def torch_xla_ffi_version() -> tuple[int, int]:
    """Returns the FFI version of the XLA inside torch_xla; imports torch_xla's extension."""
    return _native.api_version_at(_torch_xla_api())


def _torch_xla_api() -> int:
    """Returns the address of the XLA_FFI_Api of the XLA that is linked into torch_xla.

    torch_xla 2.9.0 has no API to register an FFI handler and exports no symbol of XLA's. But its
    extension module has a symbol table, which names the function that returns the XLA_FFI_Api.
    """
    import _XLAC  # noqa: PLC0415  (optional)

    try:
        get_api = elf.address_of_local_function(
            _XLAC.__file__, _XLA_FFI_GET_API, exported="PyInit__XLAC"
        )
    except LookupError as error:
        raise RuntimeError(
            f"shared_ffi: cannot find XLA's FFI registry in torch_xla ({error} of "
            f"{_XLAC.__file__}); torch_xla 2.9.0 as published is known to work"
        ) from error
    address: int = ctypes.CFUNCTYPE(ctypes.c_void_p)(get_api)()
    return address


def _register_with_cuda_plugin() -> dict[str, list[str]]:
    handlers = _native.handlers().get("cuda")
    if handlers is None:
        raise RuntimeError(
            "shared_ffi: this build has no CUDA handlers (XLA_GPU_CUDA=OFF); install one that has, "
            "or set PJRT_DEVICE=CPU"
        )
    cuda_driver.check()
    plugin = pjrt.Plugin(str(pjrt.find_cuda_plugin()))
    for target, capsule in handlers.items():
        plugin.register(target, capsule)
    return {"cuda": sorted(handlers)}


def _is_imported(package: str) -> bool:
    return sys.modules.get(package) is not None


def _torch_xla_uses_cuda() -> bool:
    return _is_imported("torch_xla") and os.environ.get("PJRT_DEVICE", "").startswith("CUDA")


_RUNTIMES: dict[str, tuple[Callable[[], bool], Callable[[], dict[str, list[str]]]]] = {
    "jaxlib": (partial(_is_imported, "jaxlib"), _register_with_jaxlib),
    "torch_xla": (partial(_is_imported, "torch_xla"), _register_with_torch_xla),
    "cuda_plugin": (_torch_xla_uses_cuda, _register_with_cuda_plugin),
}
