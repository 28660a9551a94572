"""``hadamard`` for PyTorch."""

from __future__ import annotations

import torch

from shared_ffi import hadamard as op
from torch_frontend.operator.arguments import checked, specs
from torch_frontend.operator.define import define_composite


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiplies heads by the orthonormal Walsh-Hadamard matrix, which is its own inverse; see
    ``jax_frontend.hadamard``.

    It consists of PyTorch's own operators, so it runs on every device and compiles with every
    backend.
    """
    transformed: torch.Tensor = _CHECKED(x)
    return transformed


def _transform(x: torch.Tensor) -> torch.Tensor:
    block, scale = op.check(*specs((x,)))
    numbers = x.float().unflatten(-1, (-1, block))
    for _ in range(block.bit_length() - 1):  # neighbours; what was 2, 4, ... apart follows
        first, second = numbers[..., ::2], numbers[..., 1::2]
        numbers = torch.cat([first + second, first - second], -1)
    return (numbers * scale).flatten(-2).to(x.dtype)


# An operator, so that a compiler need not trace the check: its sizes may be symbols.
_OPERATOR = define_composite(f"{op.OP}(Tensor x) -> Tensor", _transform)
_CHECKED = checked(op.OP, _OPERATOR)
