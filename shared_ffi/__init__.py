"""The XLA FFI handlers that both frontends share: their checks, their lowering and their
registration. Imports neither JAX nor PyTorch until one is needed."""

from pathlib import Path

from shared_ffi import _native, kv_cache_update, paged_attention, simple_add
from shared_ffi.runtimes import register, registered
from shared_ffi.spec import ArraySpec, Call

OPS = (simple_add, kv_cache_update, paged_attention)
"""The modules of all ops; each has OP, TARGET and check()."""

SHARED_OPS = (kv_cache_update, paged_attention)
"""Those of the ops whose heads several devices can share."""


def library_path() -> Path:
    """The path of ``libxla_paged_attention.so``: the handlers, which need no Python."""
    return Path(_native.__file__).with_name("libxla_paged_attention.so")


__all__ = ["OPS", "ArraySpec", "Call", "library_path", "register", "registered"]
