"""Refuses versions of a library that an integration was not tried with."""

from importlib import import_module


def require(library: str, *tried: str) -> None:
    """Raises an ImportError unless the library is there in a version that was ``tried``, or whose
    number begins with one of those.

    The module is asked, not the installer: torch_xla 2.9 brings a folder with an older torchax.
    """
    who = f"torch_frontend.integrations.{library}"
    extra = f"pip install 'xla-paged-attention[{library}]'"
    try:
        version = import_module(library).__version__
    except ModuleNotFoundError as error:
        raise ImportError(f"{who} needs {library}, which is not installed: {extra}") from error
    if not f"{version}.".startswith(tuple(f"{x}." for x in tried)):
        versions = " and ".join(tried)
        raise ImportError(f"{who} was tried with {library} {versions} only; got {version}: {extra}")
