"""The error for an option of another library that this library does not have."""

from __future__ import annotations

from typing import Any

from shared_ffi.spec import value_error


def refuse(op: str, **options: Any) -> None:
    """Raises ValueError for the first of these options that is not None."""
    for name, given in options.items():
        if given is not None:
            got = f"shape {list(given.shape)}" if hasattr(given, "shape") else repr(given)
            raise value_error(op, name, "be None, as it is not supported", got)
