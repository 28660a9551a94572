"""``merge_attention`` for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_ffi import merge_attention as op
from torch_frontend.operator.arguments import array_spec


def merge_attention(
    outputs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over the parts of a context into attention over all of it; see
    ``jax_frontend.merge_attention``.

    It consists of PyTorch's own operators, so it runs on every device and compiles with every
    backend.
    """
    outputs, lses = _stacked("outputs", outputs), _stacked("lses", lses)
    op.check(array_spec(outputs.shape, outputs.dtype), array_spec(lses.shape, lses.dtype))
    largest = lses.amax(dim=0)
    shift = torch.where(largest == -torch.inf, 0, largest)
    weights = torch.where(lses == shift, 1, torch.exp(lses - shift))  # shift may be infinite
    total = weights.sum(dim=0)
    shares = weights / torch.where(total == 0, 1, total)
    counted = torch.where(lses[..., None] == -torch.inf, 0, outputs.float())
    merged = (counted * shares[..., None]).sum(dim=0)
    return merged.to(outputs.dtype), shift + torch.log(total)


def _stacked(argument: str, given: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    parts = op.parts(argument, given)
    return torch.as_tensor(given) if parts is None else torch.stack([*map(torch.as_tensor, parts)])
