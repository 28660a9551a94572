"""Which handler a caller without an XLA runtime, such as eager PyTorch, may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shared_ffi import _native, cuda_driver, kernel_log
from shared_ffi.spec import Call

_HANDLERS = _native.handlers()


def handler_of(call: Call, platform: str, copies: Callable[[], Iterable[str]] = tuple) -> Any:
    """Returns the handler of a checked call on "cpu" or "cuda", as a capsule. `copies`: see
    kernel_log.log.

    Raises:
        NotImplementedError: this build has no handlers for the platform.
        RuntimeError: the CUDA driver is too old for this build.
    """
    if platform == "cuda":
        cuda_driver.check()
    try:
        handler = _HANDLERS[platform][call.target]
    except KeyError as error:
        raise NotImplementedError(
            f"{call.op}: this build has no handlers for {platform}; install one that has"
        ) from error
    kernel_log.log(call, platform, copies)
    return handler
