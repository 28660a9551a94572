"""Tries the ops in PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import torch_frontend
from shared_ffi import tiny_step


def _step(
    cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *attention: torch.Tensor,
) -> torch.Tensor:
    query, *metadata = attention
    torch_frontend.kv_cache_update(cache, key, value, slots)
    # The doubled query changes nothing. A compiler makes code of its own for it.
    return torch_frontend.paged_attention(2 * query, cache, *metadata, tiny_step.SCALE)


class _Module(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return _step(*tensors)


def _package(*tensors: torch.Tensor) -> torch.Tensor:
    """Compiles the step into a package of AOTInductor, which then runs."""
    program = torch.export.export(_Module(), tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = torch_frontend.aoti_compile_and_package(program, package_path=f"{folder}/step.pt2")
        step: Callable[..., Any] = torch._inductor.aoti_load_package(path)
        output: torch.Tensor = step(*tensors)
    return output


def run(device: str, compiler: str | None = None) -> str:
    """Runs the tiny step on a device, whose name it returns.

    Args:
        device: as PyTorch names it. For ``xla``, torch_xla must have been imported.
        compiler: a backend of torch.compile, or ``aot_inductor``; None: the step is not compiled.
    """
    tensors = [torch.from_numpy(x).to(device) for x in tiny_step.operands()]
    step: Callable[..., torch.Tensor] = _step
    if compiler == "aot_inductor":
        step = _package
    elif compiler:
        step = torch.compile(_step, backend=compiler, fullgraph=True)
    with torch.no_grad():
        output = step(*tensors)
    tiny_step.check(output.flatten().tolist())
    return torch.cuda.get_device_name() if output.is_cuda else str(output.device)
