"""What a serving loop in PyTorch does around the ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from shared_ffi import batch
from shared_ffi.batch import Batch, BlockPool
from shared_ffi.check_batch import BatchHistory, check_batch
from shared_ffi.paged_attention import METADATA
from torch_frontend.operator.arguments import checked, refuse_several_devices, specs
from torch_frontend.operator.define import define_composite
from torch_frontend.operator.dtensor import refuse_dtensors

__all__ = ["Batch", "BatchHistory", "BlockPool", "check_batch", "pad_batch", "slot_mapping"]


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
        ValueError: the batch has no room, a sequence too few blocks or tokens, or a token or a slot
            does not fit int32.
        TypeError: tokens, lengths or blocks are no integers.
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
        TypeError: an argument is no tensor or a DTensor, or not int32, or a size is no int.
    """
    metadata = (context_lens, block_tables, query_start_loc, num_seqs)
    return _OPERATOR(*metadata, block_size=block_size, num_tokens=num_tokens)  # type: ignore[no-any-return]


_OP = "slot_mapping"


def _slot_mapping(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    metadata = (context_lens, block_tables, query_start_loc, num_seqs)
    refuse_dtensors(_OP, METADATA, metadata)
    refuse_several_devices(_OP, METADATA, metadata)
    batch.check_slot_mapping(specs(metadata), block_size, num_tokens)
    slots: torch.Tensor = batch.slot_mapping(
        metadata,
        block_size=block_size,
        num_tokens=num_tokens,
        arange=partial(torch.arange, dtype=torch.int32, device=context_lens.device),
        where=torch.where,
    )
    return slots


# An operator, so that a compiler need not trace the checks: its sizes may be symbols.
_OPERATOR = checked(
    _OP,
    define_composite(
        f"{_OP}(Tensor context_lens, Tensor block_tables, Tensor query_start_loc, "
        "Tensor num_seqs, *, SymInt block_size, SymInt num_tokens) -> Tensor",
        _slot_mapping,
    ),
)
