"""One set of XLA FFI handlers for every frontend: what the ops mean, how calls of them are checked,
lowered and registered. Imports neither JAX nor PyTorch until one is needed."""

from pathlib import Path

from shared_ffi import _native, kv_cache_update, paged_attention, simple_add
from shared_ffi.runtimes import register, registered
from shared_ffi.spec import ArraySpec, Call

OPS = (simple_add, kv_cache_update, paged_attention)
"""Every op: a module with OP, TARGET and check()."""


def library_path() -> Path:
    """``libxla_paged_attention.so``: the handlers, without Python, JAX and PyTorch."""
    return Path(_native.__file__).with_name("libxla_paged_attention.so")


__all__ = ["OPS", "ArraySpec", "Call", "library_path", "register", "registered"]
