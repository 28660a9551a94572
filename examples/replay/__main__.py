"""Replays a trace of requests through continuous batching over a paged cache, the same steps in
each framework, and reports whether they agree and how fast they are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from examples import processes
from examples.replay import report, trace
from examples.replay.models import MODELS
from examples.replay.run import DTYPES, Result, Sample, replay
from examples.replay.steps import DOORS
from examples.scheduler import Arrival, Limits

_GROUPS = {
    "both": ["jax", "torch_xla"],
    "all": [name for name in DOORS if name != "jax-mesh"],
    "mesh": ["torch", "jax-mesh"],
}
_DOOR_HELP = (
    "both: jax and torch_xla; mesh: torch, and JAX on all devices, which share the kv heads"
)
_MOST_REQUESTS = 20_000


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if the doors do not agree, and 2 if it cannot begin."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        if options.distributed is not None and not processes.join(options.distributed):
            options.json, options.out, console.quiet = False, None, True
        result = _replay(options, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        report.to_terminal(result, console)
    if options.out:
        page = options.out / "report.html"
        report.to_html(result, page)
        console.print(f"The page: {page.resolve()}", soft_wrap=True)
    return 0 if result.same_bits and result.same_custom_calls else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.replay",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens; else generated")
    add("--door", choices=[*DOORS, *_GROUPS], default="both", help=_DOOR_HELP)
    processes.add_option(parser)
    add("--steps", type=int, default=200, help="stop after this many steps")
    add("--model", choices=MODELS, default="tiny", help="attention shape")
    add("--dtype", choices=DTYPES, default="float32", help="of query and cache")
    add("--block-size", type=int, default=16, help="positions per block")
    add("--blocks", type=int, default=512, help="blocks in the pool")
    add("--max-seqs", type=int, default=16, help="sequences per step")
    add("--max-len", type=int, default=4096, help="tokens per sequence; what is longer is cut")
    add("--token-budget", type=int, default=256, help="tokens per step")
    add("--step-seconds", type=float, default=0.25, help="trace time that a step takes")
    add("--sample-every", type=int, default=10, help="steps from one oracle check to the next")
    add("--out", type=Path, help="folder for report.html")
    add("--json", action="store_true", help="print the result as JSON, and nothing else")
    return parser


def _replay(options: argparse.Namespace, console: Console) -> Result:
    arrivals: Iterable[Arrival]
    if options.trace:
        arrivals, name = trace.read(options.trace), options.trace.name
    else:
        arrivals, name = trace.generate(_MOST_REQUESTS), "a generated trace"
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[running]} running, {task.fields[waiting]} waiting,"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("steps", total=options.steps, running=0, waiting=0)

        def on_step(sample: Sample) -> None:
            progress.update(task, advance=1, running=sample.running, waiting=sample.waiting)

        return replay(
            islice(arrivals, _MOST_REQUESTS),
            trace=name,
            model=MODELS[options.model],
            dtype=options.dtype,
            limits=Limits(
                block_size=options.block_size,
                num_blocks=options.blocks,
                max_seqs=options.max_seqs,
                max_blocks_per_seq=-(-options.max_len // options.block_size),
                token_budget=options.token_budget,
            ),
            doors=_GROUPS.get(options.door, [options.door]),
            num_steps=options.steps,
            seconds_per_step=options.step_seconds,
            sample_every=options.sample_every,
            on_step=on_step,
        )


if __name__ == "__main__":
    sys.exit(main())
