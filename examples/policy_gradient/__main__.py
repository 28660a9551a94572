"""Samples answers over a paged cache, computes their log-probabilities again packed, as a trainer
does, and takes one step of a policy gradient. Says which bits of the two are equal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from examples import commands
from xla_paged_attention.exits import end_when_interrupted, needs


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if attention differs in a bit."""
    parser = argparse.ArgumentParser(prog="python -m examples.policy_gradient", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="a checkpoint of the Llama family; else SmolLM2-135M-Instruct")
    add("--framework", nargs="+", choices=["jax", "torch"], default=["jax", "torch"])
    add("--max-new-tokens", type=int, default=24, help="tokens per answer (default 24)")
    add("--iterations", type=int, default=1, help="how often it does so (default 1)")
    add("--learning-rate", type=float, default=1e-4, help="of the step (default 1e-4)")
    options = parser.parse_args(arguments)
    with needs("examples.policy_gradient", commands.DEMO):
        from examples.policy_gradient.run import run  # noqa: PLC0415  (the help needs no framework)
    return run(options)


if __name__ == "__main__":
    end_when_interrupted()
    sys.exit(main())
