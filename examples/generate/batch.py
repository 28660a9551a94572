"""The arguments of a model's step, the same for each framework."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """The tokens of a step, those of one sequence after another, and the metadata of attention.

    The sizes are static: rows past the last token and sequences past ``num_seqs`` are padding.
    """

    tokens: Any  # [num_tokens] int32
    positions: Any  # [num_tokens] int32
    slot_mapping: Any  # [num_tokens] int32, -1 for padding
    context_lens: Any  # [max_seqs] int32
    block_tables: Any  # [max_seqs, max_blocks_per_seq] int32
    query_start_loc: Any  # [max_seqs + 1] int32
    num_seqs: Any  # [1] int32
