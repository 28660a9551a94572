"""Calls a handler directly, with no XLA runtime: what an eager framework does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shared_ffi import _native
from shared_ffi.spec import Call


def run_on_cpu(
    call: Call, operands: Sequence[Any], results: Sequence[Any], num_threads: int
) -> None:
    """Runs a checked call on contiguous CPU arrays, without copies.

    Args:
        call: what the op's check returned for these operands.
        operands: the inputs, in the op's order, as anything that speaks DLPack, or its capsules.
        results: arrays to write into; for an aliased result, the operand itself.
        num_threads: most threads to use, the calling one included.

    Raises:
        ValueError: the handler found fault with the values, such as a block id out of range.
    """
    _prepare(call, "cpu")(operands, results, num_threads)


def run_on_cuda(call: Call, operands: Sequence[Any], results: Sequence[Any], stream: int) -> None:
    """Queues a checked call on contiguous arrays of the current CUDA device; does not wait.

    Args:
        call: what the op's check returned for these operands.
        operands: the inputs, in the op's order, as anything that speaks DLPack, or its capsules.
        results: arrays to write into, as call.results_on("cuda") lists them.
        stream: the cudaStream_t.

    Raises:
        RuntimeError: a kernel could not be launched.
    """
    _prepare(call, "cuda")(operands, results, stream=stream)


@lru_cache(maxsize=4096)
def _prepare(call: Call, platform: str) -> _native.EagerCall:
    attributes = {name: value.item() for name, value in call.attributes}
    try:
        dtypes = [spec.dtype for spec in (*call.operands, *call.results)]
        return _native.EagerCall(platform, call.target, attributes, dtypes)
    except KeyError as error:
        raise NotImplementedError(
            f"{call.op}: this build has no handlers for {platform}; install one that has"
        ) from error
