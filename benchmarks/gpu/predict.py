"""Predicts the rows of the GPU benchmark for an H200, with the kernels that are off by default:
`python -m benchmarks.gpu.predict decode_*.cu.o hopper_*.cu.o` prints the table of log.md.

Decoding takes the longest of reading K, V and partial results and of issuing instructions, on the
thread block with the most work, and some time to begin and to merge. Long queries take the longest
of the products, of the softmax between a consumer's products and of issuing instructions. The
instructions are counted in object files for sm_90a.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.bench import workloads
from benchmarks.gpu.schedules import (
    QUERY_ROWS,
    counted,
    dealt,
    item_tiles,
    splits_of,
    written_rows,
)
from benchmarks.gpu.slots import (
    CLOCKS_PER_SECOND,
    DECODE_TILE,
    FLOP_PER_CLOCK,
    HOPPER_CONSUMERS,
    MULTIPROCESSORS,
    READ_BYTES_PER_SECOND,
    SLOTS_PER_CLOCK,
    Counts,
    counts_of,
    kernels_of,
)
from benchmarks.workloads import DTYPES, Workload

# Guesses, which a measurement may replace.
BEGIN_SECONDS = 4e-6  # of a call: launch, the first items, the first tiles
MERGE_SECONDS = 3e-6  # where splits are merged
ISSUED = 0.8  # of the issue slots can be used
STALL = 1.4  # clocks of a warp's softmax for each instruction
KEPT = 0.8  # of the products' rate, after waits for barriers and memory
MATRIX_FLOP_PER_SECOND = 750e12  # of large products in bfloat16
# The clock that a GPU keeps under such products.
LOADED_CLOCKS_PER_SECOND = MATRIX_FLOP_PER_SECOND / (MULTIPROCESSORS * FLOP_PER_CLOCK)


@dataclass(frozen=True)
class Prediction:
    """A row of the table. `worst`: the work of the thread block with the most, of the mean."""

    worst: float
    slots: float  # of the issue slots, at the full rate
    seconds: float
    rate: str


def counts_for(kernel: str, workload: Workload, counted_kernels: list[Counts]) -> Counts | None:
    """The counts of the smallest compiled head size that holds the workload's."""
    fitting = [
        x
        for x in counted_kernels
        if (x.kernel, x.cache) == (kernel, workload.cache_dtype)
        and x.head_size >= workload.model.head_size
    ]
    return min(fitting, key=lambda x: x.head_size, default=None)


def decode(workload: Workload, counts: Counts) -> Prediction:
    """Single queries, on the decode kernel."""
    model = workload.model
    thread_blocks = (2 if model.head_size <= 128 else 1) * MULTIPROCESSORS
    window = model.sliding_window
    contexts = [min(context, window or context) for _, context in workload.sequences]
    splits = [*splits_of(contexts, model.num_heads, model.num_kv_heads)]
    tiles = np.concatenate(splits)
    worst = dealt(tiles, thread_blocks).max() / (tiles.sum() / thread_blocks)
    itemsize = DTYPES[workload.cache_dtype or workload.dtype].itemsize
    tile_bytes = DECODE_TILE * 2 * model.head_size * itemsize
    written = written_rows(splits, thread_blocks) * model.num_heads // model.num_kv_heads
    partial_bytes = 2 * written * (4 * model.head_size + 8)
    reading = (tiles.sum() * tile_bytes + partial_bytes) / READ_BYTES_PER_SECOND
    clocks = tiles.sum() / MULTIPROCESSORS * counts.slots / SLOTS_PER_CLOCK
    issuing = clocks / CLOCKS_PER_SECOND
    seconds = max(reading, issuing / ISSUED) * worst + BEGIN_SECONDS
    seconds += MERGE_SECONDS if written else 0
    share = workload.kv_bytes / READ_BYTES_PER_SECOND / seconds
    return Prediction(worst, issuing / reading, seconds, f"{share:.0%} of the read rate")


def prefill(workload: Workload, counts: Counts) -> Prediction:
    """Long queries, on the Hopper kernel. The FLOP are those that the mask leaves."""
    model = workload.model
    heads = model.num_heads, model.num_kv_heads
    tiles = np.concatenate([item_tiles(x, heads, counts.tile) for x in workload.sequences])
    if model.sliding_window:  # and the tiles that the window's two ends cut
        most = (model.sliding_window + QUERY_ROWS * heads[1] // heads[0]) // counts.tile + 1
        tiles = np.minimum(tiles, most)
    worst = max(counted(tiles, MULTIPROCESSORS)) / (tiles.sum() / MULTIPROCESSORS)
    of_consumer = counts.clocks / HOPPER_CONSUMERS
    clocks = max(counts.clocks, of_consumer + STALL * counts.consumer, counts.slots / ISSUED) / KEPT
    seconds = tiles.sum() / MULTIPROCESSORS * worst * clocks / LOADED_CLOCKS_PER_SECOND
    seconds += BEGIN_SECONDS
    rate = workload.flops / seconds
    share = rate / MATRIX_FLOP_PER_SECOND
    text = f"{rate / 1e12:.0f} TFLOP/s, {share:.0%} of the matrix rate"
    return Prediction(worst, counts.share, seconds, text)


def predictions(
    counted_kernels: list[Counts], trace: Path | None
) -> Iterator[tuple[str, str, Prediction]]:
    """Each workload that one kernel computes, and the kernel."""
    for workload in workloads(trace):
        kernel, predict = ("Decode", decode) if workload.kind == "decode" else ("Hopper", prefill)
        counts = counts_for(kernel, workload, counted_kernels)
        if counts is None or len({q_len == 1 for q_len, _ in workload.sequences}) > 1:
            continue
        yield workload.name, kernel, predict(workload, counts)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict", description=__doc__)
    parser.add_argument("objects", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    options = parser.parse_args()
    kernels = [kernel for path in options.objects for kernel in kernels_of(path)]
    counted_kernels = [x for x in map(counts_of, kernels) if x is not None]
    print("| workload | kernel | worst thread block | issue slots | time | rate | measured |")
    print("|---|---|---|---|---|---|---|")
    for name, kernel, x in predictions(counted_kernels, options.trace):
        cells = f"{x.worst:.2f}", f"{x.slots:.0%}", f"{x.seconds * 1e6:.0f} us", x.rate
        print(f"| {name} | {kernel.lower()} | {' | '.join(cells)} | |")


if __name__ == "__main__":
    main()
