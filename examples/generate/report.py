"""The report of a run: tables for the terminal, and one self-contained HTML page with plots."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from examples import page
from examples.generate.run import TOLERANCE, Result
from examples.page import COLORS, Calls, Headline


def headlines(result: Result) -> list[Headline]:
    """What to know at a glance."""
    backends = result.backends.values()
    rates = {name: backend.generation.tokens_per_second for name, backend in result.backends.items()}
    fastest = max(rates, key=lambda name: rates[name])
    late = sum(backend.late_programs for backend in backends)
    differences = [x for backend in backends if (x := backend.max_difference) is not None]
    must = result.is_exact
    found = [
        Headline(
            "tokens of the backends",
            "the same" if result.same_tokens else "different",
            result.same_tokens or not must,
        ),
        Headline(
            "custom calls",
            "identical" if result.same_custom_calls else "different",
            result.same_custom_calls,
        ),
        Headline("programs compiled while generating", str(late), late == 0),
        Headline("tokens per second", f"{rates[fastest]:,.0f} ({fastest})", True),
    ]
    if differences:
        largest = max(differences)
        label = "largest difference of a log-probability"
        found.insert(1, Headline(label, f"{largest:.1g}", largest < TOLERANCE))
    if result.sampling.is_greedy:
        equal = min(backend.equal_answers for backend in backends)
        answers = f"{equal} of {len(result.prompts)}"
        good = equal == len(result.prompts) or not must
        found.insert(1, Headline("answers as with transformers' attention", answers, good))
        behind = max(backend.max_behind for backend in backends)
        if behind:
            label = "log-probability of a token behind transformers' best, at most"
            found.insert(2, Headline(label, f"{behind:.1g}", behind < TOLERANCE))
    return found


def rows(result: Result) -> list[list[str]]:
    """The table of the backends, its header first."""
    header = ["backend", "tokens/s", "first token", "ready after", "programs"]
    header += ["equal answers", "difference"]
    return [
        header,
        *(
            [
                name,
                f"{backend.generation.tokens_per_second:,.0f}",
                f"{backend.generation.time_to_first_token:.2f} s",
                f"{backend.seconds_to_open:.1f} s",
                str(backend.programs) if backend.programs else "none",
                f"{backend.equal_answers} of {len(result.prompts)}",
                "" if backend.max_difference is None else f"{backend.max_difference:.1g}",
            ]
            for name, backend in result.backends.items()
        ),
    ]


def to_terminal(result: Result, console: Console) -> None:
    """Prints the conversation and the report."""
    for prompt, text in zip(result.prompts, result.texts, strict=True):
        title = f"[bold]{escape(prompt)}"
        console.print(Panel(escape(text), title=title, title_align="left"))
    page.show_headlines(headlines(result), f"{result.model}, {result.dtype}", console)
    header, *body = rows(result)
    table = Table()
    for i, column in enumerate(header):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in body:
        table.add_row(*row)
    console.print(table)
    console.print(_summary(result))
    page.show_calls(_calls(result), console)


def to_html(result: Result, path: Path) -> None:
    """Writes the page; it needs no network and no other file."""
    page.write(
        path,
        Path(__file__).with_name("report.html.j2"),
        title=f"{result.model} speaks through {_backends(len(result.backends))}",
        subtitle=f"{result.dtype}. {_summary(result)}",
        headlines=headlines(result),
        calls=_calls(result),
        rows=rows(result),
        conversation=list(zip(result.prompts, result.texts, strict=True)),
        plots=[page.svg(partial(_plot_tokens, result)), page.svg(partial(_plot_rates, result))],
    )


def _backends(count: int) -> str:
    return "one backend" if count == 1 else f"{count} backends"


def _summary(result: Result) -> str:
    limits, sampling = result.limits, result.sampling
    first = next(iter(result.backends.values())).generation
    tokens = sum(len(answer.tokens) for answer in first.answers)
    how = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, seed {sampling.seed}"
    if sampling.is_greedy:
        how = "greedy search"
    preemptions = f", {first.preemptions} preemptions" if first.preemptions else ""
    pools, devices = "one pool", ""
    if result.mesh:
        copies, of_each = result.mesh
        pools = "a pool" if copies == 1 else f"a pool for each of {copies} copies of the model"
        devices = f" on {copies * of_each} devices, {of_each} for each copy"
    return (
        f"{len(result.prompts)} prompts, {tokens:,} new tokens, {how}{preemptions}. "
        f"At most {limits.max_seqs} prompts run at once, over {pools} of {limits.num_blocks} "
        f"blocks of {limits.block_size} tokens{devices}. Token counts are padded to "
        f"{' or '.join(map(str, limits.buckets))}, a program each, compiled before the clock runs. "
        "The first token's time is the median over the prompts. Answers and log-probabilities are "
        "compared with those of transformers' eager attention."
    )


def _calls(result: Result) -> list[Calls]:
    """The custom calls of a decoding step, grouped by what they are."""
    found: dict[str, Calls] = {}
    for name, backend in result.backends.items():
        lines = []
        for call, count in backend.custom_calls.items():
            lines += [f"{count} times:", *page.lines_of(call), ""]
        if lines:
            found.setdefault("\n".join(lines), Calls([], lines[:-1])).backends.append(name)
    return list(found.values())


def _plot_tokens(result: Result, axes: Axes) -> None:
    for color, (name, backend) in zip(COLORS, result.backends.items(), strict=False):
        answers = backend.generation.answers
        seconds = np.sort([second for answer in answers for second in answer.seconds])
        axes.step(seconds, np.arange(1, len(seconds) + 1), color=color, label=name, where="post")
    axes.set_title("Tokens generated")
    axes.set_xlabel("seconds since the requests arrived")
    axes.set_ylabel("tokens")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _plot_rates(result: Result, axes: Axes) -> None:
    names = list(result.backends)
    rates = [backend.generation.tokens_per_second for backend in result.backends.values()]
    bars = axes.barh(names, rates, color=COLORS[: len(names)], height=0.6)
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set_title("Tokens per second, all requests")
    axes.set_xlim(right=1.15 * max(rates))
