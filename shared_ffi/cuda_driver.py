"""The NVIDIA driver of this machine, which is asked without a framework."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref, c_int
from functools import cache

from shared_ffi import _native

_FIRST_DRIVERS = {12: "525", 13: "580"}  # by the major version of CUDA that they run


@cache
def version() -> tuple[int, int]:
    """Returns (major, minor) of the newest CUDA that the driver runs; (0, 0) without a driver."""
    number = c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(byref(number))
    return number.value // 1000, number.value % 1000 // 10


def gpu_count() -> int:
    """How many GPUs the driver shows to this process."""
    count = c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(byref(count)) == 0:
            return count.value
    return 0


def check() -> None:
    """Raises RuntimeError, naming both versions, when the CUDA handlers of this build cannot run on
    this machine's driver.

    A driver runs every CUDA of its own major version and of older ones. The handlers link the CUDA
    runtime statically, so the version that counts is that of the compiler which built them. Without
    a driver there is nothing to check.
    """
    built, driver = _native.cuda_version, version()
    if built is None or driver == (0, 0) or driver[0] >= built[0]:
        return
    needed = _FIRST_DRIVERS.get(built[0], f"one of CUDA {built[0]}")
    raise RuntimeError(
        f"shared_ffi: the CUDA handlers of xla-paged-attention are built with CUDA "
        f"{dotted(built)}, but this machine's NVIDIA driver runs CUDA {dotted(driver)} and "
        f"older; update the driver to {needed} or later, or run on the CPU"
    )


def dotted(version: tuple[int, int]) -> str:
    """A version as it is written."""
    return "{}.{}".format(*version)
