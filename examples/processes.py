"""Several processes that run one program on all of their devices, by jax.distributed."""

from __future__ import annotations

import argparse
import os
import sys


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--distributed``, whose values `join` takes."""
    parser.add_argument(
        "--distributed",
        nargs="*",
        metavar="ADDRESS COUNT NUMBER",
        help="one of COUNT processes that share their devices: the first one's address as "
        "host:port, how many there are, and this one's number; with no values, as SLURM, MPI or "
        "Kubernetes say",
    )


def join(values: list[str]) -> bool:
    """Joins the other processes; call it before JAX looks for devices.

    Args:
        values: the address of the first process as ``host:port``, the number of processes, and
            which one this is; none of them, if the launcher tells (SLURM, Open MPI, Kubernetes).

    Returns:
        whether this is the first process.

    Raises:
        ValueError: the values are not these, or nothing tells them.
    """
    if values and (len(values) != 3 or not all(value.isdecimal() for value in values[1:])):
        rule = "--distributed must be ADDRESS COUNT NUMBER, or have no values"
        raise ValueError(f"{rule}; got {' '.join(values)}")
    import jax  # noqa: PLC0415  (the help of a command needs no framework)

    _print_from_python_only()
    address, count, number = values or (None, None, None)
    try:
        jax.distributed.initialize(
            address, None if count is None else int(count), None if number is None else int(number)
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--distributed: {error}") from error
    return jax.process_index() == 0


def _print_from_python_only() -> None:
    """Sends to stderr what libraries write to the descriptor of stdout: Gloo names its ranks."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
