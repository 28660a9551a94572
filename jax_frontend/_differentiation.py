"""The rule for ``jax.grad`` and its kin: an op refuses to be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


def without_derivative(
    op: str, function: Callable[..., tuple[jax.Array, ...]]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes a function raise NotImplementedError where it is differentiated."""
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(partial(_refuse, op))
    return wrapped


def _refuse(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
        "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
    )
