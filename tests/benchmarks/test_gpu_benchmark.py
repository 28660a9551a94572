"""The parts of the GPU benchmark that run on the CPU: counts, checks and tables."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version

import shared_ffi
from benchmarks import contest, workloads
from benchmarks.gpu import bench, launch, overview, process
from benchmarks.workloads import Workload, uniform
from harness.workload import MODELS, Model
from tests.support import native
from tools.lease import check, pack, report

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
    shared = replace(DECODE, shared_blocks=4)
    assert shared.kv_bytes == (64 + 3 * 36) * 2 * 2 * 64 * 2
    # The window has left 60 positions, and 4 of those in common are in it.
    assert replace(shared, model=WINDOWED).kv_bytes == (4 + 3 * 36) * 2 * 2 * 64 * 2
    assert replace(shared, shared_blocks=9).kv_bytes == 100 * 2 * 2 * 64 * 2


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


VARIANT = Path(shared_ffi._native.__file__)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another lab.json, of one contest with a variant and two environments."""
    steps = [
        {
            "name": "decode",
            "seconds": 60,
            "command": "",
            "rows": ["decode decode", "prefill prefill"],
            "contestants": {
                "": ["torch eager, max_query_len", "FlashInfer"],
                "*": ["torch eager*"],
                "one thread": ["torch eager"],
                "broken": ["torch eager"],
            },
            "environments": {
                "one thread": {"OMP_NUM_THREADS": "1"},
                "broken": {"OMP_NUM_THREADS": 1},
            },
        }
    ]
    path = tmp_path / "lab.json"
    variants = {"wrong": {"steps": ["decode"], "wrong": True}, "elsewhere": {"steps": ["prefill"]}}
    content = {"names": {}, "variants": variants, "steps": steps, "questions": []}
    path.write_text(json.dumps(content))
    workload_of = {"decode decode": DECODE, "prefill prefill": PREFILL}.__getitem__
    monkeypatch.setattr(bench, "workload_of", workload_of)
    monkeypatch.setattr(bench, "REHEARSAL", [*steps[0]["rows"]])
    monkeypatch.setattr(report, "LAB", path)
    return path


