"""Shows the CPU benchmark's results as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import contest
from benchmarks.contest import OURS
from benchmarks.cpu import limits

# This library has one color, with a marker for each backend; the best of the others is black.
OWN_COLOR, OTHERS_COLOR, OWN_MARKERS = "C0", "black", "DsP"


def contestants(results: dict[str, Any]) -> list[str]:
    """The contestants that took part: ours, then the others."""
    names = {name: None for row in results["rows"] for name in row["seconds"]}
    return [name for name in names if not is_limit(name)]


def is_limit(name: str) -> bool:
    """Whether a row's time is that of a limit, or of a matrix product, which older results have."""
    return name in limits.NAMES or name.startswith("product, ")


def show(results: dict[str, Any]) -> None:
    """Prints the table."""
    names = contestants(results)
    title = "Share of the limit; in brackets the time, and a short row's range, in times our best"
    table = Table(title=title)
    for column in ("kind", "workload", "dtype", "ms", *names):
        table.add_column(column, justify="left" if column in ("kind", "workload") else "right")
    for row in results["rows"]:
        seconds = row["seconds"]
        own = best(row, is_ours=True) or float("nan")
        cells = []
        for name in names:
            if name not in seconds:
                cells.append("-")
                continue
            part = limits.share(row, name, results)
            text = "?" if part is None else f"{part:.0%}"
            spread = ""
            if row["kv_bytes"] <= contest.SHORT_BYTES:
                fastest, slowest = (x / own for x in row["spread"][name])
                spread = f", {fastest:.2f} to {slowest:.2f}"
            cells.append(f"{text} ({seconds[name] / own:.2f}x{spread})")
        table.add_row(row["kind"], row["workload"], row["dtype"], f"{own * 1e3:.2f}", *cells)
    console = Console(width=220)
    console.print(table)
    for row in results.get("updates", ()):
        seconds, own = row["seconds"], row["seconds"]["torch eager"]
        others = ", ".join(
            f"{name} {time / own:.2f}x" for name, time in seconds.items() if time != own
        )
        rate = row["bytes"] / own / 1e9
        console.print(
            f"  kv_cache_update, {row['workload']} {row['dtype']}: {own * 1e6:.0f} us, "
            f"{rate:.1f} GB/s written; time of others: {others}"
        )
    for what, amount in results.get("footprint", {}).items():
        text = f"{amount / 1e6:.1f} MB" if what.endswith("bytes") else f"{amount * 1e3:.0f} ms more"
        console.print(f"  {what}: {text}")
    growth = results.get("growth", {})
    whole = next(iter(growth.values()), None)
    for what, seconds in growth.items():
        console.print(f"  {what}: {seconds / whole:.3f} of the time of {next(iter(growth))}")


def best(row: dict[str, Any], is_ours: bool) -> float | None:
    """The shortest time of our backends, or of the others; None if none of them took part."""
    times = [
        seconds
        for name, seconds in row["seconds"].items()
        if not is_limit(name) and (name in OURS) == is_ours
    ]
    return min(times, default=None)


def draw_roofline(axis: Any, results: dict[str, Any]) -> None:
    """Draws our best and the others' best in each row, below the machine's limits."""
    rows = results["rows"]
    intensities = [row["flops"] / row["kv_bytes"] for row in rows]
    ends = [min(intensities) / 2, max(intensities) * 2]
    rates = [limits.rates(row, results) for row in rows]
    read = statistics.median(found[limits.READ] for found in rates)
    products = {
        dtype: [rate for found in rates if (rate := limits.product_rate(found, dtype))]
        for dtype in ("float32", "bfloat16")
    }
    lines = {dtype: statistics.median(found) for dtype, found in products.items() if found}
    lines = lines or {"reading": math.inf}
    for (what, rate), style in zip(lines.items(), ("--", "-"), strict=False):
        edges = [ends[0], min(rate / read, ends[1]), ends[1]]
        heights = [min(rate, read * x) / 1e9 for x in edges]
        axis.plot(edges, heights, style, color="black", linewidth=0.8, label=f"limit, {what}")
    for label, marker, color, is_ours in (
        ("best of the others", "o", OTHERS_COLOR, False),
        ("this library", "D", OWN_COLOR, True),
    ):
        points = []
        for row, intensity in zip(rows, intensities, strict=True):
            if seconds := best(row, is_ours):
                points.append((intensity, row["flops"] / seconds / 1e9))
        if points:
            axis.scatter(*zip(*points, strict=True), label=label, marker=marker, color=color, s=22)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte of K and V")
    axis.set_ylabel("GFLOP/s")
    axis.set_title("roofline")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)


def ratio_to_peers(row: dict[str, Any]) -> float | None:
    """The others' best time divided by ours; None if no other library took part."""
    others, own = best(row, is_ours=False), best(row, is_ours=True)
    return others / own if others and own else None


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a dot for each contestant in each row, at its share of the limit, and a roofline.

    Results without the rates of products have no limit of prefill: its dots are at GFLOP/s, and the
    axis says so.
    """
    kinds = {"decode": "share of the limit", "prefill": "share of the limit"}
    if "limits" not in results:
        kinds["prefill"] = "GFLOP/s (the limit was not measured)"
    rows = {kind: [row for row in results["rows"] if row["kind"] == kind] for kind in kinds}
    figure, axes = plt.subplots(
        1, 3, figsize=(18, 1.5 + 0.26 * max(map(len, rows.values()))), layout="constrained"
    )
    draw_roofline(axes[2], results)
    for axis, (kind, label) in zip(axes[:2], kinds.items(), strict=True):
        own_markers, other_colors = iter(OWN_MARKERS), (f"C{i}" for i in range(1, 10))
        for name in contestants(results):
            ours = name in OURS
            marker = next(own_markers) if ours else "o"
            color = OWN_COLOR if ours else next(other_colors)
            points = []
            for y, row in enumerate(rows[kind]):
                if name in row["seconds"]:
                    part = limits.share(row, name, results)
                    speed = row["flops"] / row["seconds"][name] / 1e9
                    points.append((speed if part is None else part, y))
            if points:
                axis.scatter(
                    *zip(*points, strict=True),
                    label=f"this library, {name}" if ours else name,
                    marker=marker,
                    s=46 if ours else 26,
                    color=color,
                    zorder=3 if ours else 2,
                )
        labels = []
        for row in rows[kind]:
            ratio = ratio_to_peers(row)
            labels.append(
                f"{row['workload']}  {row['dtype']}" + (f"  {ratio:.2f}x" if ratio else "")
            )
        axis.set_yticks(range(len(labels)), labels)
        axis.invert_yaxis()
        if label == "share of the limit":
            axis.axvline(1, color="black", linewidth=0.8)
            axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
        axis.set_xlim(left=0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(kind)
        axis.set_xlabel(label)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6)
    machine = results["machine"]
    figure.suptitle(
        f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}; "
        "32/8 heads x 128 unless named, blocks of 16.  b8 x 4096: 8 sequences of 4096.  "
        "2.00x: the best of the others takes twice the time"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
