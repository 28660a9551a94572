"""A short share of the campaign, the trials that once failed, and the campaign's own machinery."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import reference
from tests.cases.case import Case
from tests.reliability.fuzz import __main__ as fuzz
from tests.reliability.fuzz import draw, run
from tests.reliability.fuzz.trials import (
    FAMILIES,
    Change,
    Trial,
    is_consistent,
    load,
    save,
)
from tests.support import selection

SEED = 1
FORMER_FAILURES = load(Path(__file__).parent / "fuzz/former_failures.json")


@pytest.fixture(scope="module")
def runner() -> run.CpuRunner:
    return run.CpuRunner(["eager", "jax"])


def run_all(runner: Any, family: str, numbers: range) -> None:
    for number in numbers:
        trial = draw.trial(SEED, family, number)
        failed = fuzz.failure_of(trial, runner)
        assert failed is None, f"seed {SEED}, {family}, number {number}: {failed[1]}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(3))
def test_a_short_campaign(family: str, part: int, runner: run.CpuRunner) -> None:
    run_all(runner, family, range(part, 40 * draw.GROUP, 8 if selection.everything else 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_campaign_in_torch_xla(family: str) -> None:
    run_all(run.CpuRunner(["torch_xla"], ["baseline"]), family, range(0, 1280, 20))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_campaign_on_the_emulated_gpu(family: str, emulated: Any) -> None:
    run_all(run.EmulatedRunner(emulated), family, range(0, 2560, 10))


@pytest.mark.parametrize("name", FORMER_FAILURES)
def test_former_failure(name: str, runner: run.CpuRunner, emulated: Any) -> None:
    for each in (runner, run.EmulatedRunner(emulated)):
        each.run(FORMER_FAILURES[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_trial_is_determined_by_its_number(family: str, tmp_path: Path) -> None:
    trials = [draw.trial(SEED, family, number) for number in range(200)]
    assert trials == [draw.trial(SEED, family, number) for number in range(200)]
    assert all(map(is_consistent, trials))
    assert all(bool(trial.changes) == (family != "valid") for trial in trials)
    for trial in trials:
        save(trial, tmp_path / "trial.json", message="none")
        loaded = load(tmp_path / "trial.json")["trial"]
        assert repr(loaded) == repr(trial)  # NaN is not equal to itself


def test_failing_trial_is_minimized() -> None:
    """With every feature off that does not matter, and sizes as small as they can be."""
    trial = next(
        trial
        for trial in (draw.trial(SEED, "valid", number) for number in range(5000))
        if isinstance(trial.case, Case)
        and trial.case.soft_cap is not None
        and sum(q_len > 0 for q_len, _ in trial.case.sequences) > 1
    )

    def broken_by(trial: Trial) -> str | None:
        case = trial.case
        assert isinstance(case, Case)
        rows = sum(q_len for q_len, _ in case.sequences)
        return "the promise" if case.soft_cap is not None and rows > 0 else None

    small = fuzz.minimized(trial, "the promise", broken_by).case
    assert isinstance(small, Case)
    (sequence,) = small.sequences
    assert sequence == (1, 1) and small.num_heads == small.head_size == small.block_size == 1
    plain = Case(small.id, ())
    for field in ("sinks", "alibi_slopes", "sliding_window", "kv_layout", "cache_dtype", "dtype"):
        assert getattr(small, field) == getattr(plain, field), field


class WrongBackend(run.EagerBackend):
    """A backend with a bug."""

    def call(
        self, trial: Trial, inputs: Any, attributes: dict[str, Any], num_threads: int | None
    ) -> run.Outcome:
        outcome = super().call(trial, inputs, attributes, num_threads)
        if trial.op == "paged_attention" and attributes.get("return_lse"):
            outcome.error = None
            outcome.results = tuple(x + x.dtype.type(1) for x in outcome.results)
        return outcome


def test_a_campaign_finds_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial is written to a file, and the command that is printed repeats it."""
    monkeypatch.setitem(run.BACKENDS, "eager", WrongBackend)
    (progress := tmp_path / "progress").write_bytes(bytes(64))
    arguments = ["--progress", str(progress), "--out", str(tmp_path), "--family", "valid"]
    arguments += ["--backend", "eager", "--trials", "640", "--seed", str(SEED)]
    arguments += ["--instruction-set", "baseline"]
    assert fuzz.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "the backend eager gives the same" in printed
    paths = [*tmp_path.glob("*.json")]
    assert len(paths) == fuzz.MOST_FAILURES
    command = next(line for line in printed.splitlines() if "repeat: " in line)
    words = command.split(f"-m {fuzz.MODULE} ")[1].split()
    assert fuzz.main(words) == 1
    monkeypatch.undo()
    assert fuzz.main(words) == 0


def test_corrupt_trials_are_legal_and_illegal() -> None:
    """Else the campaign would prove half of what it says."""
    counts = {True: 0, False: 0}
    for number in range(0, 2560, 4):
        trial = draw.trial(SEED, "corrupt", number)
        if trial.op == "paged_attention" and not trial.handler_only:
            inputs, attributes = trial.arguments()
            if reference.numbers_are_legal(trial.case.head_size, **attributes):
                legal = reference.legal_sequences(*inputs, **attributes)
                counts[legal is not None and all(legal)] += 1
    assert min(counts.values()) > 0.2 * sum(counts.values())


def test_arrays_of_corrupt_trials_are_finite() -> None:
    case = Case("finite", ((1, 5),), cache_dtype="int8", scales="per position")
    inputs, attributes = Trial(case, (Change("num_seqs", 1, ()),)).arguments()
    for array in (inputs.query, inputs.kv_cache, attributes["k_scale"], attributes["v_scale"]):
        assert (np.abs(array.astype(np.float32)) < 127).all()
    poisoned = Trial(replace(case, cache_dtype=None, scales=None)).arguments()[0]
    assert not np.isfinite(poisoned.kv_cache).all()
