"""Exports programs for another platform than this process runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shared_ffi.spec import value_error

_PLATFORMS = ("cpu", "cuda")

_platform: ContextVar[str | None] = ContextVar("_platform", default=None)


@contextmanager
def export_platform(platform: str) -> Iterator[None]:
    """Makes torch_xla's graphs hold the ops' calls for a platform, ``"cpu"`` or ``"cuda"``.

    Use it to export a program for a GPU on a machine without one. A graph that is traced for
    another platform than torch_xla's device cannot run here. By default, the device decides.

    Example::

        with torch_frontend.export_platform("cuda"):
            program = exported_program_to_stablehlo(torch.export.export(model, arguments))
    """
    if platform not in _PLATFORMS:
        rule, remedy = "be 'cpu' or 'cuda'", "By default torch_xla's device decides"
        raise value_error("export_platform", "platform", rule, repr(platform), remedy)
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def chosen_platform() -> str | None:
    """Returns the platform of the innermost ``export_platform``; None outside of all."""
    return _platform.get()
