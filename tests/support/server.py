"""The command that serves the packaged model with vLLM, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On a loaded machine, a start or a step may take longer than the minutes that vLLM grants.
    "VLLM_ENGINE_READY_TIMEOUT_S": "7200",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "7200",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server(NamedTuple):
    """A command that serves the packaged model."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@contextlib.contextmanager
def started(folder: Path, *options: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "xla_paged_attention", "serve", "--port", str(port)]
    command += ["--dtype", "float32", "--folder", str(folder / "model"), *options]
    environment = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()


def ready(folder: Path) -> Iterator[Server]:
    """A server, when it is ready."""
    with started(folder) as server:
        while not any(" is ready after " in line for line in server.lines()):
            assert server.process.poll() is None, server.lines()[-50:]
            time.sleep(1)
        yield server
