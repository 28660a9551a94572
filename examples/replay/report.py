"""The result of a run, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from examples import page
from examples.page import COLORS, Headline
from xla_paged_attention.engine.scheduler import Limits


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
        found = page.same_calls([backend.custom_calls for backend in self.backends.values()])
        return found is None or found.good

    @property
    def is_good(self) -> bool:
        """Whether all backends agree, in bits and in custom calls."""
        return self.same_bits and self.same_custom_calls

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


def headlines(result: Result) -> list[Headline]:
    """What to know at a glance."""
    most_compiles = max(backend.compiles for backend in result.backends.values())
    error = max(backend.max_error for backend in result.backends.values())
    difference = max(backend.max_difference for backend in result.backends.values())
    rates = {name: backend.tokens_per_second for name, backend in result.backends.items()}
    fastest = max(rates, key=lambda name: rates[name])
    found = []
    if same := page.same_calls([backend.custom_calls for backend in result.backends.values()]):
        found.append(same)
    if len(result.backends) > 1:
        value = "0 (same bits)" if result.same_bits else f"{difference:.2g}"
        found.append(Headline("largest difference between backends", value, result.same_bits))
    return [
        *found,
        Headline("largest error against float64", f"{error:.1e}", error < 0.05),
        Headline(
            "programs compiled per backend",
            f"{most_compiles} of at most {result.compile_bound}",
            most_compiles <= result.compile_bound,
        ),
        Headline("tokens per second of this one layer", f"{rates[fastest]:,.0f} ({fastest})", True),
    ]


_LEGEND = (
    "Tokens are those of prompts and of answers, and their rate leaves out the steps that "
    "compiled. Differences are the largest of any output's element."
)


def rows(result: Result) -> list[list[str]]:
    """The table of the backends, its header first."""
    header = ["backend", "tokens/s", "programs compiled", "difference to first", "error to float64"]
    return [
        header,
        *(
            [
                name,
                f"{backend.tokens_per_second:,.0f}",
                str(backend.compiles),
                f"{backend.max_difference:.2g}",
                f"{backend.max_error:.2g}",
            ]
            for name, backend in result.backends.items()
        ),
    ]


def report_of(result: Result) -> page.Report:
    """The report of a run."""
    draws = (_plot_pool, _plot_batch, _plot_tokens, _plot_times)
    return page.Report(
        title=f"One attention layer, without a model, through {page.through(result.backends)}",
        run=f"{result.model}, {result.dtype}",
        headlines=headlines(result),
        rows=rows(result),
        legend=_LEGEND,
        summary=_traffic(result),
        calls={name: dict.fromkeys(x.custom_calls, "") for name, x in result.backends.items()},
        plots=[partial(_plot, draw, result) for draw in draws],
    )


def _traffic(result: Result) -> str:
    limits = result.limits
    largest = max(sample.used_blocks for sample in result.steps)
    return (
        f"{len(result.steps)} steps of {result.trace}: {result.finished} requests finished, "
        f"{result.generated_tokens:,} tokens generated, {result.preemptions} preemptions, "
        f"{result.truncated} of the requests cut to {limits.max_tokens_per_seq:,} tokens. "
        f"Pool: {limits.num_blocks} blocks of {limits.block_size}, at most {largest} in use. "
        f"Token counts are padded to {' or '.join(map(str, limits.buckets))}, a program each. "
        f"The oracle checked {result.oracle_rows:,} tokens."
    )


def _plot(draw: Callable[[Axes, Result], None], result: Result, axes: Axes) -> None:
    draw(axes, result)
    axes.set_xlim(0, len(result.steps) - 1 or 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")


def _series(result: Result, name: str) -> np.ndarray:
    return np.array([getattr(sample, name) for sample in result.steps])


def _plot_pool(axes: Axes, result: Result) -> None:
    used = 100 * _series(result, "used_blocks") / result.limits.num_blocks
    axes.fill_between(range(len(used)), used, color=COLORS[0], alpha=0.25)
    axes.plot(used, color=COLORS[0])
    preempted = np.flatnonzero(np.diff(_series(result, "preemptions"), prepend=0))
    if preempted.size:
        axes.plot(preempted, used[preempted], "v", color="#dc2626", label="preemption")
        axes.legend(loc="lower right")
    axes.set_title("Pool occupancy")
    axes.set_ylabel("blocks in use (%)")
    axes.set_ylim(top=105)


def _plot_batch(axes: Axes, result: Result) -> None:
    axes.plot(_series(result, "running"), color=COLORS[0], label="running")
    axes.plot(_series(result, "waiting"), color=COLORS[1], label="waiting")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Requests")
    axes.set_ylabel("requests")
    axes.legend(loc="upper left", ncols=2)


def _plot_tokens(axes: Axes, result: Result) -> None:
    decode = _series(result, "num_decode_tokens")
    prompt = _series(result, "num_tokens") - decode
    steps = range(len(decode))
    axes.stackplot(steps, decode, prompt, colors=COLORS, labels=("decode", "prompt"), alpha=0.8)
    axes.set_title("Tokens per step")
    axes.set_ylabel("tokens")
    axes.set_ylim(top=1.3 * max(_series(result, "num_tokens")))
    axes.legend(loc="upper left", ncols=2)


def _plot_times(axes: Axes, result: Result) -> None:
    slowest = []
    for color, name in zip(COLORS, result.backends, strict=False):
        milliseconds = 1e3 * np.array([sample.seconds[name] for sample in result.steps])
        slowest.append(np.quantile(milliseconds, 0.97))
        axes.plot(milliseconds, color=color, label=name, linewidth=1)
    axes.set_title("Time per step (the longest run off the scale)")
    axes.set_ylabel("ms")
    axes.set_ylim(top=1.6 * max(slowest))
    axes.legend(loc="upper left", ncols=4)
