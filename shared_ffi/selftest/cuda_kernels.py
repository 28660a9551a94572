"""Compares the CUDA kernels that are in use on this machine's GPU with the plain one, which
computes in float32 without tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shared_ffi import _native
from shared_ffi.batch import BlockPool, pad_batch
from shared_ffi.spec import INTEGER_DTYPES

_SEQUENCES = ((1, 3000), (1, 70), (2, 700), (150, 1000), (130, 130), (9, 40))
_BLOCK_SIZE = 16
_KV_HEADS, _HEADS = 2, 8


class Call(NamedTuple):
    """A call of paged_attention with arrays in float32, which are rounded to these dtypes."""

    dtype: str
    cache_dtype: str
    query: np.ndarray
    kv_cache: np.ndarray
    metadata: tuple[np.ndarray, ...]
    scale: float
    magnitude: float
    """The mean magnitude of the numbers in the cache."""

    @property
    def has_scales(self) -> bool:
        """Whether it needs ``k_scale`` and ``v_scale``, which are 1."""
        return self.cache_dtype in INTEGER_DTYPES

    @property
    def name(self) -> str:
        """What tells it from other calls."""
        return f"{self.dtype}, a cache of {self.cache_dtype} and heads of {self.query.shape[2]}"


def calls() -> Iterator[Call]:
    """A call for each kernel: by dtype, dtype of the cache and head size. Few positions have most
    of the weight, so that no error is lost in an average."""
    rng = np.random.default_rng(0)
    query_lens, context_lens = zip(*_SEQUENCES, strict=True)
    num_blocks = [-(-context_len // _BLOCK_SIZE) for context_len in context_lens]
    pool = BlockPool(sum(num_blocks), _BLOCK_SIZE)
    rng.shuffle(pool.free)
    blocks: list[list[int]] = [[] for _ in _SEQUENCES]
    for own, context_len in zip(blocks, context_lens, strict=True):
        pool.grow(own, context_len)
    batch = pad_batch(
        [[0] * query_len for query_len in query_lens],
        context_lens,
        blocks,
        block_size=_BLOCK_SIZE,
        num_tokens=sum(query_lens),
        max_seqs=len(_SEQUENCES),
        max_blocks_per_seq=max(num_blocks),
    )
    for dtype in ("bfloat16", "float16"):
        kinds = [(dtype, size) for size in (64, 128, 192, 256, 512)]
        kinds += [(x, size) for x in ("float8_e4m3fn", "float8_e5m2", "int8") for size in (64, 128)]
        kinds.append(("uint8", 128))
        for cache_dtype, size in kinds:
            query = rng.standard_normal((len(batch.tokens), _HEADS, size), np.float32)
            shape = (sum(num_blocks), _BLOCK_SIZE, 2 * _KV_HEADS, size)
            kv_cache = rng.standard_normal(shape, np.float32)
            if cache_dtype == "int8":
                kv_cache = np.round(kv_cache * 20).clip(-127, 127)
            magnitude = float(np.abs(kv_cache).mean())
            if cache_dtype == "uint8":  # pairs of numbers from -8 to 7
                pairs = rng.integers(256, size=(*shape[:3], size // 2))
                kv_cache, magnitude = pairs.astype(np.float32), 4.0
            scale = 0.3 / magnitude
            yield Call(dtype, cache_dtype, query, kv_cache, batch[3:], scale, magnitude)


def compare(attend: Callable[[Call, bool], np.ndarray], native: Any = _native) -> str:
    """Returns which kernels are in use.

    Args:
        attend: computes a call on the GPU and returns the output in float32. If the second
            argument is true, it rounds the query, and a cache of the same dtype, and then widens
            them to float32, for which there is the plain kernel only.
        native: the module of the handlers.

    Raises:
        ArithmeticError: a kernel's result is not the plain kernel's, or depends on the number of
            thread blocks.
    """
    before, in_use = native.cuda_choice(), native.cuda_kernels_in_use()
    choices = ["portable", before] if "prefill" in in_use else ["portable"]
    try:
        for call in calls():
            plain = attend(call, True)
            for choice in choices:
                native.set_cuda_choice(choice)
                result = attend(call, False)
                check(f"the kernels chosen {choice!r}", call, result, plain)
                native.set_cuda_max_blocks(3)
                again = attend(call, False)
                native.set_cuda_max_blocks(2**31)
                if not np.array_equal(result, again):
                    raise ArithmeticError(
                        f"the kernels chosen {choice!r} compute other bits with 3 thread blocks "
                        f"than with many, for {call.name}"
                    )
    finally:
        if native.cuda_choice() != before:
            native.set_cuda_choice(before)
    return f"kernels in use, equal to the plain one: {', '.join(in_use)}"


def check(kernels: str, call: Call, result: np.ndarray, plain: np.ndarray) -> None:
    """Raises ArithmeticError if a result is not the plain kernel's, but for the rounding of weights
    and results to the call's dtype."""
    unit = 2.0**-8 if call.dtype == "bfloat16" or call.cache_dtype != call.dtype else 2.0**-11
    error = np.abs(result - plain) / (np.abs(plain) + call.magnitude)
    if not error.max() <= 4 * unit:
        raise ArithmeticError(
            f"{kernels} differ from the plain one by {error.max():.2g} of the size of a value, for "
            f"{call.name}"
        )
