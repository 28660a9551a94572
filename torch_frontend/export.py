"""Programs for another platform than this process runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PLATFORMS = ("cpu", "cuda")

_platform: ContextVar[str | None] = ContextVar("_platform", default=None)


@contextmanager
def export_platform(platform: str) -> Iterator[None]:
    """Within it, torch_xla's graphs hold the ops' calls for a platform: ``"cpu"`` or ``"cuda"``.

    For exporting on a machine without a GPU a program that will run on one; a graph traced for
    another platform than torch_xla's own device cannot run here. Elsewhere the device decides.

    Example::

        with torch_frontend.export_platform("cuda"):
            program = exported_program_to_stablehlo(torch.export.export(model, arguments))
    """
    if platform not in _PLATFORMS:
        raise ValueError(f"export_platform: platform must be 'cpu' or 'cuda'; got {platform!r}")
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def chosen_platform() -> str | None:
    """The platform of the innermost ``export_platform``, if any."""
    return _platform.get()
