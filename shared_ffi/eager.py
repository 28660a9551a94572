"""Calls a handler directly, without an XLA runtime, for eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shared_ffi import _native, runtimes
from shared_ffi._native import EagerCall, RememberedCalls
from shared_ffi.spec import Call

__all__ = ["EagerCall", "RememberedCalls", "prepare_on_cpu", "run_on_cpu", "run_on_cuda"]


def run_on_cpu(
    call: Call, operands: Sequence[int], results: Sequence[int], num_threads: int
) -> None:
    """Runs a checked call on arrays in the CPU's memory.

    Args:
        call: what the op's check returned.
        operands: the addresses of the inputs, in the op's order, laid out as the call says.
        results: the addresses to write to; for an aliased result, the address of its operand.
        num_threads: the largest number of threads to use, with the calling one.

    Raises:
        ValueError: the handler refused the values, such as a block id out of range.
    """
    _prepare(call, "cpu")(operands, results, num_threads)


def prepare_on_cpu(call: Call) -> EagerCall:
    """Returns what `run_on_cpu` calls."""
    return _prepare(call, "cpu")


def run_on_cuda(call: Call, operands: Sequence[int], results: Sequence[int], stream: int) -> None:
    """Queues a checked call on arrays of the current CUDA device; does not wait.

    Args:
        call: what the op's check returned.
        operands: the addresses of the inputs, in the op's order, laid out as the call says.
        results: the addresses to write to, as call.results_on("cuda") lists them.
        stream: the cudaStream_t.

    Raises:
        RuntimeError: a kernel could not be launched, or the driver is too old for this build.
    """
    _prepare(call, "cuda")(operands, results, stream=stream)


@lru_cache(maxsize=4096)
def _prepare(call: Call, platform: str) -> EagerCall:
    if platform == "cuda":
        runtimes.check_cuda_driver()
    attributes = {name: value.item() for name, value in call.attributes}
    try:
        results = call.results_on(platform)
        return _native.EagerCall(platform, call.target, attributes, call.operands, results)
    except KeyError as error:
        raise NotImplementedError(
            f"{call.op}: this build has no handlers for {platform}; install one that has"
        ) from error
