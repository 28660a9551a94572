"""The machine's limits: the rate of reading memory, and the rates of multiplying in registers.

They take part in each row's rounds. A limit is the best of these rounds: a machine that others
share is faster for minutes and then slower.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

READ = "read"
# Which products a row's limit may come from, and the functions of products.cc.
PRODUCTS = {
    "float32": {"products, float32": "MultiplyFloat32"},
    "float16": {"products, float32": "MultiplyFloat32"},
    "bfloat16": {
        "products, float32": "MultiplyFloat32",
        "products, bfloat16": "MultiplyBFloat16",
    },
}
NAMES = {READ, *(name for products in PRODUCTS.values() for name in products)}

READ_BYTES = 1 << 29
FLOPS = 1 << 33  # of all threads together


@cache
def _products() -> ctypes.CDLL:
    """The functions of products.cc, compiled for this processor."""
    source = Path(__file__).with_name("products.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "products.so"
        compiler = os.environ.get("CXX", "c++")
        options = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def contestants() -> dict[str, Callable[[], Any]]:
    """Reads, and multiplies, on as many threads as PyTorch has: `amounts` says how much."""
    source = torch.zeros(READ_BYTES // 4)
    num_threads = torch.get_num_threads()
    threads = ThreadPoolExecutor(num_threads)
    found: dict[str, Callable[[], Any]] = {READ: source.sum}

    def on_all_threads(multiply: Callable[[int], None]) -> None:
        list(threads.map(multiply, [FLOPS // num_threads] * num_threads))

    for name, function in PRODUCTS["bfloat16"].items():
        if hasattr(_products(), function):  # the processor has the instruction
            multiply = getattr(_products(), function)
            multiply.argtypes = [ctypes.c_int64]
            found[name] = partial(on_all_threads, multiply)
    return found


def amounts() -> dict[str, int]:
    """The bytes, or the FLOP, of a call of each of `contestants`. Kept with the results."""
    return {name: READ_BYTES if name == READ else FLOPS for name in NAMES}


def rates(row: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, float]:
    """Bytes or FLOP a second in a row's rounds, by each limit. Older results have none of products:
    they hold a library's matrix product, which is no limit."""
    kept = results["limits"] if "limits" in results else {READ: results["limit_bytes"]}
    spread = row["spread"]
    return {name: amount / spread[name][0] for name, amount in kept.items() if name in spread}


def product_rate(rates: Mapping[str, float], dtype: str) -> float | None:
    """FLOP a second of a row of this dtype; None if it was not measured."""
    return max((rates[name] for name in PRODUCTS[dtype] if name in rates), default=None)


def share(row: Mapping[str, Any], name: str, results: Mapping[str, Any]) -> float | None:
    """The least time that reading and multiplying take, divided by the contestant's. None for older
    results, but for decode steps, which reading bounds."""
    found = rates(row, results)
    products = product_rate(found, row["dtype"])
    if products is None and row["kind"] != "decode":
        return None
    least = row["kv_bytes"] / found[READ]
    if products is not None:
        least = max(least, row["flops"] / products)
    return least / row["seconds"][name]


def above(results: Mapping[str, Any]) -> list[str]:
    """What is faster than its limit, and so shows that the limit is none."""
    found = []
    for row in results["rows"]:
        for name in row["seconds"].keys() - NAMES:
            part = share(row, name, results)
            if part is not None and part > 1:
                found.append(f"{row['kind']} {row['workload']} {row['dtype']}, {name}: {part:.0%}")
    return found
