"""Replays a trace of requests through continuous batching over a paged cache, the same steps in
each framework, and reports whether they agree and how fast they are."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from examples import commands
from xla_paged_attention.exits import end_when_interrupted, needs

with needs("examples.replay", commands.DEMO):
    from harness.workload import MODELS

    # isort: split
    # Where NumPy is missing, ml_dtypes prints more than the error.
    from harness.arrays import DTYPES

BACKENDS = ("jax", "torch_xla", "openxla", "torch", "jax-mesh")
GROUPS = {
    "both": ["jax", "torch_xla"],
    "all": [name for name in BACKENDS if name != "jax-mesh"],
    "mesh": ["torch", "jax-mesh"],
}
_BACKEND_HELP = (
    "all: those of one device; both: jax and torch_xla; mesh: torch, and JAX on all devices, which "
    "share the kv heads"
)


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if the backends do not agree, and 2 if it cannot begin."""
    options = _parser().parse_args(arguments)
    options.backends = GROUPS.get(options.backend, [options.backend])
    with needs("examples.replay", commands.DEMO):
        from examples.replay.run import run  # noqa: PLC0415  (the help needs no framework)
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.replay",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens; else generated")
    add("--backend", choices=[*BACKENDS, *GROUPS], default="all", help=_BACKEND_HELP)
    commands.add_distributed_option(parser)
    add("--steps", type=int, default=300, help="stop after this many steps")
    add("--model", choices=MODELS, default="tiny", help="attention shape")
    add("--dtype", choices=DTYPES, default="float32", help="of query and cache")
    add("--block-size", type=int, default=16, help="positions per block")
    add("--blocks", type=int, default=2048, help="blocks in the pool")
    add("--max-seqs", type=int, default=32, help="sequences per step")
    add("--max-len", type=int, default=4096, help="tokens per sequence; what is longer is cut")
    add("--token-budget", type=int, default=256, help="tokens per step")
    add("--step-seconds", type=float, default=0.08, help="trace time that a step takes")
    add("--sample-every", type=int, default=10, help="steps from one oracle check to the next")
    commands.add_report_options(parser, "report.html")
    return parser


if __name__ == "__main__":
    end_when_interrupted()
    sys.exit(main())
