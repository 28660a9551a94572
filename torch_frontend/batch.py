"""What a serving loop in PyTorch does around the ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from shared_ffi import batch
from shared_ffi.batch import Batch, BlockPool
from torch_frontend.operator.arguments import check_types, refuse_several_devices, specs

__all__ = ["Batch", "BlockPool", "pad_batch", "slot_mapping"]


def pad_batch(
    tokens: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_tokens: int,
    max_seqs: int,
    max_blocks_per_seq: int,
    device: torch.device | str | None = None,
) -> Batch:
    """Builds the arrays of a step, of sizes that do not change from step to step, as tensors on
    ``device``; see ``jax_frontend.pad_batch``.

    Raises:
        ValueError: the batch has no room, or a sequence too few blocks or tokens.
    """
    arrays = batch.pad_batch(
        tokens,
        context_lens,
        blocks,
        block_size=block_size,
        num_tokens=num_tokens,
        max_seqs=max_seqs,
        max_blocks_per_seq=max_blocks_per_seq,
    )
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def slot_mapping(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Computes the slots of a batch's new tokens from the metadata of ``paged_attention``, on the
    device; see ``jax_frontend.slot_mapping``.

    Raises:
        ValueError: a shape is wrong, a size is negative, or tensors are on several devices.
        TypeError: an argument is no tensor, or not int32.
    """
    tensors = {
        "context_lens": context_lens,
        "block_tables": block_tables,
        "query_start_loc": query_start_loc,
        "num_seqs": num_seqs,
    }
    check_types("slot_mapping", tensors)
    metadata = [*tensors.values()]
    refuse_several_devices("slot_mapping", [*tensors], metadata)
    batch.check_slot_mapping(specs(metadata), block_size, num_tokens)
    slots: torch.Tensor = batch.slot_mapping(
        metadata,
        block_size=block_size,
        num_tokens=num_tokens,
        arange=partial(torch.arange, dtype=torch.int32, device=context_lens.device),
        where=torch.where,
    )
    return slots
