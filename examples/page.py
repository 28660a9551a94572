"""The reports of the examples: what a run shows in the terminal and, with plots, as an HTML
page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ec4899", "#64748b")
_STYLE: Any = {
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.alpha": 0.4,
    "grid.color": "#94a3b8",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the page's font
}
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>xla-paged-attention: {title}</title>
<style>
  :root {{ --page: #ffffff; --text: #0f172a; --line: #cbd5e1; --good: #15803d; --bad: #b91c1c; }}
  @media (prefers-color-scheme: dark) {{
    :root {{ --page: #0f172a; --text: #e2e8f0; --line: #475569; --good: #4ade80; --bad: #f87171; }}
  }}
  body {{ margin: 0 auto; max-width: 1180px; padding: 2vw;
    font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); }}
  pre {{ font: 13px/1.35 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
  section {{ display: grid; gap: 12px;
    grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }}
  svg {{ width: 100%; height: auto; font-family: inherit; }}
  svg text {{ fill: var(--text) !important; }}
  summary, dt, th {{ font-weight: bold; }}
  summary {{ cursor: pointer; }}
  dd {{ white-space: pre-line; }}
  table {{ border-collapse: collapse; margin: 1em 0; }}
  td, th {{ border-top: 1px solid var(--line); padding: 4px 12px 4px 0; text-align: left; }}
  .good {{ color: var(--good); font-weight: bold; }}
  .bad {{ color: var(--bad); font-weight: bold; }}
  @media (max-width: 640px) {{
    .backends tr {{ display: block; border-top: 1px solid var(--line); }}
    .backends tr:first-child {{ display: none; }}
    .backends td {{ display: flex; justify-content: space-between; border: 0; padding: 2px 0; }}
    .backends td::before {{ content: attr(data-column); padding-right: 12px; }}
  }}
</style>
<h1>{title}</h1>
<dl>{conversation}</dl>
<h2>{run}</h2>
<table>{headlines}</table>
<table class="backends">{backends}</table>
<p>{legend}</p>
<p>{summary}</p>
<section>{plots}</section>
<details><summary>The custom calls, without instruction names and source metadata</summary>
{calls}</details>
"""


class Headline(NamedTuple):
    """What to know at a glance."""

    label: str
    value: str
    good: bool  # whether it is as it should be


@dataclass(frozen=True)
class Report:
    """What a run has to say."""

    title: str  # of the page
    run: str  # the model and its dtype
    headlines: Sequence[Headline]
    rows: Sequence[Sequence[str]]  # of the table of the backends, its header first
    legend: str  # of the table
    summary: str  # of the run
    calls: Mapping[str, Mapping[str, str]]  # by backend and custom call: what to say above it
    plots: Sequence[Callable[[Axes], None]]
    conversation: Sequence[tuple[str, str]] = ()  # prompts and answers

    def to_terminal(self, console: Console) -> None:
        """Prints everything but the custom calls and the plots."""
        for prompt, answer in self.conversation:
            title = f"[bold]{escape(prompt)}"
            console.print(Panel(_with_bold(escape(answer)), title=title, title_align="left"))
        summary = Table.grid(padding=(0, 2))
        for label, value, good in self.headlines:
            summary.add_row(label, Text(value, "bold green" if good else "bold red"))
        console.print(Panel(summary, title=self.run, expand=False))
        header, *body = self.rows
        table = Table(title="Backends")
        for i, column in enumerate(header):
            table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
        for row in body:
            table.add_row(*row)
        console.print(table)
        console.print(self.legend, self.summary)

    def calls_to_terminal(self, console: Console) -> None:
        """Prints the custom calls, once for all backends that have the same."""
        for names, text in self._distinct_calls():
            panel = Panel(Text(text), title=f"custom calls in {names}", title_align="left")
            console.print(panel)

    def to_html(self, path: Path) -> None:
        """Writes what the terminal shows, the plots and the custom calls as a page that needs no
        network and no other file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = html.escape
        header, *body = self.rows
        calls = self._distinct_calls()
        text = _PAGE.format(
            title=shown(self.title),
            run=shown(self.run),
            conversation="".join(
                f"<dt>{shown(prompt)}</dt>"
                f"<dd>{_with_bold(shown(answer.strip()), '<b>', '</b>')}</dd>"
                for prompt, answer in self.conversation
            ),
            headlines="".join(
                f'<tr><td>{shown(label)}<td class="{"good" if good else "bad"}">{shown(value)}'
                for label, value, good in self.headlines
            ),
            backends=_row("th", header, header) + "".join(_row("td", header, x) for x in body),
            legend=shown(self.legend),
            summary=shown(self.summary),
            plots="\n".join(map(_svg, self.plots)),
            calls="".join(f"<h3>{shown(x)}</h3><pre>{shown(text)}</pre>" for x, text in calls),
        )
        path.write_text(text)

    def _distinct_calls(self) -> list[tuple[str, str]]:
        """The custom calls, one attribute a line, behind the names of the backends that have
        them."""
        backends: dict[str, list[str]] = {}
        for name, calls in self.calls.items():
            lines = [line for call, heading in calls.items() for line in (heading, *_lines(call))]
            if lines:
                backends.setdefault("\n".join(filter(None, lines)), []).append(name)
        return [(", ".join(names), text) for text, names in backends.items()]


def _with_bold(text: str, begin: str = "[bold]", end: str = "[/bold]") -> str:
    """A model's text, escaped, with the bold type of Markdown that it may have."""
    return re.sub(r"\*\*(\S[^*]*)\*\*", rf"{begin}\1{end}", text)


def _row(tag: str, header: Sequence[str], cells: Sequence[str]) -> str:
    """A row of a table. On a phone, each cell stands behind the name of its column."""
    names = zip(map(html.escape, header), map(html.escape, cells), strict=True)
    return "<tr>" + "".join(f'<{tag} data-column="{name}">{cell}' for name, cell in names)


def _svg(draw: Callable[[Axes], None]) -> str:
    """A plot as an element of a page."""
    buffer = io.StringIO()
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    _, tag, rest = buffer.getvalue().partition("<svg")
    return tag + rest


def through(backends: Sequence[str] | Mapping[str, Any]) -> str:
    """The backends' number in words."""
    return "one backend" if len(backends) == 1 else f"{len(backends)} backends"


def same_calls(calls: Sequence[Any]) -> Headline | None:
    """Whether all backends that have HLO hold the same custom calls, letter for letter; None where
    fewer than two have some."""
    known = [found for found in calls if found]
    same = all(found == known[0] for found in known)
    value = "identical" if same else "different"
    return Headline("custom calls", value, same) if len(known) > 1 else None


def _lines(call: str) -> list[str]:
    """A custom call, one attribute a line."""
    attributes = ("custom_call_target", "operand_layout_constraints", "output_to_operand_aliasing")
    for name in (*attributes, "api_version", "backend_config"):
        call = call.replace(f", {name}=", f",\n  {name}=")
    return call.splitlines()
