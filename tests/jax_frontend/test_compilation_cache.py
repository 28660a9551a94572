"""JAX's persistent compilation cache: a program that is sharded by heads is found again by another
process, and never in place of another program.

As a script, `test_compilation_cache.py FOLDER FLAG [OP OPTION [VALUE | "leave out"]]`, it compiles a
program for each option of each op, sharded by heads over four devices, and prints a line of JSON for
each: whether its results are those of one device, and what the cache did.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
import shared_ffi
from shared_ffi.spec import Call
from shared_ffi.xla import lowering
from tests.cases.varlen import VarlenCase
from tests.support import calls
from tests.support.calls import BESIDE, OPTIONS, codes_beside


def run(folder: Path, *arguments: str, hash_seed: int = 0, fixed: bool = False) -> list[Any]:
    """The outcomes of a process. `fixed`: its addresses are those of every such process."""
    outcome = subprocess.run(
        [*(["setarch", "-R"] if fixed else []), sys.executable, __file__, folder, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONHASHSEED": str(hash_seed)},
    )
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_every_option_of_every_op_is_tried() -> None:
    for op in shared_ffi.OPS:
        parameters = dict(inspect.signature(op.check).parameters)
        if parameters.pop("forward", None):  # the arguments of varlen_attention
            parameters |= inspect.signature(shared_ffi.varlen_attention.check).parameters
            del parameters["return_lse"]
        arrays = ("ArraySpec", "ArraySpec | None")
        options = {name for name, x in parameters.items() if x.annotation not in arrays}
        assert set(OPTIONS.get(op.OP, {})) == options - {"op"}


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
def test_option_missing_from_program_is_noticed(tmp_path: Path, option: str) -> None:
    """A mutant: the HLO does not hold one option."""
    outcomes = run(tmp_path, "", "paged_attention", option, "leave out")
    assert outcomes[1]["cache"] == ["cache_hits"] and not all(x["right"] for x in outcomes)


def _call(op: str, names: list[str], options: dict[str, Any], *arrays: Any) -> Any:
    return calls.in_jax(op, dict(zip(names, arrays, strict=True)), options)


def _programs(op: str, option: str) -> Iterator[tuple[Any, list[np.ndarray], list[P]]]:
    """The program with each of the two values, its arrays and how they are sharded."""
    rng = np.random.default_rng(0)
    is_latent = option == "value_head_size"
    pool = rng.standard_normal((16, 16, 16) if is_latent else (16, 16, 8, 16), np.float32)
    heads, pool_spec = P(None, "model"), P() if is_latent else P(None, None, "model")
    for value in OPTIONS[op][option]:
        options = {"scale": 0.25} | BESIDE.get(option, {}) | {option: value}
        if op == "kv_cache_update":
            del options["scale"]
            new = rng.standard_normal((2, 3, 4, 16)).astype(ml_dtypes.bfloat16)
            given: dict[str, Any] = dict(zip(("key", "value"), new, strict=True))
            given |= {"kv_cache": pool.astype(new.dtype), "slot_mapping": np.int32([5, 40, -1])}
            if option != "kv_layout":
                table = rng.standard_normal((4, 16), np.float32)
                given |= {"positions": np.int32([3, 1, 0]), "cos_sin_cache": table}
            if "k_norm" in options:
                given["k_norm"] = np.tile(options.pop("k_norm"), 2)
            given |= codes_beside(op, option, pool.shape)
            sharded = {"kv_cache": pool_spec, "key": heads, "value": heads}
            specs = [sharded.get(name, P()) for name in given]
            yield partial(_call, op, [*given], options), [*given.values()], specs
            continue
        if op.startswith("varlen_"):
            case = VarlenCase(op, (8, 3), num_heads=16, num_kv_heads=4, head_size=16, padding=0)
            given = dict(zip(case.inputs()._fields, case.inputs(), strict=True))
            if op.endswith("_backward"):
                lse = np.zeros((11, 16), np.float32)
                given |= {"output": case.weights(), "lse": lse, "dout": case.weights()}
            specs = [heads if array.ndim > 1 else P() for array in given.values()]
            yield partial(_call, op, [*given], options), [*given.values()], specs
            continue
        beside = codes_beside(op, option, pool.shape)
        cache = beside.pop("kv_cache", pool)
        options |= beside
        query = rng.standard_normal((3, 16, 16), np.float32)
        metadata = [np.int32(x) for x in ([40], [[7, 2, 9]], [0, 3], [1])]
        specs = [heads, pool_spec, *[P()] * 4]
        yield partial(jax_frontend.paged_attention, **options), [query, cache, *metadata], specs


def _leave_out(option: str) -> None:
    """A mutant: the HLO does not hold this option."""
    as_text, custom_call = Call.arguments_as_text, lowering.custom_call

    def without(call: Call) -> Call:
        return replace(call, options=tuple(x for x in call.options if x[0] != option))

    def call_without(call: Any, *rest: Any, **keywords: Any) -> Any:
        attributes = tuple((n, v * 0 if n == option else v) for n, v in call.attributes)
        object.__setattr__(call, "attributes", attributes)
        return custom_call(call, *rest, **keywords)

    Call.arguments_as_text = lambda self: as_text(without(self))  # type: ignore[method-assign]
    lowering.custom_call = call_without


def main(folder: str, flag: str, op: str = "", option: str = "", value: str = "") -> None:
    """Runs the programs of one option, or all."""
    programs = [
        (one, name, program)
        for one, names in OPTIONS.items()
        for name in names
        for number, program in enumerate(_programs(one, name))
        if op in ("", one) and option in ("", name) and value in ("", "leave out", str(number))
    ]
    alone = [
        jax.tree.map(np.asarray, jax.jit(function)(*arrays))
        for _, _, (function, arrays, _) in programs
    ]
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", bool(flag))
    compilation_cache.reset_cache()
    if value == "leave out":
        _leave_out(option)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
    mesh = jax.make_mesh((4,), ("model",), (jax.sharding.AxisType.Auto,))
    for (one, name, (function, arrays, specs)), wanted in zip(programs, alone, strict=True):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        events.clear()
        results = jax.jit(function)(*placed)
        done = [x for x in events if x in ("cache_hits", "cache_misses")]
        same = jax.tree.map(lambda x, y: bool(np.array_equal(np.asarray(x), y)), results, wanted)
        outcome = {"op": one, "option": name, "cache": done, "right": all(jax.tree.leaves(same))}
        print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
