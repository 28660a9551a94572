"""torch_xla on NVIDIA GPUs: torch_xla 2.9 dropped its own CUDA code, but loads PJRT plugins, and
JAX ships one for CUDA.

torch_xla calls ``set_up_torch_xla`` by its entry point, so a program only needs
``PJRT_DEVICE=CUDA``. Where entry points are off (``XLA_REGISTER_INSTALLED_PLUGINS=0``), call
``register()`` before the first use of an XLA device. Import torch_xla before this module: torch_xla
imports this module while it is itself imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch_xla.experimental import plugins

from shared_ffi import cuda_driver
from shared_ffi.xla import pjrt
from torch_frontend.compilers import openxla

if TYPE_CHECKING:
    _DevicePlugin = object  # It derives from a class in C++, which type checkers do not know.
else:
    _DevicePlugin = plugins.DevicePlugin


class CudaPlugin(_DevicePlugin):
    """Answers torch_xla's questions about the CUDA plugin.

    Environment variables: ``XLA_GPU_CUDA_PLUGIN`` names the plugin's file.
    ``PJRT_ALLOCATOR_FRACTION`` and ``PJRT_ALLOCATOR_PREALLOCATE`` say how much of a GPU's memory is
    taken at the start; torch_xla has always named them so. torchrun sets ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``: each local process
    then has the GPU of its rank. One process alone has all GPUs.
    """

    def library_path(self) -> str:
        """The plugin's file."""
        return str(pjrt.find_cuda_plugin())

    def configure_single_process(self) -> None:
        """Nothing to do: one process may use every GPU."""

    def physical_chip_count(self) -> int:
        """How many GPUs the driver shows to this process."""
        return cuda_driver.gpu_count()

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


def set_up_torch_xla() -> CudaPlugin:
    """The entry point, which torch_xla calls when it is imported.

    Extends ``torch.compile(backend="openxla")`` to CUDA and CPU tensors, and returns the plugin for
    torch_xla to register.
    """
    openxla.install()
    return CudaPlugin()


def register() -> None:
    """Does in this process what the entry point does on import."""
    plugins.use_dynamic_plugins()
    plugins.register_plugin("CUDA", set_up_torch_xla())  # type: ignore[arg-type]


def _local_rank() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_RANK", os.environ.get("LOCAL_RANK", "0")))


def _local_world_size() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", _local_world_size()))
