"""What the examples' report pages share: the page itself, the plots' look, and the custom calls."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe
import matplotlib
from matplotlib.axes import Axes
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ec4899", "#64748b")
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


class Headline(NamedTuple):
    """What to know at a glance."""

    label: str
    value: str
    good: bool  # whether it is as it should be


class Calls(NamedTuple):
    """The custom calls of a backend's program, as lines to print."""

    backends: list[str]
    text: list[str]


def write(path: Path, **content: Any) -> None:
    """Writes a page that needs no network and no other file.

    Args:
        path: of the page.
        content: title, subtitle, headlines, rows (of a table, its header first), legend (of the
            table), plots and calls, and perhaps a conversation.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    environment.filters["with_bold"] = _with_bold
    path.write_text(environment.get_template("page.html.j2").render(**content))


def _with_bold(text: str) -> markupsafe.Markup:
    """A model's text, with the bold type of Markdown that it may have."""
    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(re.sub(r"\*\*(\S[^*]*)\*\*", r"<strong>\1</strong>", escaped))


def svg(draw: Callable[[Axes], None]) -> str:
    """A plot as an element of a page."""
    buffer = io.StringIO()
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    _, tag, rest = buffer.getvalue().partition("<svg")
    return tag + rest


def count(backends: Collection[str]) -> str:
    """Their number in words."""
    return "one backend" if len(backends) == 1 else f"{len(backends)} backends"


def show_headlines(headlines: Sequence[Headline], title: str, console: Console) -> None:
    """Prints them in a frame."""
    summary = Table.grid(padding=(0, 2))
    for label, value, good in headlines:
        summary.add_row(label, Text(value, "bold green" if good else "bold red"))
    console.print(Panel(summary, title=title, expand=False))


def show_rows(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints the table of the backends, its header first."""
    header, *body = rows
    table = Table(title="Backends")
    for i, column in enumerate(header):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in body:
        table.add_row(*row)
    console.print(table)


def show_calls(calls: Sequence[Calls], console: Console) -> None:
    """Prints the custom calls of each backend."""
    for call in calls:
        title = f"custom calls in {', '.join(call.backends)}"
        console.print(Panel(Group(*call.text), title=title, title_align="left"))


def known_calls(backends: Mapping[str, Any]) -> list[Any]:
    """The custom calls of the backends that have HLO."""
    return [backend.custom_calls for backend in backends.values() if backend.custom_calls]


def group_calls(backends: Mapping[str, Mapping[str, str]]) -> list[Calls]:
    """The custom calls of backends that have some, once for all backends that have the same.

    Args:
        backends: by backend, what to say above each call; perhaps nothing.
    """
    found: dict[str, Calls] = {}
    for name, calls in backends.items():
        lines: list[str] = []
        for call, heading in calls.items():
            lines += [*filter(None, [heading]), *_lines(call), ""]
        if lines:
            found.setdefault("\n".join(lines), Calls([], lines[:-1])).backends.append(name)
    return [*found.values()]


def _lines(call: str) -> list[str]:
    """A custom call, one attribute a line."""
    attributes = ("custom_call_target", "operand_layout_constraints", "output_to_operand_aliasing")
    for name in (*attributes, "api_version", "backend_config"):
        call = call.replace(f", {name}=", f",\n  {name}=")
    return call.splitlines()
