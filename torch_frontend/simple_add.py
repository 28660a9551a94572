"""``torch.ops.xla_gpu.simple_add``."""

import torch

from shared_ffi import simple_add as op
from torch_frontend._define import define

simple_add: torch._ops.OpOverload = define("simple_add(Tensor a, Tensor b) -> Tensor", op.check)
"""Adds two float32 tensors; see ``jax_frontend.simple_add``."""
