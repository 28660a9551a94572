"""The report of a run: tables for the terminal, and one self-contained HTML page with plots."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.replay.run import Result

matplotlib.use("svg")
from matplotlib import pyplot as plt

_COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6")
_STYLE: Any = {
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "axes.labelcolor": "#475569",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.color": "#0f172a",
    "xtick.color": "#64748b",
    "ytick.color": "#64748b",
}


def headlines(result: Result) -> list[tuple[str, str, bool]]:
    """What to know at a glance: (label, value, whether it is as it should be)."""
    most_compiles = max(door.compiles for door in result.doors.values())
    error = max(door.max_error for door in result.doors.values())
    difference = max(door.max_difference for door in result.doors.values())
    rates = {name: door.tokens_per_second for name, door in result.doors.items()}
    fastest = max(rates, key=lambda name: rates[name])
    return [
        (
            "custom calls",
            "identical" if result.same_custom_calls else "different",
            result.same_custom_calls,
        ),
        (
            "largest difference between doors",
            "0 (same bits)" if result.same_bits else f"{difference:.2g}",
            result.same_bits,
        ),
        ("largest error against float64", f"{error:.1e}", error < 0.05),
        (
            "programs compiled per door",
            f"{most_compiles} of at most {result.compile_bound}",
            most_compiles <= result.compile_bound,
        ),
        ("tokens per second", f"{rates[fastest]:,.0f} ({fastest})", True),
    ]


def to_terminal(result: Result, console: Console) -> None:
    """Prints the report."""
    summary = Table.grid(padding=(0, 2))
    for label, value, good in headlines(result):
        summary.add_row(label, Text(value, "bold green" if good else "bold red"))
    console.print(Panel(summary, title=f"{result.model}, {result.dtype}", expand=False))

    doors = Table(title="Doors")
    doors.add_column("door")
    for column in ("tokens/s", "programs compiled", "difference to first", "error to float64"):
        doors.add_column(column, justify="right")
    for name, door in result.doors.items():
        doors.add_row(
            name,
            f"{door.tokens_per_second:,.0f}",
            str(door.compiles) if door.custom_calls else "none needed",
            f"{door.max_difference:.2g}",
            f"{door.max_error:.2g}",
        )
    console.print(doors)
    console.print(_traffic(result))
    for call in _calls(result):
        title = f"custom call in {', '.join(call['doors'])}"
        console.print(Panel(Group(*call["text"]), title=title, title_align="left"))


def to_html(result: Result, path: Path) -> None:
    """Writes the page; it needs no network and no other file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    page = environment.get_template("report.html.j2").render(
        result=result,
        headlines=headlines(result),
        traffic=_traffic(result),
        calls=_calls(result),
        plots=[_svg(draw, result) for draw in (_plot_pool, _plot_batch, _plot_tokens, _plot_times)],
    )
    path.write_text(page)


def _traffic(result: Result) -> str:
    limits = result.limits
    largest = max(sample.used_blocks for sample in result.steps)
    return (
        f"{len(result.steps)} steps of {result.trace}: {result.finished} requests finished, "
        f"{result.generated_tokens:,} tokens generated, {result.preemptions} preemptions, "
        f"{result.truncated} of the requests cut to {limits.max_tokens_per_seq:,} tokens. "
        f"Pool: {limits.num_blocks} blocks of {limits.block_size}, at most {largest} in use. "
        f"Token counts are padded to {' or '.join(map(str, limits.buckets))}, a program each. "
        f"The oracle checked {result.oracle_rows:,} tokens. Tokens per second leave out the steps "
        "that compiled."
    )


def _calls(result: Result) -> list[dict[str, Any]]:
    """The custom calls of each door that has HLO, one attribute a line."""
    found = []
    for name, door in result.doors.items():
        if door.custom_calls:
            lines = [line for call in door.custom_calls for line in [*_wrapped(call), ""]]
            found.append({"doors": [name], "text": lines[:-1]})
    return found


def _wrapped(call: str) -> list[str]:
    attributes = ("custom_call_target", "operand_layout_constraints", "output_to_operand_aliasing")
    for name in (*attributes, "api_version", "backend_config"):
        call = call.replace(f", {name}=", f",\n  {name}=")
    return call.splitlines()


def _svg(draw: Callable[[Axes, Result], None], result: Result) -> str:
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
        draw(axes, result)
        axes.set_xlim(0, len(result.steps) - 1 or 1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def _series(result: Result, name: str) -> np.ndarray:
    return np.array([getattr(sample, name) for sample in result.steps])


def _plot_pool(axes: Axes, result: Result) -> None:
    used = 100 * _series(result, "used_blocks") / result.limits.num_blocks
    axes.fill_between(range(len(used)), used, color=_COLORS[0], alpha=0.25)
    axes.plot(used, color=_COLORS[0])
    preempted = np.flatnonzero(np.diff(_series(result, "preemptions"), prepend=0))
    if preempted.size:
        axes.plot(preempted, used[preempted], "v", color="#dc2626", label="preemption")
        axes.legend(loc="lower right")
    axes.set_title("Pool occupancy")
    axes.set_ylabel("blocks in use (%)")
    axes.set_ylim(top=105)


def _plot_batch(axes: Axes, result: Result) -> None:
    axes.plot(_series(result, "running"), color=_COLORS[0], label="running")
    axes.plot(_series(result, "waiting"), color=_COLORS[1], label="waiting")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Requests")
    axes.set_ylabel("requests")
    axes.legend(loc="upper left", ncols=2)


def _plot_tokens(axes: Axes, result: Result) -> None:
    decode = _series(result, "num_decode_tokens")
    prompt = _series(result, "num_tokens") - decode
    steps = range(len(decode))
    axes.stackplot(steps, decode, prompt, colors=_COLORS, labels=("decode", "prompt"), alpha=0.8)
    axes.set_title("Tokens per step")
    axes.set_ylabel("tokens")
    axes.set_ylim(top=1.3 * max(_series(result, "num_tokens")))
    axes.legend(loc="upper left", ncols=2)


def _plot_times(axes: Axes, result: Result) -> None:
    slowest = []
    for color, name in zip(_COLORS, result.doors, strict=False):
        milliseconds = 1e3 * np.array([sample.seconds[name] for sample in result.steps])
        slowest.append(np.quantile(milliseconds, 0.97))
        axes.plot(milliseconds, color=color, label=name, linewidth=1)
    axes.set_title("Time per step (compiling steps run off the scale)")
    axes.set_ylabel("ms")
    axes.set_ylim(top=1.6 * max(slowest))
    axes.legend(loc="upper left", ncols=4)
