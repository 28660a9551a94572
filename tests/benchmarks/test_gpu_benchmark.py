"""The parts of the GPU benchmark that run on the CPU: counts, checks and tables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import random
import shutil
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shared_ffi
from benchmarks import contest, workloads
from benchmarks.gpu import bench, check, pack, report
from benchmarks.gpu.peers import PEERS
from benchmarks.workloads import Workload, uniform
from harness.workload import Model

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
        "steps": {
            "kernels": {"ok": True, "seconds": 1.0, "last_words": "3 passed"},
            "backends": {"ok": False, "seconds": 1.0, "last_words": "1 failed", "log": "E  wrong"},
            "racecheck": {"ok": None, "seconds": 0, "last_words": "too old"},
        },
        "benchmark": {
            "ours": [*contest.OURS_ON_GPUS],
            "peers": {"flashinfer-python": None, "flash_attn_3": "3.0"},
            "limits": bench.limits("cpu"),
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
    decode, prefill, eight_bit = results["benchmark"]["rows"]
    assert {"torch eager", "JAX", "torch SDPA (contiguous)"} <= set(decode["seconds"])
    assert set(eight_bit["seconds"]) == {"torch eager", "JAX", "torch eager, max_query_len"}
    assert eight_bit["kv_bytes"] == decode["kv_bytes"] / 2
    portable = "torch eager, XLA_GPU_CUDA_KERNELS=portable"
    assert prefill["absent"][portable] == "does not compute on the CPU"
    assert "FlashInfer" in decode["absent"] and "FlashInfer" not in decode["seconds"]
    json.dumps(results)
    text = report.markdown(results)
    assert "| decode | decode |" in text and "GB/s" in text and "TFLOP/s" in text
    assert "| kernels | ok |" in text and "| racecheck | left out |" in text
    assert "| backends | FAILED |" in text and "backends:\n\n```\nE  wrong\n```" in text
    assert "* other libraries: flash_attn_3 3.0\n" in text
    assert "* FlashInfer: ModuleNotFoundError" in text
    assert "not measured, for lack of time: 131072" in text
    report.show(results)


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,7,1\n")
    assert workloads.trace_sequences(trace, 5) == ((1, 105), (1, 7))
    names = [workload.name for workload in bench.workloads(trace)]
    assert len(set(zip(names, range(len(names)), strict=True))) == len(names)
    assert "64 of trace" in names
    kinds = [workload.kind for workload in bench.workloads(trace)]
    assert kinds[:4] == ["decode", "prefill", "decode", "prefill"] and "mixed" in kinds


def test_programs_of_jax_are_timed_as_one() -> None:
    calls = [contest.jax_ours(DECODE, DECODE.operands("cpu", seed)) for seed in (0, 1)]
    for each, alone in zip(contest.wait_for(contest.in_one_go(calls)()), calls, strict=True):
        assert each.tolist() == alone().tolist()


def test_copies_are_timed_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. Its graph is pretended here; the last of the copies is the one that is checked."""
    operands, made = Workload.operands, []
    monkeypatch.setattr(Workload, "operands", lambda self, _: operands(self, "cpu"))
    monkeypatch.setattr(contest, "copies_past_the_cache", lambda *_: 3)
    monkeypatch.setattr(
        contest, "seconds", lambda contestants, **_: {name: [6.0] for name in contestants}
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)

    def right(workload: Workload, operands: list[torch.Tensor]) -> contest.Contestant:
        made.append(operands)
        return contest.ours(workload, operands)

    def wrong_at_last(workload: Workload, operands: list[torch.Tensor]) -> contest.Contestant:
        result = right(workload, operands)() * (2 if len(made) == 6 else 1)
        return lambda: result

    row = contest.row_of(DECODE, "cuda", {"right": right, "wrong": wrong_at_last})
    assert row["seconds"] == {"right": 2.0} and "allowed error" in row["absent"]["wrong"]
    assert len({operands[1].data_ptr() for operands in made}) == 3


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the arrays that a contestant has prepared."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    prepared = torch.ones(1)
    is_there = weakref.ref(prepared)
    replay = contest.in_one_go([functools.partial(torch.neg, prepared)])
    del prepared
    assert is_there() is not None and replay()[0].tolist() == [-1]


