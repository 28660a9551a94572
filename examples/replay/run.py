"""What ``python -m examples.replay`` does once its options are known: drives the steps of a trace
through the backends and compares what comes out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples import commands
from examples.replay import report
from examples.replay.report import BackendResult, Result, Sample
from harness import hlo, reference
from harness.arrays import DTYPES
from harness.compare import max_error
from harness.steps import RUNNERS, LayerRunner, Operands, TokenValues
from harness.workload import MODELS, Model, generate_trace, read_trace
from xla_paged_attention.engine.scheduler import Arrival, Limits, Scheduler

SAMPLED_ROWS = 4  # of each sequence, on a sampled step
_MOST_REQUESTS = 20_000


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    return commands.run(options, _replay, report.report_of, "report.html")


def _replay(options: argparse.Namespace, console: Console) -> Result:
    arrivals: Iterable[Arrival]
    if options.trace:
        arrivals, name = read_trace(options.trace), options.trace.name
    else:
        arrivals, name = generate_trace(_MOST_REQUESTS), "a generated trace"
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


def replay(
    arrivals: Iterable[Arrival],
    *,
    trace: str,
    model: Model,
    dtype: str,
    limits: Limits,
    backends: Sequence[str],
    num_steps: int,
    seconds_per_step: float,
    sample_every: int,
    on_step: Callable[[Sample], None],
) -> Result:
    """Runs up to `num_steps` steps of a trace through every backend, side by side."""
    shape = (limits.num_blocks, limits.block_size, 2 * model.num_kv_heads, model.head_size)
    cache = np.zeros(shape, DTYPES[dtype])
    runners: list[LayerRunner] = [RUNNERS[name](model, cache) for name in backends]
    scheduler, values = Scheduler(arrivals, limits), TokenValues(model, dtype)
    differences = {runner.name: 0.0 for runner in runners}
    errors = {runner.name: 0.0 for runner in runners}
    samples: list[Sample] = []
    timed: dict[str, list[tuple[int, float]]] = {runner.name: [] for runner in runners}
    oracle_rows, clock = 0, 0.0
    operands: Operands | None = None

    while len(samples) < num_steps and not scheduler.is_done:
        step = scheduler.next_step(clock)
        clock += seconds_per_step
        if step is None:
            continue
        operands = values.operands(step)
        sample = Sample(
            num_tokens=step.num_tokens,
            num_decode_tokens=step.num_decode_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            used_blocks=scheduler.used_blocks,
        )
        outputs = {}
        for runner in runners:
            compiled = runner.compiles()
            start = time.perf_counter()
            outputs[runner.name] = runner.run(operands)
            sample.seconds[runner.name] = time.perf_counter() - start
            if runner.compiles() == compiled:
                timed[runner.name].append((step.num_tokens, sample.seconds[runner.name]))
        first = outputs[runners[0].name].astype(np.float64)
        for name, output in outputs.items():
            differences[name] = max(differences[name], max_error(output, first))
        if len(samples) % sample_every == 0:
            rows, expected = _oracle(operands, runners[0].cache(), model)
            oracle_rows += len(rows)
            for name, output in outputs.items():
                errors[name] = max(errors[name], max_error(output[rows], expected))
        scheduler.complete()
        samples.append(sample)
        on_step(sample)

    assert operands is not None, "the trace has no requests"
    return Result(
        model=str(model),
        dtype=dtype,
        limits=limits,
        trace=trace,
        steps=samples,
        backends={
            runner.name: BackendResult(
                tokens_per_second=_rate(timed[runner.name]),
                compiles=runner.compiles(),
                max_difference=differences[runner.name],
                max_error=errors[runner.name],
                custom_calls=hlo.custom_calls(runner.hlo(operands) or "", *hlo.STEP),
            )
            for runner in runners
        },
        oracle_rows=oracle_rows,
        finished=scheduler.finished,
        generated_tokens=scheduler.generated_tokens,
        truncated=scheduler.truncated,
        preemptions=scheduler.preemptions,
    )


def _rate(timed: Sequence[tuple[int, float]]) -> float:
    seconds = sum(seconds for _, seconds in timed)
    return sum(tokens for tokens, _ in timed) / seconds if seconds else 0.0


def _oracle(operands: Operands, cache: np.ndarray, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """The float64 oracle's output for the last few tokens of each sequence, and their rows."""
    num_seqs = int(operands.num_seqs[0])
    start = operands.query_start_loc
    counts = [min(SAMPLED_ROWS, int(start[s + 1] - start[s])) for s in range(num_seqs)]
    rows = np.concatenate([np.arange(start[s + 1] - n, start[s + 1]) for s, n in enumerate(counts)])
    expected = reference.paged_attention(
        operands.query[rows],
        cache,
        operands.context_lens,
        operands.block_tables,
        np.cumsum([0, *counts]),
        num_seqs,
        **model.attributes(),
    )
    return rows, expected
