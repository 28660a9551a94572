"""What ``python -m examples.replay`` does once its options are known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples import processes
from examples.replay import report, trace
from examples.replay.models import MODELS
from examples.replay.run import Result, Sample, replay
from examples.scheduler import Arrival, Limits

_MOST_REQUESTS = 20_000


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
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
            backends=options.backends,
            num_steps=options.steps,
            seconds_per_step=options.step_seconds,
            sample_every=options.sample_every,
            on_step=on_step,
        )