def run_contest(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> Any:
    command = ["bench", "decode", "--rehearse", "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    return json.loads(out.read_text())


def test_builds_and_environments_take_turns(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a process of its own. One that dies leaves the others running."""
    out = tmp_path / "decode.json"
    named = {"new": VARIANT, "none": "absent.so", "wrong": VARIANT, "elsewhere": VARIANT}
    variants = [word for name in named for word in ("--variant", f"{name}={named[name]}")]
    results = run_contest(monkeypatch, out, *variants)
    decode, prefill = results["rows"]
    hint = "torch eager, max_query_len"
    ours = {"new: torch eager", "torch eager: wrong", "one thread: torch eager"}
    measured = {hint, f"new: {hint}", f"{hint}: wrong", *ours}
    assert decode["seconds"].keys() == measured == decode["gauges"].keys()
    assert decode["same_bits"] == {f"new: {hint}": True}
    assert prefill["seconds"].keys() == ours
    assert decode["absent"]["none: torch eager"] == "its process died"
    assert decode["absent"]["broken: torch eager"] == "its process died"
    assert decode["absent"]["FlashInfer"].startswith("ModuleNotFoundError")
    portable = "new: torch eager, XLA_GPU_CUDA_KERNELS=portable"
    assert prefill["absent"][portable] == "does not compute on the CPU"

    found = report.figures({"decode": results})
    title = "decode/decode decode"
    assert found[f"{title}/new: torch eager"] == decode["seconds"]["new: torch eager"] * 1e6
    assert found[f"decode/same bits/decode decode/new: {hint}"] == 1


def test_a_contest_that_is_cut_off_is_continued(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def row_of(workload: Workload, *_: Any) -> dict[str, Any]:
        if done == ["decode"] and workload is PREFILL:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(workload.name)
        return {"kind": workload.kind, "workload": workload.name, "seconds": {}}

    monkeypatch.setattr(bench, "row_of", row_of)
    out = tmp_path / "decode.json"
    with pytest.raises(KeyboardInterrupt):
        run_contest(monkeypatch, out)
    assert json.loads(out.read_text())["not_measured"] == ["prefill prefill"]
    results = run_contest(monkeypatch, out)
    assert [row["workload"] for row in results["rows"]] == ["decode", "prefill"]
    assert results["not_measured"] == [] and done == ["decode", "killed", "prefill"]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "limits.json"
    monkeypatch.setattr(sys, "argv", ["bench", "limits", "--rehearse", "--out", str(out)])
    bench.main()
    assert json.loads(out.read_text()).keys() == {
        "read_bytes_per_s", "copy_bytes_per_s", "matmul_flops_per_s"
    }  # fmt: skip


def test_the_lab_fits_and_asks_what_it_measures() -> None:
    """The first two parts fit into the lease of a GPU, with the time to unpack, and all take 25
    minutes. A question's figures have names that a step writes."""
    lab = report.lab()
    assert lab["parts"] == {"1": 560, "2": 240}
    for part, seconds in lab["parts"].items():
        steps = check.steps_of([int(part)])
        assert sum(step["seconds"] for step in steps) + 30 <= seconds  # to unpack
    assert sum(step["seconds"] for step in check.steps_of()) < 25 * 60
    names = [step["name"] for step in lab["steps"]]
    assert len({*names}) == len(names)
    contests = {step["name"]: step for step in lab["steps"] if "contestants" in step}
    wrong = [name for name, variant in lab["variants"].items() if variant.get("wrong")]
    for step in contests.values():
        for row in step["rows"]:
            workload = bench.workload_of(row)
            assert f"{workload.kind} {workload.name}" == row
        for patterns in step["contestants"].values():
            assert all(bench.chosen(process.MAKERS, [pattern]) for pattern in patterns), step[
                "name"
            ]
    for question in lab["questions"]:
        for pattern in (question[key] for key in ("figure", "over", "minus") if key in question):
            step, row, who = (*pattern.split("/"), "")[:3]
            assert step in names, pattern
            if step in contests and row != "same bits":
                assert row in contests[step]["rows"], pattern
                makers = [
                    name
                    for x in contests[step]["contestants"].values()
                    for name in bench.chosen(process.MAKERS, x)
                ]
                first, _, last = who.partition(": ")
                if last in wrong:
                    assert step in lab["variants"][last]["steps"], pattern
                who = first if last in wrong else last or who
                assert bench.chosen(makers, [who]), pattern
        assert {"at_most", "at_least"} & question.keys() and {"then", "else"} <= question.keys()


def test_variants_leave_in_time() -> None:
    """What a header has for builds to measure is a variant, and each has a version that it does not
    live to see: a release of that version takes it out."""
    variants = report.lab()["variants"].values()
    files = [pack.CSRC / "gpu/lab.h", pack.CSRC / "gpu/stamps.cuh"]
    text = "".join(path.read_text() for path in files)
    defined = set(re.findall(r"^#ifn?def (\w+)", text, re.M))
    assert defined == {variant["definition"] for variant in variants}
    others = "".join(path.read_text() for path in {*pack.CSRC.rglob("*.*")} - {*files})
    assert [name for name in defined if re.search(rf"\b{name}\b", others)] == []
    now = Version(shared_ffi.__version__)
    assert [variant for variant in variants if Version(variant["until"]) <= now] == []


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,7,1\n")
    assert workloads.trace_sequences(trace, 5) == ((1, 105), (1, 7))


@pytest.mark.parametrize(("row", "sequences", "more"), [
    ("decode b3 x 9, blocks of 64", ((1, 9),) * 3, {"block_size": 64}),
    ("prefill 70, gpt-oss-20b", ((70, 70),), {"model": MODELS["gpt-oss-20b"]}),
    ("mixed 5 on 80", ((5, 85),), {}),
    ("mixed 5 on 80 beside 2 decodes, int8", ((5, 85), (1, 4096), (1, 4096)), {"cache_dtype": "int8"}),
    ("decode b2 x 99, 64 in common, blocks of 32", ((1, 99),) * 2, {"block_size": 32, "shared_blocks": 2}),
])  # fmt: skip
def test_a_row_says_its_workload(row: str, sequences: Any, more: dict[str, Any]) -> None:
    kind, _, name = row.partition(" ")
    expected = Workload(name, kind, MODELS["llama-3-8b"], sequences)
    assert bench.workload_of(row) == replace(expected, **more)


@pytest.mark.parametrize(("row", "message"), [
    ("decode b3 x 9, float32", "names a model, a dtype, blocks or what is in common; got 'float32'"),
    ("decode 3 x 9", "a row is decode bN x N, .*; got 'decode 3 x 9'"),
    ("other 3", "a row is decode bN x N, .*; got 'other 3'"),
])  # fmt: skip
def test_a_row_that_says_none(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.workload_of(row)


def test_programs_of_jax_are_timed_as_one() -> None:
    calls = [contest.jax_ours(DECODE, DECODE.operands("cpu", seed)) for seed in (0, 1)]
    for each, alone in zip(contest.wait_for(contest.in_one_go(calls)()), calls, strict=True):
        assert each.tolist() == alone().tolist()


def test_copies_are_computed_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. Its graph is pretended here; the last of the copies is the one that is checked."""
    operands, made = Workload.operands, []
    monkeypatch.setattr(Workload, "operands", lambda self, _: operands(self, "cpu"))
    monkeypatch.setattr(contest, "copies_past_the_cache", lambda *_: 3)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)

    def right(workload: Workload, operands: list[torch.Tensor]) -> contest.Contestant:
        made.append(operands)
        return contest.ours(workload, operands)

    def wrong_at_last(workload: Workload, operands: list[torch.Tensor]) -> contest.Contestant:
        result = right(workload, operands)() * (2 if len(made) == 6 else 1)
        return lambda: result

    found = contest.prepare(DECODE, "cuda", {"right": right, "wrong": wrong_at_last}, calls=7)
    assert [*found.contestants] == ["right"] and "allowed error" in found.absent["wrong"]
    assert len({operands[1].data_ptr() for operands in made}) == 3
    assert found.calls == 9 and len(found.contestants["right"]()) == 9


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the arrays that a contestant has prepared."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    prepared = torch.ones(1)
    is_there = weakref.ref(prepared)
    replay = contest.in_one_go([functools.partial(torch.neg, prepared)])
    del prepared
    assert is_there() is not None and replay()[0].tolist() == [-1]


def test_counters_of_a_profile() -> None:
    """On ncu's raw page, after what the program printed."""
    page = (
        'a line\n"ID","Kernel Name","gpu__time_duration.sum","launch__grid_size"\n"","","us",""\n'
        '"0","Add","1","1"\n"1","void PrefillAttention<X>(Y)","9","7"\n'
        '"2","DecodeAttention","1,021.5","32"\n"3","Add","1","1"\n"4","DecodeAttention","9","264"\n'
    )
    found = launch.counters(page, ["one", "two"])
    assert found["one"] == {"ID": 2, "gpu__time_duration.sum": 1021.5, "launch__grid_size": 32}
    assert found["two"]["launch__grid_size"] == 264
    with pytest.raises(ValueError, match="zip"):
        launch.counters(page, ["one"])


def test_clocks_of_a_build_with_stamps() -> None:
    """The median of the blocks that got work, in the last call."""
    text = (
        "stamps 1 2 3 4 5 6 7\nlast call of one\nstamps 10 11 12 13 14 15 16\n"
        "stamps 20 23 22 23 24 25 26\nstamps 30 31 0 0 0 0 0\nlast call of two\nstamps 0 1 2 3 4 5 6\n"
    )
    with pytest.raises(AssertionError, match="two: no thread block"):
        launch.clocks(text, ["one", "two"])
    assert launch.clocks(text, ["one"])["one"] == {
        "ready": 2, "scheduled": 2, "copies": 3, "first tile": 4, "last tile": 5, "finished": 6
    }  # fmt: skip


def test_replays_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "workload_of", lambda _: DECODE)
    launch.replay(["decode decode"], 2, is_rehearsal=True)
    noise = itertools.count()
    monkeypatch.setattr(
        contest, "ours_with_hint", lambda *_: lambda: torch.full((2,), next(noise) // 200)
    )
    with pytest.raises(AssertionError, match="decode decode: replay 2 has other bits"):
        launch.replay(["decode decode"], 4, is_rehearsal=True)


def test_the_pages_say_what_was_measured(tmp_path: Path) -> None:
    """Each page is as the command writes it; results of new steps become tables."""
    results = json.loads(overview.KEPT.read_text())
    for page in overview.PAGES:
        text = page.read_text()
        assert "<!-- gpu: " in text and overview.written(text, results) == text, (
            f"python -m benchmarks.gpu.overview writes {page}"
        )
    assert "not measured" in overview.invariant(results) and "not measured" in overview.jax(results)
    row = results["results"]["table"]["rows"][1]
    row["seconds"] |= {"FlashAttention-3, num_splits=1": 3e-5, "no command buffers: JAX": 4e-5}
    results["results"]["invariant"] = results["results"]["jax"] = {"rows": [row]}
    assert "| call | ours | FlashInfer | FlashAttention-3, num_splits=1 |" in overview.invariant(
        results
    )
    assert "| decode 1 of 8192 | 37.2 | 22.7 | 30.0 |" in overview.invariant(results)
    assert "| decode 1 of 8192 | 37.2 | 40.0 |" in overview.jax(results)


@pytest.mark.parametrize("option", ["-DSKBUILD=2", "-DXLA_GPU_ARCHITECTURES=all"])
def test_packages_refuse_what_is_to_measure(option: str, tmp_path: Path) -> None:
    command = ["cmake", "-S", str(pack.ROOT), "-B", str(tmp_path), option]
    command += ["-DXLA_GPU_LAB=XLA_GPU_NO_SOFTMAX"]
    outcome = native.run(*command)
    assert outcome.returncode != 0
    words = " ".join(outcome.stdout.split())
    assert "XLA_GPU_LAB is for builds to measure; got XLA_GPU_NO_SOFTMAX for a package" in words
