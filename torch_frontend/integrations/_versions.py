"""Refuses versions of a library that an integration was not tried with."""

from importlib import import_module


def require(library: str, tried: str) -> None:
    """Raises an ImportError unless a version of the library that starts with ``tried`` is there.

    The module is asked, not the installer: torch_xla 2.9 brings a folder with an older torchax.
    """
    who = f"torch_frontend.integrations.{library}"
    extra = f"pip install 'xla-paged-attention[{library}]'"
    try:
        version = import_module(library).__version__
    except ModuleNotFoundError as error:
        raise ImportError(f"{who} needs {library}, which is not installed: {extra}") from error
    if not f"{version}.".startswith(f"{tried}."):
        raise ImportError(f"{who} was tried with {library} {tried} only; got {version}: {extra}")
