"""Shows the results of ``make gpu-check`` as tables, on the terminal and in Markdown."""

from __future__ import annotations

from typing import Any

Rows = list[list[str]]
OUTCOMES = {True: "ok", False: "FAILED", None: "left out"}


def _steps(results: dict[str, Any]) -> tuple[list[str], Rows]:
    return ["step", "outcome", "seconds", "last words"], [
        [name, OUTCOMES[step["ok"]], str(step["seconds"]), step["last_words"][:100]]
        for name, step in results["steps"].items()
    ]


def _timings(bench: dict[str, Any]) -> tuple[list[str], Rows]:
    """Microseconds, the share of the limit, and the ratio to the fastest other library."""
    limits, ours = bench["limits"], bench["ours"]
    known = {name: None for row in bench["rows"] for name in (*row["seconds"], *row["absent"])}
    others = [name for name in known if name not in ours]
    rows = []
    for row in bench["rows"]:
        seconds: dict[str, float] = row["seconds"]
        mine = [seconds[name] for name in ours if name in seconds]
        peers = [seconds[name] for name in others if name in seconds]
        if row["kind"] == "decode":
            rate, limit, unit = row["kv_bytes"] / 1e9, limits["read_bytes_per_s"] / 1e9, "GB/s"
        else:
            rate, limit, unit = row["flops"] / 1e12, limits["matmul_flops_per_s"] / 1e12, "TFLOP/s"
        best = min(mine, default=float("nan"))
        rows.append(
            [
                row["kind"],
                row["workload"],
                *(_microseconds(seconds.get(name)) for name in (*ours, *others)),
                f"{rate / best:.0f} {unit}",
                f"{rate / best / limit:.0%}",
                f"{min(peers) / best:.2f}" if peers and mine else "no peer",
            ]
        )
    columns = ["kind", "workload", *(f"{name}, us" for name in (*ours, *others))]
    return [*columns, "rate", "of the limit", "best peer's time / ours"], rows


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e6:.1f}"


def _limits(bench: dict[str, Any]) -> str:
    limits = bench["limits"]
    return (
        f"In this run the GPU read {limits['read_bytes_per_s'] / 1e9:.0f} GB/s, copied "
        f"{limits['copy_bytes_per_s'] / 1e9:.0f} GB/s and multiplied "
        f"{limits['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s (bfloat16, 8192 cubed)."
    )


def _notes(bench: dict[str, Any]) -> list[str]:
    there = ", ".join(f"{name} {version}" for name, version in bench["peers"].items() if version)
    reasons: dict[str, set[str]] = {}
    for row in bench["rows"]:
        for name, reason in row["absent"].items():
            reasons.setdefault(name, set()).add(reason)
    lines = [f"other libraries: {there}"] if there else []
    lines += [f"{name}: {'; '.join(sorted(why))}" for name, why in sorted(reasons.items())]
    if bench["not_measured"]:
        lines.append(f"not measured, for lack of time: {', '.join(bench['not_measured'])}")
    return lines


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    machine = results["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    parts = [
        f"{machine['name']}, driver {machine['driver_version']}, clocks up to "
        f"{machine['clocks.max.sm']} and {machine['clocks.max.memory']}; "
        f"Python {machine['python']}, {versions}; commit {machine['commit']}.",
        "The comparison names the kernels in use. XLA_GPU_CUDA_KERNELS=portable in the environment "
        "chooses those that run on all GPUs.",
        _table(*_steps(results)),
    ]
    if "benchmark" in results:
        parts += [_limits(results["benchmark"]), _table(*_timings(results["benchmark"]))]
        parts += ["\n".join(f"* {line}" for line in _notes(results["benchmark"]))]
    for name, step in results["steps"].items():
        if "log" in step:
            parts.append(f"The end of the log of {name}:\n\n```\n{step['log']}\n```")
    return "\n\n".join(parts) + "\n"


def _table(columns: list[str], rows: Rows) -> str:
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def show(results: dict[str, Any]) -> None:
    """Prints the tables."""
    from rich.console import Console  # noqa: PLC0415  (may come with a pack, after this import)
    from rich.table import Table  # noqa: PLC0415

    console = Console(width=200)
    tables = [_steps(results)] + (
        [_timings(results["benchmark"])] if "benchmark" in results else []
    )
    for columns, rows in tables:
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if "benchmark" in results:
        console.print(_limits(results["benchmark"]))
        for line in _notes(results["benchmark"]):
            console.print(f"  {line}")
