"""Arrays as PyTorch's tensors, and arrays that nobody can read past."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def to_torch(array: Any) -> Any:
    """A copy as a tensor."""
    import torch  # noqa: PLC0415

    copy = np.array(array)  # contiguous and writable
    bits = copy.view(f"u{copy.dtype.itemsize}")  # NumPy's dtypes are not all PyTorch's
    return torch.from_numpy(bits).view(getattr(torch, copy.dtype.name))


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
