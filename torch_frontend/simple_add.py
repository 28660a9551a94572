"""``torch.ops.xla_gpu.simple_add``."""

from __future__ import annotations

import torch

from shared_ffi import simple_add as op
from torch_frontend.operator.arguments import check_types
from torch_frontend.operator.define import define

DEFAULT = define("simple_add(Tensor a, Tensor b) -> Tensor", op.check)


def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adds two float32 tensors of one shape; the smallest op, to see that the handlers work."""
    check_types(op.OP, {"a": a, "b": b})
    return DEFAULT(a, b)  # type: ignore[no-any-return]
