"""``torch.ops.xla_gpu.simple_add``."""

from __future__ import annotations

import torch

from shared_ffi import simple_add as op
from torch_frontend.operator.arguments import checked
from torch_frontend.operator.define import define

DEFAULT = define("simple_add(Tensor a, Tensor b) -> Tensor", op.check)
_DEFAULT = checked(op.OP, DEFAULT)


def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adds two float32 tensors of one shape; the smallest op, to see that the handlers work."""
    return _DEFAULT(a, b)  # type: ignore[no-any-return]
