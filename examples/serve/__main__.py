"""Serves a model with vLLM on this attention, behind the API of OpenAI.

Everything after ``--`` goes to vLLM's server. Ends with an error if the server uses another
attention.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a checkpoint is a folder: nothing is downloaded

from examples import commands
from examples.serve import attention

NAME = "model"
"""The model's name in requests."""

# One warning says that api_server is deprecated, another that an interrupt leaves shared memory to
# the process of Python that then removes it. That process has the options of its parent.
_QUIET = (
    *("-W", "ignore::DeprecationWarning:__main__"),
    *("-W", "ignore::UserWarning:multiprocessing.resource_tracker"),
)
_TRACKER = b"from multiprocessing.resource_tracker import main"


def main(arguments: list[str] | None = None) -> None:
    """The command. Returns when the server has ended."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cache_gib))
    sockets = tempfile.mkdtemp(prefix="xla-serve-")
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    running: list[subprocess.Popen[str]] = []

    def end() -> None:
        for process in running:
            _kill(process.pid)
        shutil.rmtree(sockets, ignore_errors=True)

    commands.end_when_interrupted(end)
    try:
        _serve(options, running)
    finally:
        end()


def _serve(options: argparse.Namespace, running: list[subprocess.Popen[str]]) -> None:
    prepare = [sys.executable, "-m", "examples.serve.prepare", options.dtype, str(options.folder)]
    preparation = _start([*prepare, *([str(options.model)] if options.model else [])], running)
    model, _ = preparation.communicate()
    if preparation.returncode:
        sys.exit(preparation.returncode)
    # The command vllm of the package vllm-cpu does not start: it looks for a package vllm.
    command = [sys.executable, *_QUIET, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model.strip(), *_choices(options), *options.vllm]
    print("examples.serve: vLLM starts, which takes a minute or more", flush=True)
    server = _start(command, running, stdout=None)
    names = _wait_for(server, f"http://127.0.0.1:{options.port}")
    if not attention.is_ours(names):
        sys.exit(
            "examples.serve: the attention backend must be CUSTOM of xla-paged-attention; vLLM "
            f"uses {', '.join(names) or 'none'}. Its log above says why"
        )
    # Among a hundred lines of vLLM's log.
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    ready = f"http://127.0.0.1:{options.port}/v1 is ready, attention: {names[0]}"
    print(f"\n{bold}examples.serve: {ready}{plain}\n", flush=True)
    while server.poll() is None:  # wait() would keep others from asking whether it has ended
        time.sleep(0.2)
    sys.exit(f"examples.serve: vLLM ended with status {server.returncode}; its log is above")


def _start(
    command: list[str], running: list[subprocess.Popen[str]], stdout: int | None = subprocess.PIPE
) -> subprocess.Popen[str]:
    # A session of its own: an interrupt in the terminal reaches this process alone, which ends it.
    process = subprocess.Popen(command, stdout=stdout, text=True, start_new_session=True)
    running.append(process)
    return process


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _choices(options: argparse.Namespace) -> list[str]:
    return [
        *("--attention-backend", "CUSTOM"),
        # PyTorch 2.13 compiles a model in bfloat16 wrongly on some processors with AVX-512,
        # whatever the attention.
        "--enforce-eager",
        *("--worker-extension-cls", f"{attention.__name__}.{attention.Worker.__name__}"),
        *("--middleware", f"{attention.__name__}.{attention.Middleware.__name__}"),
        *("--served-model-name", NAME),
        *("--dtype", options.dtype),
        *("--host", "127.0.0.1"),
        *("--port", str(options.port)),
    ]


def _wait_for(server: subprocess.Popen[str], url: str) -> list[str]:
    """The names of its attention, once the server answers."""
    while server.poll() is None:
        with contextlib.suppress(OSError):
            return attention.ask(url)
        time.sleep(0.5)
    sys.exit(f"examples.serve: vLLM ended with status {server.returncode}; its log is above")


def _kill(leader: int) -> None:
    """Ends the processes of a group, except for those of Python that then remove shared memory."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            if group == leader and _TRACKER not in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
