"""The dtypes of the ops, arrays to and from PyTorch, and arrays that nobody can read past."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CACHE_DTYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}

_LIBC = ctypes.CDLL(None, use_errno=True)


def to_torch(array: Any) -> Any:
    """A copy as a tensor."""
    import torch  # noqa: PLC0415

    copy = np.array(array)  # contiguous and writable
    bits = copy.view(f"u{copy.dtype.itemsize}")  # NumPy's dtypes are not all PyTorch's
    return torch.from_numpy(bits).view(getattr(torch, copy.dtype.name))


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor as an array, copied to the CPU if it is elsewhere."""
    import torch  # noqa: PLC0415

    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
        return tensor.view(torch.uint8).numpy().view(dtype)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def guarded(array: Any) -> np.ndarray:
    """A copy between two pages that may not be touched, as near to the second as its alignment to
    16 bytes allows."""
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
    """float32 in a cache's dtype: rounded to nearest, ties to even; what is too large becomes the
    largest."""
    to = CACHE_DTYPES[dtype]
    if dtype == "int8":
        return np.nan_to_num(np.clip(np.rint(values), -128, 127)).astype(np.int8)
    largest = float(ml_dtypes.finfo(to).max)
    return np.clip(values, -largest, largest).astype(to)
