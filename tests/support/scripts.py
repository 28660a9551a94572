"""Python scripts that need a process of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS_TO_END = 600  # for a process that may share its processors with many


def dump_flags(directory: Path) -> str:
    """XLA_FLAGS of a process whose torch_xla programs hlo.CompiledPrograms reads. JAX shows its
    optimized HLO without a dump."""
    module_filter = "--xla_dump_hlo_module_re=SyncTensorsGraph.*"
    return f"--xla_dump_to={directory} --xla_dump_hlo_as_text {module_filter}"


def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a script in the repository's root, on the CPU. It sees only these variables of this
    process's environment: the paths, and where temporary files go."""
    defaults = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    for name in ("PATH", "PYTHONPATH", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        if name in os.environ:
            defaults[name] = os.environ[name]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=Path(__file__).parents[2],
        env=defaults | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end."""
    process = start(script, *arguments, **environment)
    output, errors = process.communicate(timeout=SECONDS_TO_END)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def output(script: str, *arguments: str, **environment: str) -> list[str]:
    """Runs a script, which must not fail. Returns the lines that it prints."""
    outcome = run(script, *arguments, **environment)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()


def run_together(script: str, commands: Sequence[Sequence[str]], **environment: str) -> list[str]:
    """Runs a script in several processes at once, each with arguments of its own; none may fail.
    Returns what each prints."""
    processes = [start(script, *arguments, **environment) for arguments in commands]
    outcomes = [process.communicate(timeout=SECONDS_TO_END) for process in processes]
    for process, (_, errors) in zip(processes, outcomes, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outcomes]


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for what another process does. A busy machine may take long."""
    deadline = time.monotonic() + SECONDS_TO_END
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: str) -> bool:
    """Whether a process does nothing more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def free_address() -> str:
    """An address of this machine where no process listens. Its port is none of those, from 32768
    on, that Linux gives to others meanwhile, nor one that another worker of these tests tries."""
    first = 10_000 + os.getpid() % 1000 * 20
    for port in range(first, first + 20):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return f"localhost:{port}"
    raise OSError(f"no free port from {first} to {first + 19}")
