"""A small sound call of each op, as keyword arguments that a test may replace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.cases.case import FEATURES

F32, I32 = np.float32, np.int32


def attention(**changes: Any) -> dict[str, Any]:
    """A sound call (2 sequences, 2 and 1 query tokens, 4 blocks of 2) with some arguments replaced."""
    arguments = {
        "query": np.ones((4, 4, 8), F32),
        "kv_cache": np.ones((4, 2, 4, 8), F32),
        "context_lens": np.array([3, 1, 0], I32),
        "block_tables": np.array([[3, 1], [0, 9], [9, 9]], I32),
        "query_start_loc": np.array([0, 2, 3, 0], I32),
        "num_seqs": np.array(2, I32),
        "scale": 0.5,
        "sliding_window": None,
        "soft_cap": None,
    }
    return arguments | changes


def update(**changes: Any) -> dict[str, Any]:
    arguments = {
        "kv_cache": np.zeros((4, 2, 4, 8), F32),
        "key": np.ones((3, 2, 8), F32),
        "value": np.ones((3, 2, 8), F32),
        "slot_mapping": np.array([0, 7, -1], I32),
    }
    return arguments | changes


def rotated_update(**changes: Any) -> dict[str, Any]:
    """The same update with a rotary embedding of 8 positions."""
    arguments = {
        "query": np.ones((3, 4, 8), F32),
        "positions": np.array([0, 7, 8], I32),  # a token without a slot needs no position
        "cos_sin_cache": np.ones((8, 4), F32),
    }
    return update(**arguments | changes)


def training(**changes: Any) -> dict[str, Any]:
    """Two sequences of 2 and 1 tokens, and a token of padding."""
    arguments = {
        "query": np.ones((4, 4, 8), F32),
        "key": np.ones((4, 2, 8), F32),
        "value": np.ones((4, 2, 6), F32),
        "query_start_loc": np.array([0, 2, 3, 0], I32),
        "num_seqs": np.array(2, I32),
        "scale": 0.5,
    }
    return arguments | changes


def training_backward(**changes: Any) -> dict[str, Any]:
    """Its derivative."""
    arguments = {
        "output": np.ones((4, 4, 6), F32),
        "lse": np.ones((4, 4), F32),
        "dout": np.ones((4, 4, 6), F32),
    }
    return training(**arguments | changes)


def add(**changes: Any) -> dict[str, Any]:
    return {"a": np.ones((2, 3), F32), "b": np.ones((2, 3), F32)} | changes


SOUND = {
    "paged_attention": attention,
    "varlen_attention": training,
    "kv_cache_update": update,
    "simple_add": add,
}


def op_of(arguments: dict[str, Any]) -> str:
    """The op that has these arguments."""
    return next(op for op, sound in SOUND.items() if sound().keys() <= arguments.keys())


def split(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits arguments into the operands of every call and the keyword arguments."""
    features = FEATURES.get(op_of(arguments), ())
    arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray) and k not in features}
    return [*arrays.values()], {k: v for k, v in arguments.items() if k not in arrays}


DECODE_TABLE = np.random.default_rng(0).permutation(16).astype(I32)[None]


def decode_steps() -> Iterator[tuple[np.ndarray, ...]]:
    """200 steps of a decoding loop over a cache [16, 16, 4, 8] with DECODE_TABLE: the query of a
    token, its slot, the length of the context, and num_seqs, which is 0 in each other step."""
    rng = np.random.default_rng(1)
    for i in range(200):
        slot = DECODE_TABLE[0, i // 16] * 16 + i % 16
        numbers = (np.array(x, I32) for x in ([slot], [i + 1], i % 2))
        yield rng.standard_normal((1, 4, 8), F32), *numbers
