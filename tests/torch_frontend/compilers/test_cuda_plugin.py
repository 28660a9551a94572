"""torch_xla on CUDA: what can be tested without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
from torch_xla.core import dynamo_bridge

from shared_ffi.xla import pjrt
from torch_frontend.cuda_plugin import CudaPlugin, set_up_torch_xla

pytest.importorskip("jax_plugins.xla_cuda13", reason="make test installs JAX's plugin for CUDA")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
        *("PJRT_ALLOCATOR_FRACTION", "PJRT_ALLOCATOR_PREALLOCATE"),
    ):
        monkeypatch.delenv(variable, raising=False)


def test_torch_xla_finds_the_plugin() -> None:
    (entry_point,) = importlib.metadata.entry_points(group="torch_xla.plugins", name="cuda")
    assert entry_point.load() is set_up_torch_xla


def test_only_the_entry_point_extends_openxla(monkeypatch: pytest.MonkeyPatch) -> None:
    def upstream() -> None:
        """Stands for torch_xla's function."""

    monkeypatch.setattr(dynamo_bridge, "extract_compiled_graph", upstream)
    CudaPlugin()
    assert dynamo_bridge.extract_compiled_graph is upstream
    set_up_torch_xla()
    extended = dynamo_bridge.extract_compiled_graph
    assert extended.__wrapped__ is upstream
    set_up_torch_xla()
    assert dynamo_bridge.extract_compiled_graph is extended


def test_single_process_has_all_gpus() -> None:
    plugin = CudaPlugin()
    assert plugin.client_create_options() == {"platform_name": "cuda"}
    assert not plugin.requires_xla_coordinator()
    assert plugin.library_path() == str(pjrt.find_cuda_plugin())


def test_torchrun_processes_have_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(variable, value)
    plugin = CudaPlugin()
    assert plugin.requires_xla_coordinator()
    assert plugin.client_create_options() == {
        "platform_name": "cuda",
        "node_id": 5,
        "num_nodes": 8,
        "visible_devices": [1],
    }


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_ALLOCATOR_FRACTION", "0.5")
    monkeypatch.setenv("PJRT_ALLOCATOR_PREALLOCATE", "false")
    assert CudaPlugin().client_create_options() == {
        "platform_name": "cuda",
        "memory_fraction": 0.5,
        "preallocate": False,
    }


@pytest.mark.skipif(CudaPlugin().physical_chip_count() > 0, reason="there is a GPU")
def test_plugin_loads_without_a_gpu() -> None:
    """torch_xla loads JAX's plugin and asks it for a client; only the hardware is missing."""
    outcome = subprocess.run(
        [sys.executable, "-c", "import torch_xla; torch_xla.device()"],
        capture_output=True,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "CUDA"},
    )
    assert "No visible GPU devices" in outcome.stderr
