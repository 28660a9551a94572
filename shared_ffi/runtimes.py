"""Registers the handlers with every XLA runtime that this process has loaded.

A runtime is a copy of XLA with its own registry: jaxlib's, and the one inside torch_xla. A handler
built against the FFI headers of version x.y loads in every runtime of version x.z with z >= y.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from pathlib import Path

from shared_ffi import _elf, _native

FFI_VERSION: tuple[int, int] = _native.ffi_version
"""(major, minor) of the XLA FFI API that the handlers were built against."""

_XLA_FFI_GET_API = "_ZN3xla3ffi12GetXlaFfiApiEv"  # XLA_FFI_Api const* xla::ffi::GetXlaFfiApi()

_lock = threading.Lock()
_registered: dict[str, dict[str, list[str]]] = {}


def register() -> None:
    """Registers every handler with every loaded runtime that does not have it yet.

    Both frontends call this before they need it; call it yourself before running a program that
    was serialized elsewhere (``jax.export``) and never passes through a frontend. Cheap when there
    is nothing to do, safe from several threads.

    Raises:
        RuntimeError: a runtime's XLA FFI version is too old for this build.
    """
    for runtime, register_with in _RUNTIMES.items():
        if sys.modules.get(runtime) is not None and runtime not in _registered:
            with _lock:
                if runtime not in _registered:
                    _registered[runtime] = register_with()


def registered() -> dict[str, dict[str, list[str]]]:
    """What has been registered so far: {runtime: {platform: [target]}}."""
    return {runtime: dict(platforms) for runtime, platforms in _registered.items()}


def check_version(runtime: str, version: tuple[int, int]) -> None:
    """Raises RuntimeError, naming both versions, when a runtime cannot load this build."""
    if version[0] == FFI_VERSION[0] and version[1] >= FFI_VERSION[1]:
        return
    built, offered = ("{}.{}".format(*v) for v in (FFI_VERSION, version))
    raise RuntimeError(
        f"shared_ffi: handlers built for XLA FFI {built} cannot be registered with {runtime}, "
        f"which speaks XLA FFI {offered}; install a {runtime} that speaks {built} or a later "
        f"version of XLA FFI {FFI_VERSION[0]}"
    )


def _register_with_jaxlib() -> dict[str, list[str]]:
    import jax  # noqa: PLC0415  (optional)

    check_version("jaxlib", jaxlib_ffi_version())
    for platform, handlers in _native.handlers().items():
        for target, capsule in handlers.items():
            jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return {platform: sorted(handlers) for platform, handlers in _native.handlers().items()}


def jaxlib_ffi_version() -> tuple[int, int]:
    """The FFI version of the installed jaxlib, as the headers it carries state it."""
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
    """The FFI version of the XLA inside torch_xla, which is imported if it was not."""
    return _native.api_version_at(_torch_xla_api())


def _torch_xla_api() -> int:
    """Address of the XLA_FFI_Api of the XLA that is linked into torch_xla.

    torch_xla 2.9.0 offers no way to register an FFI handler and exports no symbol of XLA's, but its
    extension module keeps its symbol table, which names the function that returns the API.
    """
    import _XLAC  # noqa: PLC0415  (optional)

    try:
        get_api = _elf.address_of_local_function(
            _XLAC.__file__, _XLA_FFI_GET_API, exported="PyInit__XLAC"
        )
    except LookupError as error:
        raise RuntimeError(
            f"shared_ffi: cannot find XLA's FFI registry in torch_xla ({error} of "
            f"{_XLAC.__file__}); torch_xla 2.9.0 as published is known to work"
        ) from error
    address: int = ctypes.CFUNCTYPE(ctypes.c_void_p)(get_api)()
    return address


_RUNTIMES = {"jaxlib": _register_with_jaxlib, "torch_xla": _register_with_torch_xla}
