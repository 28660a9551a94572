"""What the files of this integration share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import torch_frontend  # noqa: F401  (defines the ops)

NAME = "xla_gpu_paged"

OPS = torch.ops.xla_gpu
LAYOUT = "nbhd"


def remedy(config: Any) -> str:
    """What to write instead, given the configuration of a model, or of a part of one."""
    others = "use attn_implementation='sdpa' or 'eager' for this model"
    part = getattr(config, "base_config_key", "")
    if part in ("", "text_config"):
        return others
    parts = {"text_config": NAME, part: "sdpa"}
    return f"{others}, or, where it is a part of one, attn_implementation={parts}"


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
