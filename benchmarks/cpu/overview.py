"""Draws the README's figure from kept results: the fastest other library's time beside ours.

``python -m benchmarks.cpu.overview`` writes docs/results/overview.svg.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from benchmarks.cpu.report import ratio_to_peers

RESULTS = Path("docs/results")
MACHINES = {"AVX-512": "attention-cpu.json", "AVX2": "attention-cpu-avx2.json"}
WORKLOADS = {
    ("decode", "b1 x 512", "float32"): "decode, 1 x 512, float32",
    ("decode", "b1 x 512", "bfloat16"): "decode, 1 x 512, bfloat16",
    ("decode", "b8 x 4096", "float32"): "decode, 8 x 4096, float32",
    ("decode", "b8 x 4096", "bfloat16"): "decode, 8 x 4096, bfloat16",
    ("decode", "b32 x 4096", "bfloat16"): "decode, 32 x 4096, bfloat16",
    ("prefill", "2048", "float32"): "prefill, 2048, float32",
    ("prefill", "2048", "bfloat16"): "prefill, 2048, bfloat16",
    ("mixed", "512 on 4096", "bfloat16"): "512 on 4096, bfloat16",
}

# Matplotlib draws with these colors; the style sheet gives each its place in both color schemes.
INK, AVX512, AVX2, LINE = "#010203", "#010204", "#010205", "#010206"
STYLE = """<style>
svg { --ink: #1f2328; --avx512: #3565c8; --avx2: #e08a1e; --line: #59636e; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #f0f3f6; --avx512: #6f9bf2; --avx2: #eda94f; --line: #a9b1bb; }
}
text { font-family: system-ui, sans-serif !important; }
</style>"""
VARIABLES = {INK: "ink", AVX512: "avx512", AVX2: "avx2", LINE: "line"}


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """The fastest other library's time divided by ours, for each workload of the figure."""
    found = {}
    for row in results["rows"]:
        name = WORKLOADS.get((row["kind"], row["workload"], row["dtype"]))
        if name and row["cache_dtype"] == row["dtype"] and (ratio := ratio_to_peers(row)):
            found[name] = ratio
    return found


def draw(measured: dict[str, dict[str, float]]) -> str:
    """The figure as SVG.

    Args:
        measured: `ratios` of each machine.
    """
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "overview", "font.size": 11, "text.color": INK}
    )
    figure, axis = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    names = [*WORKLOADS.values()]
    for i, (color, (machine, found)) in enumerate(
        zip((AVX512, AVX2), measured.items(), strict=True)
    ):
        positions = [y + 0.38 * i for y in range(len(names))]
        values = [found[name] for name in names]
        axis.barh(positions, [x - 1 for x in values], 0.34, left=1, color=color, label=machine)
        for y, value in zip(positions, values, strict=True):
            is_win = value >= 1
            axis.text(
                value + (0.02 if is_win else -0.02),
                y,
                f"{value:.2f}",
                color=INK,
                va="center",
                ha="left" if is_win else "right",
                fontsize=9.5,
            )
    axis.axvline(1, color=LINE, linewidth=1)
    axis.set_yticks([y + 0.19 for y in range(len(names))], names, color=INK)
    axis.tick_params(axis="both", length=0, colors=INK)
    axis.set_xlim(0.4, 2.5)
    axis.set_xticks([0.5, 1, 1.5, 2], ["half as fast", "equal", "1.5 times", "twice as fast"])
    axis.invert_yaxis()
    for side in axis.spines.values():
        side.set_visible(False)
    axis.legend(loc="lower right", frameon=False, labelcolor=INK)
    output = io.StringIO()
    figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = output.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text.replace("<defs>", f"{STYLE}\n <defs>", 1)


def kept() -> dict[str, dict[str, float]]:
    """`ratios` of each machine, from the kept results."""
    return {
        machine: ratios(json.loads((RESULTS / file).read_text()))
        for machine, file in MACHINES.items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.overview", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "overview.svg")
    options = parser.parse_args()
    options.out.write_text(draw(kept()))


if __name__ == "__main__":
    main()
