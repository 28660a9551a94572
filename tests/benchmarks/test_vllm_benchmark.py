"""The benchmark of vLLM measures what it says, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import contest
from benchmarks import vllm as benchmark
from benchmarks.cpu import peers
from benchmarks.workloads import DEEPSEEK, Workload
from tests.support.model_families import model_of


def test_throughput(tmp_path: Path) -> None:
    model_of("llama", head_dim=32).save_pretrained(tmp_path)
    workload = benchmark.Workload("tiny", 2, 9, 3)
    assert [len(x["prompt_token_ids"]) for x in workload.prompts(97)] == [9, 9]
    options = {"dtype": "float32", "max_model_len": 64, "block_size": 32, "enforce_eager": True}
    row = benchmark.throughput(tmp_path, workload, 2, **options)
    layers = {"ours": "XlaGpuAttentionImpl", "vLLM": "CPUAttentionBackendImpl"}
    assert row["attention"] == layers
    assert row["answers with the same first token"] == "2 of 2"
    assert all(len(of[kind]) == 2 for of in row["seconds"].values() for kind in ("wall", "cpu"))
    assert row["ratio"].keys() == {"wall", "cpu"}


def test_call_overheads() -> None:
    found = benchmark.call_overheads(rounds=5, calls=100)
    for times in found.values():
        assert times["operator"] > times["kernel"] > 0


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_decoding_of_vllm_itself(dtype: str, block_size: int) -> None:
    lengths = ((1, 300), (1, 16), (1, 1))
    workload = Workload("", "decode", DEEPSEEK, lengths, block_size, dtype)
    operands = workload.operands("cpu")
    result = peers.vllm(workload, operands)()
    assert contest.error_of(result, workload, operands) < 1
