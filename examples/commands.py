"""What the commands of the examples share: how they run and report, and how several processes join.
Imports no library, so that they begin at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # no bars beside those of the commands

DEMO = "--editable '.[torch-xla]' --group demo  (with pip 25.1 or newer)"
"""What pip is to install for the examples of ``make demo``."""


def add_distributed_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--distributed``, whose values `join_processes` takes."""
    parser.add_argument(
        "--distributed",
        nargs="*",
        metavar="ADDRESS COUNT NUMBER",
        help="one of COUNT processes that share their devices: the first one's address as "
        "host:port, how many there are, and this one's number; with no values, as SLURM, MPI or "
        "Kubernetes say",
    )


def add_report_options(parser: argparse.ArgumentParser, page: str) -> None:
    """Adds the options that `run` reads.

    Args:
        page: the name of the report's file.
    """
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"folder for {page}")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else"
    )
    parser.add_argument(
        "--calls", action="store_true", help="print the custom calls of each program, too"
    )


def join_processes(values: list[str]) -> bool:
    """Joins the other processes, which run one program on all of their devices. Call it before JAX
    looks for devices.

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


def run(
    options: argparse.Namespace,
    compute: Callable[[argparse.Namespace, Any], Any],
    report_of: Callable[[Any], Any],
    page: str,
) -> int:
    """Computes a result and reports it as the options say. Returns the exit status.

    Args:
        options: with those of `add_report_options` and ``distributed``.
        compute: returns the result of these options, given a console for its progress. A ValueError
            is the user's mistake.
        report_of: returns the report of a result, an ``examples.page.Report``.
        page: the name of the report's file in ``options.out``.
    """
    from rich.console import Console  # noqa: PLC0415  (the help needs no library)

    console = Console(stderr=options.json)
    try:
        if options.distributed is not None and not join_processes(options.distributed):
            options.json, options.out, console.quiet = False, None, True
        result = compute(options, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        report_of(result).to_terminal(console)
        if options.calls:
            report_of(result).calls_to_terminal(console)
    if options.out:
        path = options.out / page
        report_of(result).to_html(path)
        console.print(f"The page: {path.resolve()}", soft_wrap=True)
    return 0 if result.is_good else 1