WELL, BADLY = (
    [sys.executable, "-c", f"print('words'); raise SystemExit({code})"] for code in (0, 1)
)
GPU = {
    "name": "GPU",
    "driver_version": "1",
    "clocks.max.sm": "-",
    "clocks.max.memory": "-",
    "python": "3",
    "versions": {},
    "commit": "abc",
}


def test_steps(tmp_path: Path) -> None:
    """Steps that passed are not repeated. Steps that failed, were skipped or ran out of time are
    named."""
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    steps = check.Steps(tmp_path, GPU)
    assert not steps.do("badly", BADLY, 60)
    assert not steps.do("absent", ["no-such-tool"], 60)
    assert not steps.do("slow", slow, 0.5)
    steps.leave_out("racecheck", "too old")
    assert not steps.do("skipped", [sys.executable, "-c", "print('3 skipped in 2 s')"], 60)
    assert steps.results["steps"]["skipped"]["ok"] is None
    assert steps.do("well 1/2", WELL, 60)
    assert not steps.went_well
    words = {name: step["last_words"] for name, step in steps.results["steps"].items()}
    assert words == {
        "badly": "words",
        "absent": "no-such-tool is not installed",
        "slow": "stopped after 0 s",
        "racecheck": "too old",
        "skipped": "3 skipped in 2 s",
        "well 1/2": "words",
    }
    assert "| badly | FAILED |" in (tmp_path / "report.md").read_text()

    later = check.Steps(tmp_path, GPU, only=["well", "badly"], seconds=0)
    assert later.do("well 1/2", BADLY, 60)
    assert not later.do("slow", WELL, 60) and not later.do("badly", WELL, 60)
    assert later.results["steps"]["badly"]["last_words"].startswith("no time was left")

    again = check.Steps(tmp_path, GPU, again=True, only=["well"])
    assert "slow" in again.results["steps"] and not again.do("well 1/2", BADLY, 60)
    assert not check.Steps(tmp_path, GPU | {"commit": "another"}).results["steps"]


