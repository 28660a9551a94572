"""Whole sequences one after the other, as a trainer computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared_ffi.batch import Batch


def pack(sequences: Sequence[Sequence[int]]) -> Batch:
    """Packs sequences into a batch without padding. There is no cache: its arrays are empty.

    Args:
        sequences: the tokens of each.

    Returns:
        NumPy arrays of int32: ``tokens`` and ``positions`` ``[num_tokens]``, ``context_lens``
        ``[num_seqs]``, ``query_start_loc`` ``[num_seqs + 1]``, ``num_seqs`` ``[1]``.
    """
    lens = np.array([len(x) for x in sequences], np.int32)
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.concatenate(sequences).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lens]).astype(np.int32),
        slot_mapping=none,
        context_lens=lens,
        block_tables=none,
        query_start_loc=np.cumsum([0, *lens]).astype(np.int32),
        num_seqs=np.array([len(lens)], np.int32),
    )
