"""Hours of traffic in minutes: `python -m tests.reliability.soak --minutes 60`.

Requests of a trace, a sixteenth as long, go through a small pool that preempts and reuses blocks,
and some are cancelled. In between, one request is always the same. Checked are its bits, the pool's
books, and the memory of the process, whose slope is printed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.workload import MODELS, generate_trace, read_trace
from xla_paged_attention.engine.scheduler import Arrival, Limits, Scheduler

MODULE = "tests.reliability.soak"
ROOT = Path(__file__).parents[2]
TRACE = ROOT.parent / "shared/data/azure_conv.csv"
BACKENDS = ("torch", "jax", "torch_xla", "openxla")

LIMITS = Limits(block_size=4, num_blocks=80, max_seqs=8, max_blocks_per_seq=40, token_budget=32)
SHORTER = 16
SECONDS_PER_STEP = 0.09  # of the trace's clock: requests arrive a little faster than they are done
REQUESTS_PER_PASS = 100
SHARE_OF_CANCELS = 0.05  # of the steps
CANARY = [Arrival(0.0, 37, 9)]  # a prompt in two chunks, then 9 steps of decoding
WARM_UP = 0.25  # of the run


@dataclass
class Report:
    """What one backend did in a run."""

    backend: str
    steps: int = 0
    tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    canaries: int = 0
    checksums: list[int] = field(default_factory=list)  # of all outputs of each pass
    seconds: float = 0.0
    memory: list[tuple[int, float]] = field(default_factory=list)  # (steps, KiB)

    @property
    def slope(self) -> float:
        """KiB per 1000 steps after the warm-up, by least squares. The pass that grew most counts as
        a usual one: torch_xla takes a MiB once, in any pass, and a leak grows in all of them."""
        steps, kib = np.array(self.memory[int(WARM_UP * len(self.memory)) :]).T
        growth = np.diff(kib)
        if growth.size:
            growth[growth.argmax()] = np.median(growth)
        return float(np.polyfit(steps, [0, *growth.cumsum()], 1)[0] * 1000)

    def __str__(self) -> str:
        return (
            f"{self.backend}: {self.steps:,} steps, {self.tokens:,} tokens in {self.seconds:.0f} s; "
            f"{self.finished:,} requests finished, {self.cancelled:,} cancelled, "
            f"{self.preemptions:,} preemptions; the same bits {self.canaries:,} times, the pool "
            f"exact after each step; memory "
            f"{self.memory[-1][1] / 1024:.0f} MiB, {self.slope:+.1f} KiB per 1000 steps"
        )


def arrivals(path: Path | None) -> Iterator[Arrival]:
    """Requests without end, shorter than those of the trace."""
    requests = [*(read_trace(path) if path else generate_trace(5000))]
    for i in itertools.count():
        request = requests[i % len(requests)]
        prompt, generated = request.prompt_tokens, request.generated_tokens
        yield Arrival(i % REQUESTS_PER_PASS / 5.5, prompt // SHORTER + 1, generated // SHORTER + 1)


class Soak:
    """A backend under traffic."""

    def __init__(self, backend: str, path: Path | None = None, seed: int = 0) -> None:
        # Imports the frameworks.
        from harness.steps import RUNNERS, TokenValues  # noqa: PLC0415

        model = MODELS["tiny"]
        shape = (LIMITS.num_blocks, LIMITS.block_size, 2 * model.num_kv_heads, model.head_size)
        self._runner = RUNNERS[backend](model, np.zeros(shape, np.float32))
        self._values = TokenValues(model, "float32")
        self._arrivals = arrivals(path)
        self._rng = np.random.default_rng(seed)
        self._canary: int | None = None
        self.report = Report(backend)

    def run(self, seconds: float | None = None, passes: int | None = None) -> Report:
        """Runs passes of the traffic until the time is over."""
        began = time.monotonic()
        for number in itertools.count():
            is_over = seconds is not None and time.monotonic() - began > seconds
            if is_over or number == passes:
                break
            requests = [*itertools.islice(self._arrivals, REQUESTS_PER_PASS)]
            self.report.checksums.append(self._run_pass(requests, SHARE_OF_CANCELS))
            canary = self._run_pass(CANARY, 0.0)
            if self._canary not in (None, canary):
                raise AssertionError(f"the same request has other bits in pass {number}")
            self._canary = canary
            self.report.canaries += 1
            gc.collect()
            self.report.memory.append((self.report.steps, resident_kib()))
        self.report.seconds = time.monotonic() - began
        return self.report

    def _run_pass(self, requests: list[Arrival], share_of_cancels: float) -> int:
        """Serves requests until all are done. Returns a checksum of the outputs."""
        scheduler, checksum, clock = Scheduler(requests, LIMITS), 0, 0.0
        cancelled = 0
        while not scheduler.is_done:
            step = scheduler.next_step(clock)
            clock += SECONDS_PER_STEP
            if step is not None:
                output = self._run_step(step)
                checksum = zlib.crc32(output, checksum)
                scheduler.complete()
            present = [*scheduler.running, *scheduler.waiting]
            if present and self._rng.random() < share_of_cancels:
                chosen = present[self._rng.integers(len(present))].number
                cancelled += scheduler.cancel(chosen)
            check_books(scheduler)
        if scheduler.finished + cancelled != len(requests) or scheduler.used_blocks:
            raise AssertionError("a request or a block was lost")
        self.report.finished += scheduler.finished
        self.report.cancelled += cancelled
        self.report.preemptions += scheduler.preemptions
        return checksum

    def _run_step(self, step: Any) -> bytes:
        output = self._runner.run(self._values.operands(step))
        self.report.steps += 1
        self.report.tokens += step.num_tokens
        if not np.isfinite(output).all() or output[step.num_tokens :].any():
            raise AssertionError("a row is not finite, or a padding row not zero")
        return output.tobytes()


def check_books(scheduler: Scheduler) -> None:
    """Every block is free or belongs to one running request."""
    held = [block for request in scheduler.running for block in request.blocks]
    if len({*held}) != len(held) or len(held) != scheduler.used_blocks:
        raise AssertionError("the pool's books are wrong")
    if any(request.blocks for request in scheduler.waiting):
        raise AssertionError("a waiting request holds blocks")


def resident_kib() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def main() -> int:
    """Returns 1 if two backends give other outputs for the same traffic."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all backends together")
    parser.add_argument("--passes", type=int, help="for each backend, whatever time they take")
    parser.add_argument(
        "--backend", nargs="*", default=["torch", "jax", "torch_xla"], choices=BACKENDS
    )
    parser.add_argument("--trace", type=Path, default=TRACE if TRACE.exists() else None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    reports = []
    seconds = None if options.passes else options.minutes * 60 / len(options.backend)
    for backend in options.backend:
        reports.append(Soak(backend, options.trace, options.seed).run(seconds, options.passes))
        print(reports[-1], flush=True)
    passes = min(len(report.checksums) for report in reports)
    same = all(x.checksums[:passes] == reports[0].checksums[:passes] for x in reports)
    print(f"the backends' bits {'are the same' if same else 'differ'} in the first {passes} passes")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
