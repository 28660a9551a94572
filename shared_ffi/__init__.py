"""The XLA FFI handlers that both frontends share: their checks, their lowering and their
registration. Imports neither JAX nor PyTorch until one is needed."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

try:
    from shared_ffi import _native
except ImportError:
    if find_spec("shared_ffi._native"):  # it is there, and does not load
        raise
    raise ImportError(
        f"shared_ffi: {Path(__file__).parent} has no compiled module _native: these are the "
        "sources, which hide an installed package. Run Python in another folder, or install the "
        "sources in place: pip install --editable ."
    ) from None

from shared_ffi import (
    kv_cache_update,
    paged_attention,
    simple_add,
    varlen_attention,
    varlen_attention_backward,
)
from shared_ffi.spec import ArraySpec, Call
from shared_ffi.xla.runtimes import register, registered

__version__ = version("xla-paged-attention")

OPS = (
    simple_add,
    kv_cache_update,
    paged_attention,
    varlen_attention,
    varlen_attention_backward,
)
"""The modules of all ops; each has OP, TARGET and check()."""


def library_path() -> Path:
    """The path of ``libxla_paged_attention.so``: the handlers, which need no Python."""
    return Path(_native.__file__).with_name("libxla_paged_attention.so")


__all__ = ["OPS", "ArraySpec", "Call", "library_path", "register", "registered"]
