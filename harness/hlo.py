"""Reads custom calls out of HLO text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import torch
import torch_xla
import torch_xla.debug.metrics as metrics

UPDATE, ATTENTION = "xla_gpu_kv_cache_update", "xla_gpu_paged_attention"
STEP = (UPDATE, ATTENTION)
"""The targets of a step's calls."""

COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
"""What sends parts of arrays from device to device."""


def custom_calls(hlo: str, *targets: str) -> list[str]:
    """The instructions that call each target, without the names of instructions and the metadata
    about the source: two printings of one program may differ in them."""
    return [
        _without_names(line)
        for target in targets
        for line in hlo.splitlines()
        if f'custom_call_target="{target}"' in line
    ]


def _without_names(instruction: str) -> str:
    text = re.sub(r"/\*.*?\*/", "", instruction.strip())
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = text.removesuffix(", backend_config={}")  # in StableHLO the same as none
    head, _, tail = text.partition(" custom-call(")
    operands, _, tail = tail.partition(")")
    shape = head.partition(" = ")[2]
    num_operands = len(re.sub(r"\[[^]]*\]|\{[^}]*\}", "", operands).split(","))
    return f"{shape} custom-call({num_operands} operands){tail}"


def from_jax(function: Any, *operands: Any, **keyword_operands: Any) -> tuple[str, str]:
    """HLO text of a function, before and after optimization. If the function is jitted and has run
    on such operands, it is not compiled again."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    lowered = jitted.lower(*operands, **keyword_operands)
    before: Any = lowered.compiler_ir("hlo")
    after: Any = lowered.compile().as_text()
    return before.as_hlo_text(), after


def from_torch_xla(tensors: list[torch.Tensor]) -> str:
    """HLO text of the lazy graph that would compute the tensors, before optimization."""
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # type: ignore[attr-defined]
    return text


def torch_xla_compiles() -> int:
    """The number of programs that torch_xla has compiled in this process."""
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


class CompiledPrograms:
    """The programs that torch_xla has compiled in this process, read from XLA's dump."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs: list[tuple[str, str]] = []
        self._optimized: dict[str, dict[str, set[str]]] = {}
        self._num_searched: dict[str, int] = {}

    def all(self) -> list[tuple[str, str]]:
        """The HLO text of each program before and after optimization, the newest last."""
        torch_xla.sync(wait=True)
        for before in sorted(self._directory.glob("*.before_optimizations.txt")):
            # module_0001.SyncTensorsGraph.7.before_... and .cpu_after_...
            stem = before.name.removesuffix(".before_optimizations.txt")
            after = self._directory / f"{stem}.cpu_after_optimizations.txt"
            self._programs.append((before.read_text(), after.read_text()))
            for path in self._directory.glob(f"{stem}.*"):
                path.unlink()
        return self._programs

    def optimized(self, call: str, target: str) -> set[str]:
        """The optimized forms of a call, as `custom_calls` prints it. Counts the programs that have
        this call and no other."""
        programs = self.all()
        optimized = self._optimized.setdefault(target, {})
        for before, after in programs[self._num_searched.get(target, 0) :]:
            calls = custom_calls(before, target)
            if len(calls) == 1:
                optimized.setdefault(calls[0], set()).update(custom_calls(after, target))
        self._num_searched[target] = len(programs)
        return optimized.get(call, set())
