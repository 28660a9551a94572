"""The command ``xla-paged-attention``."""

from __future__ import annotations

import argparse
import os
import sys

from xla_paged_attention import __version__

NAME = "xla-paged-attention"


def check(arguments: list[str]) -> int:
    """Tries a small step through every installed backend, and says what is built and installed."""
    from shared_ffi.selftest import report  # noqa: PLC0415  (what the other command does without)

    return report.main(arguments, f"{NAME} check")


def serve(arguments: list[str]) -> int:
    """Starts vLLM's server on a CPU with this attention."""
    from xla_paged_attention.server import serve  # noqa: PLC0415

    serve.main(arguments)


COMMANDS = {"check": check, "serve": serve}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Paged attention as one XLA custom call, for JAX and for PyTorch.",
        epilog="\n".join(f"  {name:<8}{run.__doc__}" for name, run in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=f"{NAME} {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="what to do; --help after it says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    options = parser.parse_args(arguments)
    # The processes that a command starts find the installed package, in the folder of a clone, too.
    os.environ["PYTHONSAFEPATH"] = "1"
    return COMMANDS[options.command](options.arguments)


if __name__ == "__main__":
    sys.exit(main())
