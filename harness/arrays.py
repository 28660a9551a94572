"""The dtypes of the ops, conversion to and from PyTorch, and arrays between guard pages."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

# Not those of shared_ffi: what is imported here must not load it before a test has chosen a build.
DTYPES = {name: np.dtype(name).type for name in ("float32", "float16", "bfloat16")}
CACHE_DTYPES = {name: np.dtype(name).type for name in ("float8_e4m3fn", "float8_e5m2", "int8")}
QUANTIZED = (*CACHE_DTYPES, "int4")
"""What a cache may hold instead. Numbers of int4 are int8 here until `packed` makes them uint8."""

CODES = {"int4": None, "e2m1": "e2m1"}
"""The numbers of 4 bits that arrays of uint8 hold, and the `codes` of calls that say so. Numbers of
e2m1 are float32 until `packed`."""

SCALE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
"""The dtypes of scales of groups."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def to_torch(array: Any) -> Any:
    """A tensor with a copy of an array."""
    return shared_with_torch(np.array(array))  # contiguous and writable


def shared_with_torch(array: np.ndarray) -> Any:
    """A tensor in the memory of an array, which must be contiguous and writable."""
    import torch  # noqa: PLC0415

    bits = array.view(f"u{array.dtype.itemsize}")  # PyTorch lacks some of NumPy's dtypes
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor as an array. A tensor on another device is copied to the CPU."""
    import torch  # noqa: PLC0415

    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.float4_e2m1fn_x2":
        return tensor.view(torch.uint8).numpy()
    if str(tensor.dtype).startswith("torch.float8"):
        dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
        return tensor.view(torch.uint8).numpy().view(dtype)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def guarded(array: Any) -> np.ndarray:
    """A copy of an array between two guard pages. A read past the end by 16 bytes or more crashes
    the process: the copy is aligned to 16 bytes and ends as close to the second page as that
    allows."""
    array = np.asarray(array)
    page = mmap.PAGESIZE
    size = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for offset in (0, page + size):
        no_access = 0
        if _LIBC.mprotect(ctypes.c_void_p(address + offset), ctypes.c_size_t(page), no_access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    begin = page + size - -(-array.nbytes // 16) * 16
    copy = np.frombuffer(memory, np.uint8, array.nbytes, begin).view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy


def quantized(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts float32 to a cache's dtype: rounds to nearest, ties to even, and saturates."""
    if dtype in ("int8", "int4"):
        bound = 128 if dtype == "int8" else 8
        return np.nan_to_num(np.clip(np.rint(values), -bound, bound - 1)).astype(np.int8)
    if dtype == "e2m1":
        held = np.clip(np.where(np.isnan(values), 0, values), -6, 6)
        return held.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    to = CACHE_DTYPES[dtype]
    largest = float(ml_dtypes.finfo(to).max)
    return np.clip(values, -largest, largest).astype(to)


def packed(numbers: np.ndarray, dtype: str = "int4") -> np.ndarray:
    """Numbers of 4 bits, two in each uint8: the first of a pair in the lower half."""
    is_float = dtype == "e2m1"
    codes = numbers.astype(ml_dtypes.float4_e2m1fn if is_float else np.int8).view(np.uint8)
    halves = codes & 0xF
    return halves[..., 0::2] | halves[..., 1::2] << 4


def unpacked(array: Any, codes: str | None = None) -> np.ndarray:
    """The inverse of `packed`, as int8 or float32. Arrays of other dtypes stay as they are.

    Args:
        codes: as for a call: None, for int4, or "e2m1".
    """
    if array.dtype != np.uint8:
        return np.asarray(array)
    halves = np.stack([array & 0xF, array >> 4], -1)
    if codes == "e2m1":
        numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        numbers = halves.astype(np.int8) - 16 * (halves >= 8).astype(np.int8)
    return numbers.reshape(*array.shape[:-1], 2 * array.shape[-1])
