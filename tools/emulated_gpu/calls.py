"""Calls of the emulated GPU from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class Change(ctypes.Structure):
    """`number_change` of a library, which machine.h describes."""

    _fields_ = [("kernel", ctypes.c_char_p)] + [
        (name, ctypes.c_uint64)
        for name in ("begin", "end", "reads", "every", "place", "bytes", "value", "counted")
    ]


@contextmanager
def captured(runtime: Any, call: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Captures what `call(stream)` launches in a CUDA graph. Yields what replays it. `runtime`: the
    library with the kernels, on the emulated GPU."""

    def check(name: str, *arguments: Any) -> None:
        if error := getattr(runtime, name)(*arguments):
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{name} failed: {runtime.cudaGetErrorString(error).decode()}")

    stream, graph, executable = (ctypes.c_void_p() for _ in range(3))
    check("cudaStreamCreate", ctypes.byref(stream))
    assert stream.value is not None
    try:
        check("cudaStreamBeginCapture", stream, 0)
        call(stream.value)
        check("cudaStreamEndCapture", stream, ctypes.byref(graph))
        check("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        check("cudaGraphDestroy", graph)
        yield lambda: check("cudaGraphLaunch", executable, stream)
        check("cudaGraphExecDestroy", executable)
    finally:
        check("cudaStreamDestroy", stream)


# The numbers of cuTensorMapEncodeTiled for the types of elements.
TENSOR_MAP_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5}
TENSOR_MAP_TYPES |= {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def tensor_map(
    machine: Any, array: np.ndarray, box: Sequence[int], **changes: Any
) -> tuple[int, ctypes.Array[Any]]:
    """The error and the 128 bytes of the driver's cuTensorMapEncodeTiled on the emulated GPU.
    `changes`: of its arguments. The outermost dimension is the first, as in NumPy."""
    memory = (ctypes.c_uint8 * 256)()
    encoded = (ctypes.c_uint8 * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    arguments: dict[str, Any] = {
        "to": ctypes.addressof(encoded),
        "type": TENSOR_MAP_TYPES[array.dtype.name],
        "rank": array.ndim,
        "address": array.ctypes.data,
        "sizes": array.shape,
        "strides": array.strides[:-1],
        "box": box,
        "steps": [1] * array.ndim,
        "interleave": 0,
        "swizzle": 0,
        "promotion": 0,
        "fill": 0,
    } | changes
    for name, kind in {
        "sizes": ctypes.c_uint64,
        "strides": ctypes.c_uint64,
        "box": ctypes.c_uint32,
        "steps": ctypes.c_uint32,
    }.items():
        numbers = arguments[name]
        arguments[name] = (kind * len(numbers))(*numbers[::-1])
    for name in ("to", "address"):
        arguments[name] = ctypes.c_void_p(arguments[name])
    return machine.PtxEncodeTiled(*arguments.values()), encoded
