"""Refuses versions of a library that an integration was not tried with."""

from importlib import metadata


def require(library: str, tried: str) -> None:
    """Raises an ImportError unless a version of the library that starts with ``tried`` is there."""
    who = f"torch_frontend.integrations.{library}"
    extra = f"pip install 'xla-paged-attention[{library}]'"
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{who} needs {library}, which is not installed: {extra}") from error
    if not f"{version}.".startswith(f"{tried}."):
        raise ImportError(f"{who} was tried with {library} {tried} only; got {version}: {extra}")
