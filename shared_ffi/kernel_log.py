"""A line of the log for each call that is prepared: which kernels it uses.

``logging.getLogger("shared_ffi").setLevel(logging.DEBUG)`` turns it on. A call is prepared once for
its shapes, dtypes and options: by eager PyTorch at the first call, by XLA when a program is
compiled.
"""

from __future__ import annotations

import logging

from shared_ffi import _native
from shared_ffi.spec import Call

_LOGGER = logging.getLogger("shared_ffi")


def log(call: Call, platform: str) -> None:
    """Writes the line of a call that has been prepared for a platform, if somebody reads it."""
    if not _LOGGER.isEnabledFor(logging.DEBUG):
        return
    operands = zip(call.names, call.operands, strict=True)
    shapes = (f"{name} {array.dtype}{list(array.shape)}" for name, array in operands)
    _LOGGER.debug(
        "%s on %s: %s; %s", call, platform, _kernels(call.op, platform), ", ".join(shapes)
    )


def _kernels(op: str, platform: str) -> str:
    if op != "paged_attention":
        return "the kernel for all processors" if platform == "cpu" else "the kernel for all GPUs"
    if platform == "cpu":
        return f"the kernel for {_native.cpu_instruction_set()}"
    if _native.cuda_version is None:
        return "kernels of the build that runs it"
    in_use = _native.cuda_kernels_in_use()
    if not in_use:
        return f"kernels chosen {_native.cuda_choice()}, on the machine that runs it"
    return f"kernels chosen {_native.cuda_choice()}: {', '.join(in_use)}, each where it applies"
