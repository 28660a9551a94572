"""The parts of the GPU benchmark that run on the CPU: counts, checks and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contest, workloads
from benchmarks.gpu import bench, check, report
from benchmarks.gpu.peers import PEERS
from benchmarks.workloads import Workload, uniform
from examples.replay.models import Model

MODEL = Model("small", 8, 2, 64)
WINDOWED = Model("windowed", 8, 2, 64, sliding_window=40, soft_cap=30.0)
DECODE = Workload("decode", "decode", MODEL, uniform(3, 1, 100), 16)
PREFILL = Workload("prefill", "prefill", MODEL, uniform(2, 60, 60), 16)


def test_counts() -> None:
    assert DECODE.kv_bytes == 3 * 100 * 2 * 2 * 64 * 2
    assert DECODE.flops == 4 * 3 * 100 * 8 * 64
    assert PREFILL.flops == 4 * 2 * (60 * 61 // 2) * 8 * 64
    windowed = Workload("", "prefill", WINDOWED, uniform(1, 60, 60))
    assert windowed.flops == 4 * (40 * 41 // 2 + 20 * 40) * 8 * 64
    assert Workload("", "decode", WINDOWED, uniform(1, 1, 100)).kv_bytes == 40 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("workload", [
    DECODE,
    PREFILL,
    Workload("mixed", "mixed", WINDOWED, ((30, 90), (1, 7), (1, 130)), 8),
    Workload("float8", "decode", MODEL, uniform(3, 1, 100), cache_dtype="float8_e4m3fn"),
    Workload("int8", "decode", MODEL, uniform(3, 1, 100), cache_dtype="int8"),
], ids=lambda workload: workload.name)  # fmt: skip
def test_right_first(workload: Workload) -> None:
    operands = workload.operands("cpu")
    result = contest.ours(workload, operands)()
    assert contest.error_of(result, workload, operands) <= 1
    assert contest.error_of(contest.jax_ours(workload, operands)(), workload, operands) <= 1
    assert contest.error_of(result * 1.1, workload, operands) > 1
    assert contest.error_of(torch.full_like(result, torch.nan), workload, operands) > 1


def test_a_row_and_its_tables(tmp_path: Path) -> None:
    results: dict[str, Any] = {
        "machine": {
            "name": "GPU",
            "driver_version": "1",
            "clocks.max.sm": "1 MHz",
            "clocks.max.memory": "1 MHz",
            "python": "3",
            "versions": {"torch": "2", "flashinfer-python": None},
            "commit": "abc",
        },
        "steps": {"build": {"ok": True, "seconds": 1.0, "last_words": "built"}},
        "bench": {
            "limits": bench.limits(),
            "rows": [
                contest.row_of(DECODE, "cpu", contest.OURS_ON_GPUS | PEERS),
                contest.row_of(PREFILL, "cpu", contest.OURS_ON_GPUS | PEERS),
                contest.row_of(
                    dataclasses.replace(DECODE, cache_dtype="int8"),
                    "cpu",
                    contest.OURS_ON_GPUS | PEERS,
                ),
            ],
            "not_measured": ["131072"],
        },
    }
    decode, prefill, of_8_bits = results["bench"]["rows"]
    assert {"torch eager", "JAX", "torch SDPA (contiguous)"} <= set(decode["seconds"])
    assert set(of_8_bits["seconds"]) == {"torch eager", "JAX", "torch eager, max_query_len"}
    assert of_8_bits["kv_bytes"] == decode["kv_bytes"] / 2
    hopper = "torch eager, XLA_GPU_CUDA_PREFILL=hopper"
    assert prefill["absent"][hopper] == "does not compute on other devices than Hopper's"
    assert "FlashInfer" in decode["absent"] and "FlashInfer" not in decode["seconds"]
    json.dumps(results)
    text = report.markdown(results)
    assert "| decode | decode |" in text and "GB/s" in text and "TFLOP/s" in text
    assert "* FlashInfer: ModuleNotFoundError" in text
    assert "not measured, for lack of time: 131072" in text
    report.show(results)


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,7,1\n")
    assert workloads.of_trace(trace, 5) == ((1, 105), (1, 7))
    names = [workload.name for workload in bench.workloads(trace)]
    assert len(set(zip(names, range(len(names)), strict=True))) == len(names)
    assert "64 of trace" in names


def test_steps(tmp_path: Path) -> None:
    """Steps that passed are not repeated. Steps that failed, were skipped or ran out of time are
    named."""
    well, badly = ([sys.executable, "-c", f"print('words'); raise SystemExit({i})"] for i in (0, 1))
    steps = check.Steps(tmp_path, {"name": "GPU"})
    assert steps.do("well", well, 60)
    assert not steps.do("badly", badly, 60)
    assert not steps.do("absent", ["no-such-tool"], 60)
    assert not steps.do("slow", [sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    words = {name: step["last_words"] for name, step in steps.results["steps"].items()}
    assert words == {
        "well": "words",
        "badly": "words",
        "absent": "no-such-tool is not installed",
        "slow": "stopped after 0 s",
    }

    later = check.Steps(tmp_path, {"name": "GPU"}, only=["well", "badly"], seconds=0)
    assert later.do("well", badly, 60)
    assert not later.do("slow", well, 60) and not later.do("badly", well, 60)
    assert later.results["steps"]["badly"]["last_words"].startswith("no time was left")

    assert not check.Steps(tmp_path, {"name": "GPU"}, again=True).results["steps"]
    assert not check.Steps(tmp_path, {"name": "another GPU"}).results["steps"]
