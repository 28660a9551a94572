"""What the files of this integration share."""

from __future__ import annotations

from typing import NamedTuple

import torch

import torch_frontend  # noqa: F401  (defines the ops)

NAME = "xla_gpu_paged"
REMEDY = "use attn_implementation='sdpa' or 'eager' for this model"

OPS = torch.ops.xla_gpu
LAYOUT = "nbhd"


class Tables(NamedTuple):
    """The arguments of ``paged_attention`` that all layers of one kind share in a step."""

    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor
    bidirectional_ranges: torch.Tensor | None = None


def same_strides(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the strides that ``paged_attention`` needs: the same, or in proportion
    to the head sizes."""
    if key.stride(-1) == value.stride(-1) == 1:
        pairs = [*zip(key.stride()[:-1], value.stride()[:-1], strict=True)]
        if all(x * value.shape[-1] == y * key.shape[-1] for x, y in pairs):
            return key, value
    return key.contiguous(), value.contiguous()
