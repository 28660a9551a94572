"""torch_xla on NVIDIA GPUs: torch_xla 2.9 dropped its own CUDA code, but loads PJRT plugins, and
JAX ships one for CUDA.

torch_xla finds this module by its entry point, so ``PJRT_DEVICE=CUDA`` is all that a program needs.
Where entry points are off (``XLA_REGISTER_INSTALLED_PLUGINS=0``), call ``register()`` before the
first use of an XLA device. Import torch_xla before this module: torch_xla imports it in its turn.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from torch_xla.experimental import plugins

from shared_ffi import _pjrt
from torch_frontend import openxla


class CudaPlugin(plugins.DevicePlugin):  # type: ignore[misc]
    """What torch_xla asks about the CUDA plugin.

    Environment variables: ``XLA_GPU_CUDA_PLUGIN``, the plugin's file; ``PJRT_ALLOCATOR_FRACTION``
    and ``PJRT_ALLOCATOR_PREALLOCATE``, how much of a GPU's memory is taken at the start, as
    torch_xla has always named them; ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them: each local process then has the GPU
    of its rank. One process alone has all GPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        openxla.install()

    def library_path(self) -> str:
        """The plugin's file."""
        return str(_pjrt.find_cuda_plugin())

    def configure_single_process(self) -> None:
        """Nothing to do: one process may use every GPU."""

    def physical_chip_count(self) -> int:
        """How many GPUs the driver shows to this process."""
        count = ctypes.c_int(0)
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
        return count.value

    def requires_xla_coordinator(self) -> bool:
        """Processes find each other through the coordinator."""
        return _world_size() > 1

    def client_create_options(self) -> dict[str, Any]:
        """Options of the plugin's client; the names are XLA's."""
        options: dict[str, Any] = {"platform_name": "cuda"}
        if fraction := os.environ.get("PJRT_ALLOCATOR_FRACTION"):
            options["memory_fraction"] = float(fraction)
        if preallocate := os.environ.get("PJRT_ALLOCATOR_PREALLOCATE"):
            options["preallocate"] = preallocate.lower() not in ("0", "false", "")
        if _world_size() > 1:
            options["node_id"] = int(os.environ.get("RANK", _local_rank()))
            options["num_nodes"] = _world_size()
        if _local_world_size() > 1:
            options["visible_devices"] = [_local_rank()]
        return options


def register() -> None:
    """Makes ``PJRT_DEVICE=CUDA`` work in this process; the entry point does it by itself."""
    plugins.use_dynamic_plugins()
    plugins.register_plugin("CUDA", CudaPlugin())


def _local_rank() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_RANK", os.environ.get("LOCAL_RANK", "0")))


def _local_world_size() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", _local_world_size()))
