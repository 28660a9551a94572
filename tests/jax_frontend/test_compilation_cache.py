"""JAX's persistent compilation cache: a program that is sharded by heads is found again by another
process, and never in place of another program."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shared_ffi
from tests.support.compilation_cache import OPTIONS

SCRIPT = Path(__file__).parents[1] / "support/compilation_cache.py"


def run(folder: Path, *arguments: str, hash_seed: int = 0, fixed: bool = False) -> list[Any]:
    """The outcomes of a process. `fixed`: its addresses are those of every such process."""
    outcome = subprocess.run(
        [*(["setarch", "-R"] if fixed else []), sys.executable, SCRIPT, folder, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONHASHSEED": str(hash_seed)},
    )
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_every_option_of_every_op_is_tried() -> None:
    for op in shared_ffi.OPS:
        parameters = inspect.signature(op.check).parameters.values()
        options = {x.name for x in parameters if "ArraySpec" not in str(x.annotation)}
        assert set(OPTIONS.get(op.OP, {})) == options


@pytest.mark.parametrize("flag", ["", "without pointers"])
def test_programs_are_found_again(tmp_path: Path, flag: str) -> None:
    first = run(tmp_path, flag, hash_seed=1)
    second = run(tmp_path, flag, hash_seed=2)
    assert [x for x in first if not x["right"]] == [x for x in second if not x["right"]] == []
    # The first value of most options is the default, of which there is one program.
    keys = {(x["op"], x["option"]) for x in first if x["cache"] == ["cache_misses"]}
    assert keys == {(x["op"], x["option"]) for x in first}
    assert [x for x in second if x["cache"] != ["cache_hits"]] == []


def test_equal_addresses_do_not_make_equal_programs(tmp_path: Path) -> None:
    """Two processes whose Python objects have the same addresses compile one program each."""
    for value in ("0", "1"):
        (outcome,) = run(tmp_path, "", "paged_attention", "scale", value, fixed=True)
        assert outcome["right"] and outcome["cache"] == ["cache_misses"]


@pytest.mark.parametrize("option", ["sliding_window", "soft_cap"])
def test_an_option_that_the_program_lacks_is_noticed(tmp_path: Path, option: str) -> None:
    """A planted fault: the HLO does not hold one option."""
    outcomes = run(tmp_path, "", "paged_attention", option, "leave out")
    assert outcomes[1]["cache"] == ["cache_hits"] and not all(x["right"] for x in outcomes)
