"""Calls a handler directly, without an XLA runtime, for eager PyTorch."""

from __future__ import annotations

from shared_ffi import _native, cuda_driver, kernel_log
from shared_ffi._native import EagerCall
from shared_ffi.spec import Call

__all__ = ["EagerCall", "prepare"]


def prepare(call: Call, platform: str) -> EagerCall:
    """Returns the handler of a checked call, to be called on the addresses of its arrays: operands,
    then results, laid out as the call says. An aliased result has the address of its operand.

    On "cpu" it raises ValueError if the handler refuses the values, such as a block id out of
    range. On "cuda" the results are those of ``call.results_on("cuda")``. It queues the call on the
    current device and raises RuntimeError if a kernel could not be launched.

    Raises:
        NotImplementedError: this build has no handlers for the platform.
        RuntimeError: the CUDA driver is too old for this build.
    """
    if platform == "cuda":
        cuda_driver.check()
    attributes = {name: value.item() for name, value in call.attributes}
    try:
        results = call.results_on(platform)
        prepared = _native.EagerCall(platform, call.target, attributes, call.operands, results)
    except KeyError as error:
        raise NotImplementedError(
            f"{call.op}: this build has no handlers for {platform}; install one that has"
        ) from error
    kernel_log.log(call, platform)
    return prepared