def test_a_step_leaves_no_process(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    steps = check.Steps(tmp_path, GPU)
    assert steps.do("short", [sys.executable, "-c", program], 60)
    status = Path("/proc", steps.results["steps"]["short"]["last_words"], "status")
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "it still runs"


class Recorded(check.Steps):
    """Steps that are not done; those named by `failing` fail."""

    failing: tuple[str, ...] = ()

    def do(self, name: str, command: Any, seconds: float, **environment: str) -> bool:
        self.results["steps"][name] = {
            "ok": name not in self.failing,
            "portable": environment.get("XLA_GPU_CUDA_KERNELS") == "portable",
        }
        return name not in self.failing

    def leave_out(self, name: str, reason: str) -> None:
        self.results["steps"][name] = {"ok": None, "command": reason}


@pytest.mark.parametrize("is_hopper", [True, False])
def test_order_on_a_gpu(is_hopper: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark comes before the backends and the sanitizers; it measures no kernel that fails."""
    monkeypatch.setattr(check, "newest_sanitizer", lambda: "compute-sanitizer")
    steps = Recorded(tmp_path, GPU)
    check.check(steps, is_hopper, [])
    done = steps.results["steps"]
    names = list(dict.fromkeys(name.partition(",")[0] for name in done))
    hopper = ["kernels for Hopper"] if is_hopper else []
    others = ["comparison", "benchmark", "backends", *check.SANITIZERS]
    assert names == ["import", "kernels", *hopper, *others]
    assert done["racecheck, portable"]["ok"] and done["memcheck, portable"]["portable"]
    in_use = ("comparison", "benchmark", "backends, torch")
    assert not any(done[name]["portable"] for name in in_use)
    if is_hopper:
        assert done["racecheck, by GPU"]["ok"] is None
        assert not done["memcheck, by GPU"]["portable"]
        steps.failing = ("kernels for Hopper",)
        check.check(steps, is_hopper, [])
        assert all(done[name]["portable"] for name in in_use)


def test_the_newest_compute_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's, or that of a pack."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packages")])
    assert check.newest_sanitizer() == "compute-sanitizer"
    packed = tmp_path / "packages/nvidia/cu13/compute-sanitizer/compute-sanitizer"
    for path, version in ((tmp_path / packed.name, (2025, 3)), (packed, (2026, 4))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "#!/bin/sh\necho 'Compute Sanitizer'\necho 'Version {}.{}.1.0 (x)'\n".format(*version)
        )
        path.chmod(0o755)
        assert check.newest_sanitizer() == str(path)


def test_a_benchmark_that_is_cut_off_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "rehearsal", lambda: [DECODE, PREFILL])
    monkeypatch.setattr(bench, "limits", lambda _: {"read_bytes_per_s": 1.0})
    done = []

    def row_of(workload: Workload, *_: Any) -> dict[str, Any]:
        if done == ["decode"] and workload is PREFILL:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(workload.name)
        return {"kind": workload.kind, "workload": workload.name, "seconds": {}}

    monkeypatch.setattr(bench, "row_of", row_of)
    out = tmp_path / "benchmark.json"

    command = ["bench", "--rehearse", "--out", str(out), "--seconds"]

    def run(seconds: str) -> Any:
        monkeypatch.setattr(sys, "argv", [*command, seconds])
        bench.main()

    with pytest.raises(KeyboardInterrupt):
        run("60")
    assert json.loads(out.read_text())["not_measured"] == ["prefill"]
    with pytest.raises(SystemExit, match="1"):
        run("0")
    with pytest.raises(SystemExit, match="0"):
        run("60")
    results = json.loads(out.read_text())
    assert [row["workload"] for row in results["rows"]] == ["decode", "prefill"]
    assert results["not_measured"] == [] and done == ["decode", "killed", "prefill"]

    monkeypatch.setattr(bench, "versions", lambda _: {"flashinfer-python": "1"})
    with pytest.raises(SystemExit, match="0"):
        run("60")
    assert done[3:] == ["decode", "prefill"]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of small files, in pieces of 1000 bytes, for sources in another folder."""
    monkeypatch.setattr(pack, "ROOT", tmp_path / "sources")
    (tmp_path / "sources/shared_ffi/csrc").mkdir(parents=True)
    (tmp_path / "sources/CMakeLists.txt").write_text("project()")
    noise = random.Random(0)
    for name in ("module/_native.abi3.so", "packages/pytest.py", "peers/flashinfer.py"):
        path = tmp_path / "parts" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(noise.randbytes(2500))
    pack.write(tmp_path / "parts", tmp_path / "pack", "{}.{}".format(*sys.version_info), 1000)
    return tmp_path / "pack"


def test_the_sources_of_a_pack_know_their_version(tmp_path: Path) -> None:
    """Python asks the metadata of installed packages, and they are not installed."""
    pack.copy_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("xla-paged-attention", shared_ffi.__version__)


def test_pack_round_trip(packed: Path, tmp_path: Path) -> None:
    assert len(list(packed.glob("module.tar.gz.*"))) == 3
    assert all(path.stat().st_size <= 1000 for path in packed.glob("*.tar.gz.*"))
    target = tmp_path / "unpacked"
    assert pack.unpack(packed, target)["missing"] == []
    for path in (tmp_path / "parts").rglob("*.*"):
        assert (target / path.relative_to(tmp_path / "parts")).read_bytes() == path.read_bytes()
    assert (tmp_path / "sources/shared_ffi/_native.abi3.so").exists()
    assert [path.name for path in pack.paths(target)] == ["packages", "peers"]
    (packed / "packages.tar.gz.001").unlink()  # not needed a second time
    pack.unpack(packed, target)


def test_a_pack_that_is_damaged(packed: Path, tmp_path: Path) -> None:
    """Only the other libraries may be missing."""
    target = tmp_path / "unpacked"
    (packed / "peers.tar.gz.001").unlink()
    assert pack.unpack(packed, target)["missing"] == ["peers"]
    assert [path.name for path in pack.paths(target)] == ["packages"]
    shutil.rmtree(target)
    piece = packed / "module.tar.gz.002"
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"module\.tar\.gz\.002 is damaged"):
        pack.unpack(packed, target)
    piece.unlink()
    with pytest.raises(SystemExit, match=r"lacks module\.tar\.gz\.002"):
        pack.unpack(packed, target)
    (tmp_path / "sources/CMakeLists.txt").write_text("project(changed)")
    with pytest.raises(SystemExit, match="other sources"):
        pack.unpack(packed, target)


def test_a_pack_for_another_python(packed: Path, tmp_path: Path) -> None:
    pack.write(tmp_path / "parts", packed, "3.8")
    with pytest.raises(SystemExit, match=r"for Python 3\.8; this is 3\."):
        pack.unpack(packed, tmp_path / "unpacked")
