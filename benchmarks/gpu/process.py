"""Contestants in processes of their own: one for each module of the library and each environment.

The modules of two builds do not fit into one process, and what an environment variable chooses is
chosen once. Only the process whose turn it is works on the GPU; the others wait.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Collection, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.contest import (
    OURS_ON_GPUS,
    TO_BEAT_WITH_8_BITS,
    Contestant,
    Prepared,
    prepare,
    turn,
)
from benchmarks.gpu.module import begin
from benchmarks.gpu.peers import PEERS
from benchmarks.workloads import Workload

MAKERS = OURS_ON_GPUS | TO_BEAT_WITH_8_BITS | PEERS
_contestants: dict[str, Contestant] = {}  # of this process


def _prepare(
    workload: Workload, device: str, names: Collection[str], calls: int, allowed: float
) -> Prepared:
    import torch  # noqa: PLC0415

    _contestants.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    makers = {name: MAKERS[name] for name in names}
    found = prepare(workload, device, makers, calls, allowed)
    _contestants.update(found.contestants)
    return replace(found, contestants={})


def _turn(name: str, calls: int) -> tuple[float, dict[str, float]]:
    gauges: dict[str, float] = {}
    return turn(_contestants[name], calls, lambda: gauges.update(read_gauges())), gauges


def read_gauges() -> dict[str, float]:
    """The GPU's clock in MHz and its power in watts; nothing where there is no GPU."""
    if (gpu := _gpu()) is None:
        return {}
    import pynvml  # noqa: PLC0415

    return {
        "mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    }


@cache
def _gpu() -> Any:
    """NVML's handle of the GPU, or None."""
    try:
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # NVML's own, and those of its absence
        return None


class Process:
    """A process with contestants.

    Args:
        name: goes before those of its contestants, with a colon; empty for the module in use.
        module: the path of ``_native``; None for the module that Python finds.
        is_wrong: its results are wrong on purpose. The name then goes behind, so that no pattern
            takes a contestant for one of the library's.
    """

    def __init__(
        self,
        name: str,
        module: Path | None = None,
        environment: Mapping[str, str] | None = None,
        is_wrong: bool = False,
    ) -> None:
        self._name, self.is_wrong = name, is_wrong
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), begin, (module, environment or {})
        )
        with suppress(BrokenExecutor):
            self._pool.submit(read_gauges)  # starts it: all processes import at the same time

    def full_name(self, maker: str) -> str:
        """The name of a contestant among those of all processes."""
        if self.is_wrong:
            return f"{maker}: {self._name}"
        return f"{self._name}: {maker}" if self._name else maker

    def prepare(
        self, workload: Workload, device: str, names: Collection[str], calls: int
    ) -> Prepared:
        """Makes contestants, which stay in the process. Names are full ones."""
        try:
            allowed = math.inf if self.is_wrong else 1
            found = self._pool.submit(_prepare, workload, device, names, calls, allowed).result()
        except BrokenExecutor:
            found = Prepared(absent=dict.fromkeys(names, "its process died"))
        return Prepared(
            calls=found.calls,
            errors={self.full_name(name): x for name, x in found.errors.items()},
            bits={} if self.is_wrong else {self.full_name(k): x for k, x in found.bits.items()},
            absent={self.full_name(name): x for name, x in found.absent.items()},
        )

    def turn(self, name: str, calls: int) -> tuple[float, dict[str, float]]:
        """The mean time of `calls` calls of a contestant, and the gauges meanwhile."""
        return self._pool.submit(_turn, name, calls).result()

    def end(self) -> None:
        """Ends the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
