"""Writes what the pages say of GPUs, and draws FlashInfer's time beside ours, from kept results.

``python -m benchmarks.gpu.overview`` writes docs/results/gpu-h100.svg and the parts of README.md
and docs/performance.md between ``<!-- gpu: NAME -->`` and ``<!-- gpu: end -->``. With the
report.json of a gpu-check it keeps its results first, as docs/results/gpu-h100.json.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.gpu.peers import BATCH_INVARIANT
from benchmarks.kept import by_row
from tools.lease import report

RESULTS = Path("docs/results")
KEPT = RESULTS / "gpu-h100.json"
PAGES = (Path("README.md"), Path("docs/performance.md"))
STEPS = ("limits", "table", "portable", "invariant", "jax", "copies")  # whose results are kept
SDPA = "torch SDPA (contiguous)"
WORKLOADS = {
    "decode b1 x 1024": "decode 1 sequence of 1024",
    "decode b1 x 8192": "decode 1 of 8192",
    "decode b8 x 8192": "decode 8 of 8192",
    "decode b32 x 8192": "decode 32 of 8192",
    "decode b32 x 8192, blocks of 1": "the same, pages of 1",
    "decode b32 x 8192, float8_e4m3fn": "the same, fp8 cache",
    "decode b32 x 8192, gpt-oss-20b": "the same, gpt-oss's heads",
    "prefill 1024": "prefill 1024 tokens",
    "prefill 8192": "prefill 8192 tokens",
    "mixed 512 on 8192 beside 32 decodes": "prefill 512 beside 32 decodes",
}
OURS = ("torch eager", "torch eager, max_query_len")
Row = Mapping[str, Any]


def rows_of(results: Mapping[str, Any], step: str) -> dict[str, Row]:
    """The rows of a step's contest, by kind and name."""
    found = results["results"].get(step) or {"rows": []}
    return {f"{row['kind']} {row['workload']}": row for row in found["rows"]}


def ours(row: Row) -> float:
    """The seconds of our faster call from PyTorch, with and without max_query_len."""
    return min(row["seconds"].get(name, float("inf")) for name in OURS)


def ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """FlashInfer's time divided by our best, for each workload of the figure."""
    rows = rows_of(results, "table")
    return {
        words: rows[title]["seconds"]["FlashInfer"] / ours(rows[title])
        for title, words in WORKLOADS.items()
        if "FlashInfer" in rows.get(title, {"seconds": {}})["seconds"]
    }


def flashinfer(results: Mapping[str, Any]) -> str:
    """FlashInfer's name and version."""
    return f"FlashInfer {results['results']['table']['peers']['flashinfer-python']}"


def kept() -> dict[str, dict[str, float]]:
    """`ratios`, from the kept results."""
    return {"H100": ratios(json.loads(KEPT.read_text()))}


def _microseconds(row: Row, name: str) -> str:
    return f"{row['seconds'][name] * 1e6:.1f}" if name in row["seconds"] else ""


def _contest(rows: Mapping[str, Row], columns: Mapping[str, str]) -> str:
    """The times of some contestants by what the table calls them. Our best is the first column."""
    return report.table(
        ["call", "ours", *columns.values()],
        [
            [words, f"{ours(rows[title]) * 1e6:.1f}"]
            + [_microseconds(rows[title], name) for name in columns]
            for title, words in WORKLOADS.items()
            if title in rows
        ],
    )


def _taken_part(rows: Mapping[str, Row], names: Iterable[str]) -> list[str]:
    return [name for name in names if any(name in row["seconds"] for row in rows.values())]


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def ratio(results: Mapping[str, Any]) -> str:
    """FlashInfer's times as a share of ours, in words."""
    found = ratios(results)
    mixed = found.pop(WORKLOADS["mixed 512 on 8192 beside 32 decodes"])
    return _fill(
        f"on an H100, **FlashInfer took {_range([*found.values()])} times as long as this "
        f"library**, and {mixed:.2g} times in a batch of decodes beside a chunk of a prompt "
        f"(figures of {results['date']}, {results['commit']});",
        "    ",
    )


