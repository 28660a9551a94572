"""Reads custom calls out of HLO text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import torch
import torch_xla


def custom_calls(hlo: str, target: str) -> list[str]:
    """The instructions that call `target`, less what may differ between two printings of one
    program: the names of instructions, and metadata about the source."""
    return [
        _without_names(line)
        for line in hlo.splitlines()
        if f'custom_call_target="{target}"' in line
    ]


def _without_names(instruction: str) -> str:
    text = re.sub(r"/\*.*?\*/", "", instruction.strip())
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    head, _, tail = text.partition(" custom-call(")
    operands, _, tail = tail.partition(")")
    shape = head.partition(" = ")[2]
    return f"{shape} custom-call({len(re.findall(r'%?[a-zA-Z_][^, ]*(?=,|$)', operands))}){tail}"


def of_jax(function: Any, *operands: Any) -> tuple[str, str]:
    """HLO text of a jitted function, before and after optimization."""
    lowered = jax.jit(function).lower(*operands)
    return lowered.compiler_ir("hlo").as_hlo_text(), lowered.compile().as_text()


def of_torch_xla(tensors: list[torch.Tensor]) -> str:
    """HLO text of the lazy graph that would compute the tensors, before optimization."""
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    return text


class OptimizedDump:
    """HLO text of the programs that torch_xla compiles inside a `with` block, after optimization."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.programs: list[str] = []

    def _files(self) -> set[Path]:
        return set(self._directory.glob("*after_optimizations.txt"))

    def __enter__(self) -> OptimizedDump:
        self._before = self._files()
        return self

    def __exit__(self, *_: object) -> None:
        torch_xla.sync(wait=True)
        new = sorted(self._files() - self._before)
        self.programs = [path.read_text() for path in new]
        for path in self._directory.glob("*.txt"):  # keeps the next glob fast
            path.unlink()
