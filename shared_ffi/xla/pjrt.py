"""Finds the CUDA plugin that JAX ships, and registers handlers with it through PJRT's C API, which
needs no framework.

The structures are the beginnings of those in XLA's pjrt_c_api.h and pjrt_c_api_gpu_extension.h, as
far as they are used here. PJRT's versioning rules keep these members in place."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_void_p, sizeof
from pathlib import Path
from typing import Any, ClassVar

from shared_ffi import cuda_driver

_GPU_CUSTOM_CALL_EXTENSION = 0
_TYPED_FFI = 1


LIBRARY_PATH_VARIABLE = "XLA_GPU_CUDA_PLUGIN"


def find_cuda_plugin() -> Path:
    """Returns the PJRT plugin to load: the file that the environment variable XLA_GPU_CUDA_PLUGIN
    names, or that of the newest installed jax-cuda12-pjrt or jax-cuda13-pjrt that the driver runs.

    Raises:
        RuntimeError: there is none.
    """
    if path := os.environ.get(LIBRARY_PATH_VARIABLE):
        if not Path(path).is_file():
            raise RuntimeError(
                f"shared_ffi: {LIBRARY_PATH_VARIABLE} must name a PJRT plugin for CUDA; got "
                f"{path}, which is no file"
            )
        return Path(path)
    package = importlib.util.find_spec("jax_plugins")
    folders = [Path(path) for path in (package and package.submodule_search_locations) or ()]
    found = {
        major: plugin
        for folder in folders
        for major in (12, 13)
        if (plugin := folder / f"xla_cuda{major}/xla_cuda_plugin.so").is_file()
    }
    newest = cuda_driver.version()[0] or max(found, default=0)
    fitting = [major for major in found if major <= newest]
    if not fitting:
        which = f"for CUDA {newest} or older is" if found else "is"
        raise RuntimeError(
            f"shared_ffi: no CUDA plugin {which} installed; pip install jax-cuda12-pjrt==0.8.0 (or "
            f"jax-cuda13-pjrt, with a driver from 580 on), or name one in {LIBRARY_PATH_VARIABLE}"
        )
    return found[max(fitting)]


class _Extension(Structure):
    pass


_Extension._fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", POINTER(_Extension))]


class _ErrorMessageArgs(Structure):
    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("error", c_void_p),
        ("message", c_char_p),
        ("message_size", c_size_t),
    ]


class _ErrorDestroyArgs(Structure):
    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("error", c_void_p),
    ]


class _Api(Structure):
    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("extension_start", POINTER(_Extension)),
        ("version_struct_size", c_size_t),
        ("version_extension_start", c_void_p),
        ("major_version", c_int),
        ("minor_version", c_int),
        ("error_destroy", CFUNCTYPE(None, POINTER(_ErrorDestroyArgs))),
        ("error_message", CFUNCTYPE(None, POINTER(_ErrorMessageArgs))),
    ]


class _RegisterArgs(Structure):
    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("function_name", c_char_p),
        ("function_name_size", c_size_t),
        ("api_version", c_int),
        ("handler_instantiate", c_void_p),
        ("handler_prepare", c_void_p),
        ("handler_initialize", c_void_p),
        ("handler_execute", c_void_p),
    ]


class _GpuCustomCall(Structure):
    _fields_: ClassVar = [
        ("base", _Extension),
        ("register", CFUNCTYPE(c_void_p, POINTER(_RegisterArgs))),
    ]


class Plugin:
    """A PJRT plugin, which is loaded if it was not."""

    def __init__(self, path: str) -> None:
        get_api = ctypes.CDLL(path).GetPjrtApi
        get_api.restype = POINTER(_Api)
        self._api = get_api().contents
        self._path = path

    @property
    def api_version(self) -> tuple[int, int]:
        """(major, minor) of the plugin's PJRT C API."""
        return self._api.major_version, self._api.minor_version

    def register(self, target: str, handler: Any) -> None:
        """Registers the capsule of a typed FFI handler; may be called again for the same one.

        Raises:
            RuntimeError: the plugin refuses the handler, or is not for GPUs.
        """
        name = target.encode()
        args = _RegisterArgs(
            struct_size=sizeof(_RegisterArgs),
            function_name=name,
            function_name_size=len(name),
            api_version=_TYPED_FFI,
            handler_execute=_address(handler),
        )
        error = self._gpu_custom_call().register(byref(args))
        if error:
            raise RuntimeError(f"shared_ffi: {self._path} refused {target}: {self._take(error)}")

    def _gpu_custom_call(self) -> Any:
        extension = self._api.extension_start
        while extension:
            if extension.contents.type == _GPU_CUSTOM_CALL_EXTENSION:
                return ctypes.cast(extension, POINTER(_GpuCustomCall)).contents
            extension = extension.contents.next
        raise RuntimeError(f"shared_ffi: {self._path} takes no custom calls: not a plugin for GPUs")

    def _take(self, error: int) -> str:
        message = _ErrorMessageArgs(struct_size=sizeof(_ErrorMessageArgs), error=error)
        self._api.error_message(byref(message))
        text = ctypes.string_at(message.message, message.message_size).decode()
        self._api.error_destroy(
            byref(_ErrorDestroyArgs(struct_size=sizeof(_ErrorDestroyArgs), error=error))
        )
        return text


def _address(capsule: Any) -> int:
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    address: int = get_pointer(capsule, get_name(capsule))
    return address