def h100(results: Mapping[str, Any]) -> str:
    """The table beside the fastest modes of other libraries."""
    rows, limits = rows_of(results, "table"), results["results"]["limits"]
    table = _contest(rows, {"FlashInfer": flashinfer(results), SDPA: "`sdpa`"}).splitlines()
    shares = [
        max(
            rows[title]["kv_bytes"] / limits["read_bytes_per_s"],
            rows[title]["flops"] / limits["matmul_flops_per_s"],
        )
        / ours(rows[title])
        for title in WORKLOADS
        if title in rows
    ]
    last = ["ours, of the limit", "---", *(f"{share:.0%}" for share in shares)]
    table = [f"{line} {cell} |" for line, cell in zip(table, last, strict=True)]
    intro = (
        "Microseconds of a call with Llama-3-8B's heads in bfloat16 and pages of 16, from CUDA "
        f"graphs over caches larger than L2, of {results['date']}, {results['commit']} "
        f"([numbers](results/{KEPT.name})). {report.limits_sentence(limits)} `sdpa` is PyTorch's "
        "dense attention over contiguous K and V."
    )
    portable = [
        min(x for name, x in row["seconds"].items() if name.startswith("torch eager"))
        / ours(rows[title])
        for title, row in rows_of(results, "portable").items()
        if title in rows and title in WORKLOADS
    ]
    parts = [_fill(intro), "\n".join(table)]
    if portable:
        parts.append(f"The portable kernels take {_range(portable)} times as long.")
    return "\n\n".join(parts)


def jax(results: Mapping[str, Any]) -> str:
    """The times of our kernels in JAX."""
    rows = rows_of(results, "jax")
    if not rows:
        return "JAX with the kernels for Hopper is not measured."
    names = (
        "no command buffers: JAX",
        "command buffers: JAX",
        "no command buffers: flash-attn3-jax",
    )
    columns = {name: name.replace(": JAX", "") for name in _taken_part(rows, names)}
    return "64 calls in one program, each after the one before:\n\n" + _contest(rows, columns)


def invariant(results: Mapping[str, Any]) -> str:
    """The table beside the modes of other libraries that promise what we promise."""
    rows = rows_of(results, "invariant")
    if not rows:
        return "Modes of other libraries that give the same bits in any batch are not measured."
    modes = [mode for fastest, others in BATCH_INVARIANT.items() for mode in (fastest, *others)]
    columns = dict.fromkeys(_taken_part(rows, modes))
    return (
        _fill(
            "Our bits do not depend on the batch. Beside the fastest mode of another library "
            "stands the one that promises this, too: FlashInfer with splits of 2048 positions, or "
            "with none; FlashAttention with one split, as vLLM's `VLLM_BATCH_INVARIANT=1` sets it. "
            f"Microseconds, of {results['date']}, {results['commit']}:"
        )
        + "\n\n"
        + _contest(rows, {name: name for name in columns})
    )


PARTS = {"ratio": ratio, "h100": h100, "jax": jax, "invariant": invariant}


def written(text: str, results: Mapping[str, Any]) -> str:
    """A page with its parts written anew."""

    def part(found: re.Match[str]) -> str:
        gap = found[2]  # a newline, and what the part is indented by
        return f"<!-- gpu: {found[1]} -->{gap}{PARTS[found[1]](results)}{gap}<!-- gpu: end -->"

    return re.sub(r"<!-- gpu: (\w+) -->(\n *).*?<!-- gpu: end -->", part, text, flags=re.DOTALL)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.overview", description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", help="report.json of a gpu-check, to keep")
    options = parser.parse_args()
    if options.report is not None:
        found = json.loads(options.report.read_text())
        results = {
            "machine": found["machine"],
            "date": found["date"],
            "commit": found["commit"],
            "answers": found["answers"],
            "steps": {name: step for name, step in found["steps"].items() if step["ok"]},
            "results": {name: found["results"][name] for name in STEPS if name in found["results"]},
        }
        KEPT.write_text(by_row(results))
    results = json.loads(KEPT.read_text())
    for page in PAGES:
        page.write_text(written(page.read_text(), results))
    text = figure.bars([*WORKLOADS.values()], kept(), f"{flashinfer(results)}, H100", 1.7)
    (RESULTS / "gpu-h100.svg").write_text(text)


if __name__ == "__main__":
    main()
