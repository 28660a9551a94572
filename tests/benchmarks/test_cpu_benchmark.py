"""The CPU benchmark: every competitor's result is checked, then the report and the picture are
made."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import contest, figure, training
from benchmarks.cpu import limits, overview, report
from benchmarks.cpu.peers import PEERS
from benchmarks.gpu import overview as gpu_overview
from benchmarks.kept import by_row
from benchmarks.workloads import DEEPSEEK, Workload, uniform
from harness.workload import Model

SMALL = Model("small", 8, 2, 64)


FLEX = "torch flex attention (contiguous)"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of small arrays, and timings of a few calls."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "FLOPS", 1 << 24)
    monkeypatch.setattr(contest, "MOST_COPIES", 2)
    monkeypatch.setattr(contest, "ROUNDS", 3)
    monkeypatch.setattr(contest, "SHORT_ROUNDS", 3)
    seconds = functools.partial(contest.seconds, budget=0.001, rest=0)
    monkeypatch.setattr(contest, "seconds", seconds)


def row(workload: Workload, *left_out: str) -> dict[str, Any]:
    makers = {name: x for name, x in (contest.OURS | PEERS).items() if name not in left_out}
    return contest.row_of(workload, makers, limits.contestants())


def test_rows_and_their_report(
    quickly: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = Workload("b2 x 90", "decode", SMALL, uniform(2, 1, 90), dtype="float32")
    prefill = Workload("40", "prefill", SMALL, uniform(1, 40, 40))
    first, second = row(decode, FLEX), row(prefill)  # Inductor takes 10 s for a workload
    expected = {"torch eager", "JAX", "torch SDPA (contiguous)"}
    assert expected | {"torch SDPA, grouped (contiguous)", "jax.numpy"} <= set(first["seconds"])
    assert expected | {FLEX} <= set(second["seconds"])
    assert set(first["errors"]) == set(first["seconds"]) - limits.NAMES
    assert "vLLM" in first["absent"]

    found = {
        "machine": {"processor": "a processor", "cores": 2, "instruction_set": "avx2"},
        "limits": limits.amounts(),
        "rows": [first, second],
    }
    old = found | {"limit_bytes": limits.READ_BYTES, "limit_flops": 2 * 2048**3}
    del old["limits"]
    for results, text in ((found, "limit, float32"), (old, "the limit was not measured")):
        report.show(results)
        assert "b2 x 90" in capsys.readouterr().out
        report.draw(results, tmp_path / "picture.svg")
        assert text in (tmp_path / "picture.svg").read_text()


def test_rows_of_training_and_their_table(quickly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, answers = (
        training.Batch(2, 20, "float32"),
        training.Batch(3, 8, "bfloat16", prompt=12),
    )
    assert training.peak_bytes(plain, training.OURS) >= 0
    monkeypatch.setattr(training, "peak_bytes", lambda batch, name: 3 if name == "SDPA" else 1)
    rows = [training.row_of(batch) for batch in (plain, answers)]
    names = {training.OURS, training.OURS_IN_JAX, training.SDPA, training.JAX_NN}
    assert [{*row["errors"]} for row in rows] == [names, {*names, training.UNSHARED}]
    lines = training.table({"rows": rows}).splitlines()
    for line, words in zip(lines[2:4], ("2 of 20", "3 of 8, of a prompt of 12"), strict=True):
        assert line.startswith(f"| {words} |") and line.endswith(" | 0.33 |")
    assert lines[5].startswith("Answers that share their prompt take ")
    doubled = [2 * np.asarray(x) for x in training.ours_in_jax(plain, backward=True)()]
    with pytest.raises(AssertionError, match="JAX"):
        training.check(plain, {training.OURS_IN_JAX: doubled})


def test_a_share_of_the_limit() -> None:
    """The limit is the row's best round of what takes longer: reading, or the dtype's products."""
    best = {"read": 1.0, "products, float32": 0.5, "products, bfloat16": 0.25}

    def row(kind: str, dtype: str, **seconds: float) -> dict[str, Any]:
        return {
            "kind": kind,
            "workload": "w",
            "dtype": dtype,
            "kv_bytes": 100,
            "flops": 1000,
            "spread": {name: [x, 3 * x] for name, x in best.items()},
            "seconds": {name: 2 * x for name, x in best.items()} | seconds,
        }

    rows = [
        row("decode", "float32", JAX=4.0),
        row("prefill", "bfloat16", JAX=1.0),
        row("prefill", "float16", JAX=2.0, vLLM=0.25),
    ]
    amounts = {"read": 100, "products, float32": 250, "products, bfloat16": 500}
    results: dict[str, Any] = {"limits": amounts, "rows": rows}
    assert [limits.share(row, "JAX", results) for row in rows] == [0.5, 1.0, 1.0]
    assert limits.above(results) == ["prefill w float16, vLLM: 800%"]

    old = {"limit_bytes": 100, "limit_flops": 1, "rows": rows}  # of a library's matrix product
    assert [limits.share(row, "JAX", old) for row in rows] == [0.25, None, None]
    assert limits.above(old) == []


def test_no_matrix_product_is_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FLOPS", 1 << 29)
    left, threads = torch.randn(512, 512), torch.get_num_threads()

    def processor_seconds(call: contest.Contestant, _: int) -> float:
        """The seconds of all threads of this process. Other programs do not count."""
        start = time.process_time()
        call()
        return time.process_time() - start

    torch.set_num_threads(1)
    try:
        calls = limits.contestants() | {"BLAS": lambda: left @ left}
        del calls["read"]
        # The best of short turns: other programs share caches and units with most of them.
        times = contest.take_turns(calls, 100, dict.fromkeys(calls, 1), take=processor_seconds)
    finally:
        torch.set_num_threads(threads)
    rates = {name: limits.FLOPS / min(times[name]) for name in calls if name != "BLAS"}
    assert 2 * 512**3 / min(times["BLAS"]) < rates["products, float32"]
    # Not twice that of float32 everywhere, but more.
    assert rates.get("products, bfloat16", float("inf")) > 1.2 * rates["products, float32"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_each_computing_thread_has_a_processor_of_its_own() -> None:
    """While it takes a turn; then all threads are where they were."""
    everywhere, content = os.sched_getaffinity(0), bytes(1 << 20)
    placed: list[tuple[int, frozenset[int]]] = []
    both = threading.Barrier(2)

    def compute(_: int) -> None:
        both.wait()  # each thread takes one
        hashlib.sha256(content).digest()  # without the GIL
        placed.append((threading.get_native_id(), frozenset(os.sched_getaffinity(0))))

    with ThreadPoolExecutor(2) as threads:
        take = contest.OwnProcessors().turn
        contest.seconds({"two threads": lambda: list(threads.map(compute, range(2)))}, take=take)
        assert [*contest.each_thread(os.sched_getaffinity).values()].count(everywhere) >= 3
    first, second = sorted(set(placed[-4:]))
    assert first[0] != second[0] and len(first[1] | second[1]) == 2, placed


def test_padding_is_part_of_a_workload() -> None:
    padded = Workload("", "decode", SMALL, uniform(2, 1, 90), max_seqs=5, max_blocks_per_seq=9)
    query, _, contexts, tables, starts, num_seqs = padded.operands("cpu")
    assert query.shape == (2, 8, 64) and contexts.tolist() == [90, 90, 0, 0, 0]
    assert tables.shape == (5, 9) and starts.tolist() == [0, 1, 2, 2, 2, 2]
    assert num_seqs.tolist() == [2]
    operands = padded.operands("cpu")
    assert contest.error_of(contest.ours(padded, operands)(), padded, operands) <= 1


@pytest.mark.parametrize(
    ("module", "name"),
    [(overview, "overview.svg"), (gpu_overview, "gpu-h100.svg")],
    ids=["CPU", "GPU"],
)
def test_the_figure_shows_the_kept_results(module: Any, name: str) -> None:
    measured = module.kept()
    text = (module.RESULTS / name).read_text()
    for found in measured.values():
        assert found.keys() == {*module.WORKLOADS.values()}
    shown = sorted(re.findall(r">(\d\.\d\d)<", text))
    assert shown == sorted(f"{x:.2f}" for found in measured.values() for x in found.values())
    assert min(map(float, shown)) < 1 < max(map(float, shown)), "no loss, or no gain"
    for color in figure.VARIABLES:
        assert color not in text
    assert "speed beside" in text, "the axis has no words"


def test_sdpa_takes_no_memory_for_each_of_many_heads() -> None:
    workload = Workload("", "decode", DEEPSEEK, uniform(1, 1, 4))
    with pytest.raises(contest.DoesNotApply, match="so many heads within memory"):
        contest.torch_sdpa(workload, workload.operands("cpu"))


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_latent_attention_of_pages_of_one_position(quickly: None, cache_dtype: str | None) -> None:
    model = Model("latent", 8, 1, 72, value_head_size=64)
    workload = Workload(
        "", "decode", model, uniform(2, 1, 90), block_size=1, cache_dtype=cache_dtype
    )
    itemsize = 1 if cache_dtype else 2
    assert workload.kv_bytes == 2 * 90 * 72 * itemsize
    assert workload.flops == 2 * 2 * 90 * 8 * (72 + 64)
    found = contest.row_of(workload, contest.OURS | PEERS, limits.contestants())
    assert contest.OURS.keys() <= found["seconds"].keys()
    reason = (
        "No module named 'vllm'" if cache_dtype is None else "latent rows with the query's dtype"
    )
    assert reason in found["absent"]["vLLM"]
    assert ("torch SDPA (contiguous)" in found["seconds"]) == (cache_dtype is None)


def test_results_are_kept_by_row() -> None:
    results = {"machine": {"cores": 2}, "table": {"peers": {}, "rows": [{"a": [1]}, {"a": 2}]}}
    assert by_row(results) == (
        '{\n "machine": {"cores": 2},\n "table": {\n  "peers": {},\n'
        '  "rows": [\n   {"a": [1]},\n   {"a": 2}\n  ]\n }\n}\n'
    )
    for path in Path("docs/results").glob("*.json"):
        assert by_row(json.loads(path.read_text())) == path.read_text(), path
