"""Draws ratios to other libraries as bars, in SVG that follows the reader's color scheme."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

# A color means the same machine in every figure: in the light scheme, and in the dark one.
COLORS = {
    "AVX-512": ("#3565c8", "#6f9bf2"),
    "AVX2": ("#e08a1e", "#eda94f"),
    "H100": ("#2f8f57", "#5cc48a"),
}
# Matplotlib draws with these colors; the style sheet gives each its place in both schemes.
INK, LINE, *_BARS = (f"#01020{i}" for i in range(3, 8))
VARIABLES = {INK: "ink", LINE: "line"} | {
    color: name.lower() for color, name in zip(_BARS, COLORS, strict=True)
}
_LIGHT, _DARK = (
    f"svg {{ --ink: {ink}; --line: {line};"
    + "".join(f" --{name.lower()}: {shades[i]};" for name, shades in COLORS.items())
    + " }"
    for i, (ink, line) in enumerate((("#1f2328", "#59636e"), ("#f0f3f6", "#a9b1bb")))
)
STYLE = f"""<style>
{_LIGHT}
@media (prefers-color-scheme: dark) {{ {_DARK} }}
text {{ font-family: system-ui, sans-serif !important; }}
</style>"""


def bars(
    rows: Sequence[str], machines: Mapping[str, Mapping[str, float]], other: str, most: float
) -> str:
    """A figure as SVG: a bar from 1 to each ratio.

    Args:
        rows: names of the workloads, from the top.
        machines: by each machine's name, one of `COLORS`, the ratio in each row.
        other: whose speed is 1.
        most: the largest ratio that has room.
    """
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": other, "font.size": 11, "text.color": INK}
    )
    height = 0.26 + 0.11 * len(machines)  # of a row, in inches
    figure, axis = plt.subplots(figsize=(6.2, 1 + len(rows) * height), layout="constrained")
    color_of = {variable: color for color, variable in VARIABLES.items()}
    step = 0.8 / len(machines)
    for i, (machine, found) in enumerate(machines.items()):
        positions = [y + step * (i - (len(machines) - 1) / 2) for y in range(len(rows))]
        values = [found[name] for name in rows]
        axis.barh(
            positions,
            [x - 1 for x in values],
            step * 0.9,
            left=1,
            color=color_of[machine.lower()],
            label=machine,
        )
        for y, value in zip(positions, values, strict=True):
            is_win = value >= 1
            axis.text(
                value + (0.01 if is_win else -0.01) * most,
                y,
                f"{value:.2f}",
                color=INK,
                va="center",
                ha="left" if is_win else "right",
                fontsize=9.5,
            )
    axis.axvline(1, color=LINE, linewidth=1)
    axis.set_yticks(range(len(rows)), rows, color=INK)
    axis.tick_params(axis="both", length=0, colors=INK)
    axis.set_xlim(0.25, most)
    ticks = {0.5: "half", 1: "as fast", 1.5: "1.5 times", 2: "twice"}
    ticks = {x: text for x, text in ticks.items() if x < most}
    axis.set_xticks([*ticks], [*ticks.values()])
    figure.supxlabel(f"this library's speed beside {other}", color=INK, fontsize=11)
    axis.invert_yaxis()
    for side in axis.spines.values():
        side.set_visible(False)
    if len(machines) > 1:
        figure.legend(loc="outside upper right", ncols=2, frameon=False, labelcolor=INK)
    output = io.StringIO()
    figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = output.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text.replace("<defs>", f"{STYLE}\n <defs>", 1)
