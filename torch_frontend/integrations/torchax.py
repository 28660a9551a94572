"""Importing this module makes ``torch.ops.xla_gpu`` work on torchax's tensors, and so in
``torchax.interop.jax_jit``. The JAX program contains the same custom calls as everywhere.

torchax runs each of our operators as the JAX function of the same name. ``kv_cache_update`` assigns
the updated arrays to the tensors of caches and query. A program that donates the cache and returns
it writes it where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax_frontend
from shared_ffi.kv_cache_update import WRITTEN
from torch_frontend.integrations._versions import require

require("torchax", "0.0.13")

import torch  # noqa: E402
import torchax  # noqa: E402
from torchax.ops.ops_registry import register_torch_dispatch_op  # noqa: E402

_OPS = torch.ops.xla_gpu


def _by_name(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the operator's arguments, which may all be positional."""
    names = [argument.name for argument in operator._schema.arguments]

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(**dict(zip(names, arguments, strict=False)), **keywords)

    return call


def _kv_cache_update(
    kv_cache: Any, key: Any, value: Any, slot_mapping: Any, *, env: Any, **options: Any
) -> None:
    written = [kv_cache, *map(options.get, WRITTEN)]
    targets = [x for x in written if x is not None]
    arrays, keywords = env.t2j_iso(((kv_cache, key, value, slot_mapping), options))
    updated = jax_frontend.kv_cache_update(*arrays, **keywords)
    for target, array in zip(targets, updated if len(targets) > 1 else [updated], strict=True):
        _assign(target, array)


def _attention(
    function: Callable[..., Any], *, causal: Any = True, causal_seqs: Any = None, **arguments: Any
) -> Any:
    """A schema has no type for a bool or a tensor, JAX's function needs none."""
    return function(causal=causal if causal_seqs is None else causal_seqs, **arguments)


def _ragged_paged_attention(*, use_kernel: bool = True, **arguments: Any) -> Any:
    return jax_frontend.ragged_paged_attention(**arguments)


def _assign(target: Any, array: Any) -> None:
    if isinstance(target, torchax.tensor.View):
        target.update(array)
    else:
        target._elem = array


def _register() -> None:
    paged_attention = partial(_attention, jax_frontend.paged_attention)
    functions: dict[Any, Callable[..., Any]] = {
        _OPS.paged_attention.default: paged_attention,
        _OPS.paged_attention.lse: partial(paged_attention, return_lse=True),
        _OPS.varlen_attention.default: partial(_attention, jax_frontend.varlen_attention),
        _OPS.ragged_paged_attention.default: _ragged_paged_attention,
        _OPS.simple_add.default: jax_frontend.simple_add,
    }
    for operator, function in functions.items():
        register_torch_dispatch_op(operator, _by_name(operator, function))
    for overload in ("default", "with_scales", "full"):
        register_torch_dispatch_op(
            getattr(_OPS.kv_cache_update, overload),
            _kv_cache_update,
            is_jax_function=False,
            needs_env=True,
            is_view_op=True,  # otherwise it gets copies of views
        )
    if torchax._env is not None:  # an environment copies the registered operators when it is made
        torchax._env.load_ops()


_register()
