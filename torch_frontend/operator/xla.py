"""Adds an op to torch_xla's lazy graph. No other file knows how.

JAX lowers the op to HLO, and torch_xla embeds that as a user computation. torch_xla's own custom
calls (``_xla_custom_call``) do not suffice: they fix no operand layouts, calls that differ only in
attributes have the same hash, and no result can alias an operand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import _XLAC
import numpy as np
import torch
import torch_xla
from torch_xla.core import xla_builder

from shared_ffi import sharding
from shared_ffi.spec import Call
from shared_ffi.xla import runtimes
from torch_frontend.operator.export import chosen_platform

try:
    from shared_ffi.xla import programs
except ImportError as _error:
    raise ImportError(
        "torch_frontend needs JAX to write the HLO of its ops for XLA tensors, and JAX is not "
        "installed: pip install 'xla-paged-attention[torch-xla]'"
    ) from _error

_PLATFORMS = {"CPU": "cpu", "CUDA": "cuda"}


def run(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Adds the call to the lazy graph and returns its results.

    If an operand is marked as sharded by heads, the call is split by heads: each device gets its
    heads of every operand that has a dimension of heads, and all of every other operand.
    """
    runtimes.register()
    for operand, _ in call.aliases:
        _donate(operands[operand])
    program: tuple[Any, ...] = (call, _platform())
    if torch_xla.runtime.is_spmd() and call.num_shared_heads:
        devices = sharding.by_heads(call, [*map(_devices, operands)])
        if devices is not None:
            part = call.on(sharding.parts(call, devices))
            program += (part, sharding.shardings(call, devices))
    return _XLAC._xla_user_computation(  # type: ignore[no-any-return]
        f"xla_gpu::{call.op}", list(operands), _computation(*program)
    )


def fail(message: str, operand: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Adds a float32 result to the lazy graph that no program can compute: it is a custom call
    whose target does not exist, so that XLA refuses to compile it and names the target: `No
    registered implementation for untyped custom call to …`."""
    results = _XLAC._xla_custom_call(
        [operand], f"a derivative. {message}", [list(shape)], [torch.float32], False, "", 1, {}
    )
    return results[0]  # type: ignore[no-any-return]


def _devices(tensor: torch.Tensor) -> np.ndarray | None:
    """Returns the device of each tile of a tensor that is marked as sharded, else None."""
    text = _XLAC._get_xla_sharding_spec(tensor)
    if tiles := re.fullmatch(r"\{devices=\[([\d,]+)\]([\d,]+).*\}", text):
        sizes, devices = ([*map(int, x.split(","))] for x in tiles.groups())
        return np.array(devices).reshape(sizes)
    return None


def _donate(tensor: torch.Tensor) -> None:
    """Lets a program of ``torch.compile(backend="openxla")`` reuse an argument that it overwrites.

    An op that writes in place assigns its result to the operand. torch_xla's lazy mode then reuses
    the operand's buffer. Its compiled mode copies the whole cache, unless the argument is marked;
    lazy mode ignores the mark. A tensor that only shares an argument's buffer, such as its clone,
    is not marked: the argument is still needed.
    """
    ids, _ = _XLAC._get_tensors_xla_device_data_node([tensor])
    if ids == [_XLAC._xla_get_tensor_id(tensor)]:
        _XLAC._set_buffer_donation(tensor, True)


@lru_cache(maxsize=4096)
def _computation(call: Call, platform: str, *parts: Any) -> Any:
    module = programs.hlo_module(call, platform, *parts)
    return xla_builder.computation_from_module_proto(call.target, module)


def _platform() -> str:
    if platform := chosen_platform():
        return platform
    device = torch_xla.runtime.device_type()
    if device not in _PLATFORMS:
        raise NotImplementedError(
            f"torch_frontend: torch_xla's device must be CPU or CUDA; got {device}. Set "
            "PJRT_DEVICE=CPU or PJRT_DEVICE=CUDA"
        )
    return _PLATFORMS[device]
