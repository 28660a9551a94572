"""Draws the README's figure from kept results: the fastest other library's time beside ours.

``python -m benchmarks.cpu.overview`` writes docs/results/overview.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.cpu.report import ratio_to_peers

RESULTS = Path("docs/results")
MACHINES = {"AVX-512": "attention-cpu.json", "AVX2": "attention-cpu-avx2.json"}
WORKLOADS = {
    ("decode", "b1 x 512", "float32"): "decode 1 sequence of 512, float32",
    ("decode", "b1 x 512", "bfloat16"): "decode 1 sequence of 512, bfloat16",
    ("decode", "b8 x 4096", "float32"): "decode 8 of 4096, float32",
    ("decode", "b8 x 4096", "bfloat16"): "decode 8 of 4096, bfloat16",
    ("decode", "b32 x 4096", "bfloat16"): "decode 32 of 4096, bfloat16",
    ("prefill", "2048", "float32"): "prefill 2048 tokens, float32",
    ("prefill", "2048", "bfloat16"): "prefill 2048 tokens, bfloat16",
    ("mixed", "512 on 4096", "bfloat16"): "prefill 512 after 4096, bfloat16",
}


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """The fastest other library's time divided by ours, for each workload of the figure."""
    found = {}
    for row in results["rows"]:
        name = WORKLOADS.get((row["kind"], row["workload"], row["dtype"]))
        if name and row["cache_dtype"] == row["dtype"] and (ratio := ratio_to_peers(row)):
            found[name] = ratio
    return found


def kept() -> dict[str, dict[str, float]]:
    """`ratios` of each machine, from the kept results."""
    return {
        machine: ratios(json.loads((RESULTS / file).read_text()))
        for machine, file in MACHINES.items()
    }


def main() -> None:
    """The command."""
    text = figure.bars([*WORKLOADS.values()], kept(), "the fastest other library", 2.2)
    (RESULTS / "overview.svg").write_text(text)


if __name__ == "__main__":
    main()
