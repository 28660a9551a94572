"""Draws FlashInfer's time beside ours on the H100, from kept results.

``python -m benchmarks.gpu.overview`` writes docs/results/gpu-h100.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import figure

RESULTS = Path("docs/results")
WORKLOADS = {
    "d1x1024": "decode 1 sequence of 1024",
    "d1x8192": "decode 1 of 8192",
    "d8x8192": "decode 8 of 8192",
    "d32x8192": "decode 32 of 8192",
    "d32x8192 1": "the same, pages of 1",
    "d32x8192 float8_e4m3fn": "the same, fp8 cache",
    "gpt-oss d32x8192": "the same, gpt-oss's heads",
    "p1024": "prefill 1024 tokens",
    "p8192": "prefill 8192 tokens",
    "mixed": "prefill 512 beside 32 decodes",
}


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """FlashInfer's time divided by our best, for each workload of the figure."""
    found = {}
    for row in results["hopper"]["rows"]:
        times = row["microseconds"]
        if row["workload"] in WORKLOADS and "FlashInfer" in times:
            own = min(times[name] for name in ("hint", "ours") if name in times)
            found[WORKLOADS[row["workload"]]] = times["FlashInfer"] / own
    return found


def kept() -> dict[str, dict[str, float]]:
    """`ratios`, from the kept results."""
    return {"H100": ratios(json.loads((RESULTS / "gpu-h100.json").read_text()))}


def main() -> None:
    """The command."""
    text = figure.bars([*WORKLOADS.values()], kept(), "FlashInfer 0.7.2, H100", 1.7)
    (RESULTS / "gpu-h100.svg").write_text(text)


if __name__ == "__main__":
    main()
