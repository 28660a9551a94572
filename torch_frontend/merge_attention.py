"""``merge_attention`` for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shared_ffi import merge_attention as op
from torch_frontend.operator.arguments import specs
from torch_frontend.operator.define import define_composite


def merge_attention(
    outputs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over the parts of a context into attention over all of it; see
    ``jax_frontend.merge_attention``.

    It consists of PyTorch's own operators, so it runs on every device and compiles with every
    backend, for sizes that change as well.
    """
    merged: tuple[torch.Tensor, torch.Tensor] = _OPERATOR(
        _stacked("outputs", outputs), _stacked("lses", lses)
    )
    return merged


def _stacked(argument: str, given: Any) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    parts = op.parts(argument, given)
    return _tensor(given) if parts is None else torch.stack([*map(_tensor, parts)])


def _tensor(array: Any) -> torch.Tensor:
    """A tensor stays where it is; an array of NumPy is on the CPU. Without a device, PyTorch would
    move both to its default device."""
    return array if isinstance(array, torch.Tensor) else torch.as_tensor(array, device="cpu")


def _merge(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    op.check(*specs((outputs, lses)))
    largest = lses.amax(dim=0)
    shift = torch.where(largest == -torch.inf, 0, largest)
    weights = torch.where(lses == shift, 1, torch.exp(lses - shift))  # shift may be infinite
    total = weights.sum(dim=0)
    shares = weights / torch.where(total == 0, 1, total)
    counted = torch.where(lses[..., None] == -torch.inf, 0, outputs.float())
    merged = (counted * shares[..., None]).sum(dim=0)
    return merged.to(outputs.dtype), shift + torch.log(total)


# An operator, so that a compiler need not trace the check: its sizes may be symbols.
_OPERATOR = define_composite(
    f"{op.OP}(Tensor outputs, Tensor lses) -> (Tensor output, Tensor lse)", _merge
)
