"""The replay example: its scheduler, its traces, its report, and its results on every backend."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.replay.__main__ import main
from harness.steps import TokenValues
from harness.workload import MODELS, generate_trace, read_trace
from shared_ffi.check_batch import BatchHistory, check_batch
from tests.support import scripts
from xla_paged_attention.engine.scheduler import Arrival, Limits, Scheduler

SMALL = Limits(block_size=4, num_blocks=24, max_seqs=5, max_blocks_per_seq=16, token_budget=20)


def arrivals(count: int, seed: int = 0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    return [Arrival(i * 0.5, *map(int, rng.integers(1, 30, 2))) for i in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_the_scheduler_gives_each_token_its_own_slot(seed: int) -> None:
    scheduler = Scheduler(arrivals(40, seed), SMALL)
    written: dict[int, tuple[int, int]] = {}  # by slot: the token that it holds
    clock, ended, history = 0.0, [], BatchHistory()
    while not scheduler.is_done:
        step = scheduler.next_step(clock)
        clock += 0.1
        if step is None:
            continue
        held = [block for request in scheduler.running for block in request.blocks]
        assert len(set(held)) == len(held) == scheduler.used_blocks
        batch = step.batch([[chunk.request] * chunk.num_tokens for chunk in step.chunks])
        assert len(batch.tokens) in SMALL.buckets
        assert step.num_tokens <= len(batch.tokens)
        assert (batch.slot_mapping[step.num_tokens :] == -1).all()
        names = [chunk.request for chunk in step.chunks]
        sizes = {"block_size": SMALL.block_size, "num_blocks": SMALL.num_blocks}
        check_batch(*batch[2:], **sizes, history=history, seq_ids=names)

        num_seqs = int(batch.num_seqs[0])
        assert num_seqs <= SMALL.max_seqs
        assert batch.query_start_loc[num_seqs] == step.num_tokens
        for t in range(step.num_tokens):
            written[int(batch.slot_mapping[t])] = int(batch.tokens[t]), int(batch.positions[t])
        for s in range(num_seqs):
            first, last = batch.query_start_loc[s], batch.query_start_loc[s + 1] - 1
            number, length = batch.tokens[first], batch.context_lens[s]
            assert batch.positions[last] == length - 1
            for position in range(length):  # every position that it attends to holds its own token
                block = batch.block_tables[s, position // SMALL.block_size]
                slot = int(block) * SMALL.block_size + position % SMALL.block_size
                assert written[slot] == (number, position)
        ended += scheduler.complete()
    assert scheduler.used_blocks == 0
    assert scheduler.preemptions > 0
    assert sorted(request.number for request in ended) == list(range(40))
    assert scheduler.generated_tokens == sum(a.generated_tokens for a in arrivals(40, seed))


def test_nobody_waits_for_one_that_ends_at_once() -> None:
    """A request for one token ends in the step that computes its prompt."""
    limits = replace(SMALL, num_blocks=64, max_seqs=8, token_budget=64)
    scheduler = Scheduler([], limits)
    for i in range(16):
        scheduler.add(Arrival(0, 12, 1), i - 1 if i else None, 11)
    steps = 0
    while not scheduler.is_done:
        step = scheduler.next_step(0.0)
        assert step is not None
        scheduler.complete()
        steps += 1
    assert steps == 3  # 192 tokens


def test_reserved_blocks_make_a_request_wait_that_would_be_preempted() -> None:
    scheduler = Scheduler([], replace(SMALL, reserve=True))
    assert [scheduler.add(arrival) for arrival in arrivals(40)] == [*range(40)]
    waited = 0
    while not scheduler.is_done:
        step = scheduler.next_step(0.0)
        assert step is not None
        for request in scheduler.running:
            assert len(request.blocks) == -(-request.total_tokens // SMALL.block_size)
        waited += bool(scheduler.waiting) and len(scheduler.running) < SMALL.max_seqs
        scheduler.complete()
    assert scheduler.preemptions == scheduler.used_blocks == 0 < waited
    assert scheduler.finished == 40


def test_a_request_longer_than_a_sequence_may_be_is_cut_and_counted() -> None:
    scheduler = Scheduler([Arrival(0, 1000, 5), Arrival(0, 3, 1000), Arrival(0, 3, 5)], SMALL)
    total_tokens = {}
    while not scheduler.is_done:
        scheduler.next_step(0)
        total_tokens |= {x.number: x.total_tokens for x in scheduler.complete()}
    assert scheduler.truncated == 2
    assert total_tokens == {0: 64, 1: 64, 2: 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_blocks_per_seq": 25}, "max_blocks_per_seq must be at most num_blocks=24; got 25. "),
        ({"token_budget": 4}, "^Limits: token_budget must be at least max_seqs=5; got 4. "),
        ({"max_seqs": 0}, "^Limits: max_seqs must be at least 1; got 0"),
        ({"block_size": 0}, "^Limits: block_size must be at least 1; got 0"),
        ({"num_blocks": -1}, "^Limits: num_blocks must be at least 1; got -1"),
        ({"max_blocks_per_seq": 0}, "^Limits: max_blocks_per_seq must be at least 1; got 0"),
        ({"token_budget": 20.5}, "^Limits: token_budget must have type int; got float"),
    ],
)
def test_impossible_limits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Limits(
            **(
                {"block_size": 4, "num_blocks": 24, "max_seqs": 5, "max_blocks_per_seq": 16}
                | changes
            )
        )


def test_reading_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert list(read_trace(path)) == [Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109)]


def test_the_generated_trace_has_the_shape_of_the_recorded_one() -> None:
    generated = list(generate_trace(5000))
    assert generated == list(generate_trace(5000))
    prompts = np.array([arrival.prompt_tokens for arrival in generated])
    assert 900 < np.median(prompts) < 1150
    assert prompts.max() > 8000
    assert 110 < np.median([arrival.generated_tokens for arrival in generated]) < 150
    assert 5 < 5000 / generated[-1].seconds < 6


def test_a_token_has_the_same_values_whenever_it_is_computed() -> None:
    values = TokenValues(MODELS["tiny"], "bfloat16")
    scheduler = Scheduler(arrivals(40), SMALL)
    seen: dict[tuple[int, int], bytes] = {}
    times: Counter[tuple[int, int]] = Counter()
    while not scheduler.is_done:
        step = scheduler.next_step(100)
        assert step is not None
        key = values.operands(step).key
        tokens = [
            (chunk.request, p) for chunk in step.chunks for p in range(chunk.start, chunk.end)
        ]
        for token, row in zip(tokens, key, strict=False):
            assert seen.setdefault(token, row.tobytes()) == row.tobytes()
            times[token] += 1
        scheduler.complete()
    assert max(times.values()) > 1, "no token was computed anew"


def run(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert main([*options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_backend_on_a_pool_that_is_too_small(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i:02}.0000000,{30 + i},100" for i in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    result = run(
        capsys,
        *("--trace", str(path), "--backend", "all", "--steps", "60", "--dtype", "bfloat16"),
        *("--blocks", "24", "--max-len", "160", "--token-budget", "64", "--step-seconds", "2"),
        *("--out", str(tmp_path)),
    )
    assert len(result["steps"]) == 60
    assert result["preemptions"] > 0
    assert result["same_bits"]
    assert result["same_custom_calls"]
    assert set(result["backends"]) == {"JAX", "torch_xla", "openxla", "torch"}
    for backend in result["backends"].values():
        assert backend["max_error"] < 0.02
        assert backend["compiles"] <= result["compile_bound"] == 2
        assert backend["tokens_per_second"] > 0
    assert len(result["backends"]["torch_xla"]["custom_calls"]) == 2
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "identical" in page
    assert 'src="' not in page  # needs no other file, and no network
    assert "<link" not in page


def test_two_processes_share_the_kv_heads() -> None:
    script = "import sys; from examples.replay.__main__ import main; sys.exit(main(sys.argv[1:]))"
    options = ["--backend", "mesh", "--model", "llama-3-8b", "--steps", "6", "--max-seqs", "4"]
    options += ["--max-len", "128", "--token-budget", "32", "--blocks", "64", "--json"]
    shared = [*options, "--distributed", scripts.free_address(), "2"]
    commands = [[*shared, "0"], [*shared, "1"]]
    first, second = scripts.run_together(script, commands, JAX_NUM_CPU_DEVICES="4")
    assert second == ""  # the first process speaks for both
    result = json.loads(first)
    assert result["same_bits"]
    assert 1 <= result["backends"]["JAX-mesh"]["compiles"] <= result["compile_bound"]


def test_heads_that_devices_cannot_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "jax-mesh"]) == 2
    assert "the 8 devices of JAX must share the model's 2 kv heads" in capsys.readouterr().out


ALWAYS = {"gemma-2-9b"}  # a window, a soft cap and heads of 256; the cases of kernels have the rest


@pytest.mark.parametrize(
    "model", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.nightly) for x in MODELS]
)
def test_models(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-seqs", "2", "--max-len", "64", "--token-budget", "8", "--blocks", "16")
    result = run(capsys, "--backend", "jax", "--model", model, "--steps", "4", *options)
    assert result["backends"]["JAX"]["max_error"] < 1e-5
