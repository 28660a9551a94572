"""Drives the steps of a trace through the backends and compares what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from examples.replay.models import Model
from examples.replay.steps import BACKENDS, Backend, Operands
from examples.scheduler import Arrival, Limits, Scheduler, Step
from harness import hlo, reference
from harness.arrays import DTYPES
from harness.compare import max_error

SAMPLED_ROWS = 4  # of each sequence, on a sampled step


@dataclass
class Sample:
    """One step as the report shows it."""

    num_tokens: int
    num_decode_tokens: int
    running: int
    waiting: int
    preemptions: int  # so far
    used_blocks: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class BackendResult:
    """What a backend did in the whole run."""

    tokens_per_second: float  # without the steps that compiled
    compiles: int
    max_difference: float  # to the first backend
    max_error: float  # to the oracle, on sampled steps
    custom_calls: list[str]


@dataclass
class Result:
    """A run."""

    model: str
    dtype: str
    limits: Limits
    trace: str
    steps: list[Sample]
    backends: dict[str, BackendResult]
    oracle_rows: int
    finished: int
    generated_tokens: int
    truncated: int
    preemptions: int

    @property
    def compile_bound(self) -> int:
        """Programs per backend: one for each padded token count."""
        return len(self.limits.buckets)

    @property
    def same_custom_calls(self) -> bool:
        """Whether all backends that have HLO hold the same custom calls, letter for letter."""
        calls = [backend.custom_calls for backend in self.backends.values() if backend.custom_calls]
        return all(found == calls[0] for found in calls)

    @property
    def same_bits(self) -> bool:
        """Whether all backends gave the same outputs."""
        return all(backend.max_difference == 0 for backend in self.backends.values())

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return asdict(self) | {
            "compile_bound": self.compile_bound,
            "same_custom_calls": self.same_custom_calls,
            "same_bits": self.same_bits,
        }


class TokenValues:
    """Query, key and value of a token: a function of request and position, so that a token that is
    computed anew after preemption has the values it had."""

    _POOL = 4096

    def __init__(self, model: Model, dtype: str) -> None:
        rng = np.random.default_rng(0)
        self._pools = [
            rng.standard_normal((self._POOL, heads, model.head_size)).astype(DTYPES[dtype])
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        ]

    def __call__(self, step: Step) -> list[np.ndarray]:
        """Arrays [bucket, heads, head_size] for query, key and value."""
        mixed = step.request_of_token * 7919 + step.position_of_token * 104_729
        return [pool[(mixed + 31 * i) % self._POOL] for i, pool in enumerate(self._pools)]


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
    opened: list[Backend] = [BACKENDS[name](model, cache) for name in backends]
    scheduler, values = Scheduler(arrivals, limits), TokenValues(model, dtype)
    differences = {backend.name: 0.0 for backend in opened}
    errors = {backend.name: 0.0 for backend in opened}
    samples: list[Sample] = []
    timed: dict[str, list[tuple[int, float]]] = {backend.name: [] for backend in opened}
    oracle_rows, clock = 0, 0.0
    operands: Operands | None = None

    while len(samples) < num_steps and not scheduler.is_done:
        step = scheduler.next_step(clock)
        clock += seconds_per_step
        if step is None:
            continue
        query, key, value = values(step)
        operands = Operands(
            query=query,
            key=key,
            value=value,
            slot_mapping=step.slot_mapping,
            context_lens=step.context_lens,
            block_tables=step.block_tables,
            query_start_loc=step.query_start_loc,
            num_seqs=step.num_seqs,
        )
        sample = Sample(
            num_tokens=step.num_tokens,
            num_decode_tokens=step.num_decode_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            used_blocks=scheduler.used_blocks,
        )
        outputs = {}
        for backend in opened:
            compiled = backend.compiles()
            start = time.perf_counter()
            outputs[backend.name] = backend.run(operands)
            sample.seconds[backend.name] = time.perf_counter() - start
            if backend.compiles() == compiled:
                timed[backend.name].append((step.num_tokens, sample.seconds[backend.name]))
        first = outputs[opened[0].name].astype(np.float64)
        for name, output in outputs.items():
            differences[name] = max(differences[name], max_error(output, first))
        if len(samples) % sample_every == 0:
            rows, expected = _oracle(operands, opened[0].cache(), model)
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
            backend.name: BackendResult(
                tokens_per_second=_rate(timed[backend.name]),
                compiles=backend.compiles(),
                max_difference=differences[backend.name],
                max_error=errors[backend.name],
                custom_calls=_custom_calls(backend.hlo(operands)),
            )
            for backend in opened
        },
        oracle_rows=oracle_rows,
        finished=len(scheduler.finished),
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


def _custom_calls(text: str | None) -> list[str]:
    if text is None:
        return []
    targets = ("xla_gpu_kv_cache_update", "xla_gpu_paged_attention")
    return [call for target in targets for call in hlo.custom_calls(text, target)]
