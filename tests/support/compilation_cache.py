"""Compiles a program for each option of each op, sharded by heads over four devices, with JAX's
persistent compilation cache.

Usage: compilation_cache.py FOLDER FLAG [OP OPTION [VALUE | "leave out"]]. Prints a line of JSON for
each program: whether its results are those of one device, and what the cache did.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
from shared_ffi import lowering
from shared_ffi.spec import Arguments

OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "paged_attention": {
        "scale": (0.125, 0.5),
        "sliding_window": (None, 5),
        "soft_cap": (None, 2.0),
        "kv_layout": (None, "bn(h2)d"),
        "causal": (True, False),
        "window_right": (None, 2),
        "max_query_len": (None, 8),
        "value_head_size": (8, 12),
        "return_lse": (False, True),
    },
    "kv_cache_update": {"kv_layout": (None, "bn(h2)d")},
}
"""Two values of each option."""

_BESIDE: dict[str, dict[str, Any]] = {"window_right": {"causal": False}}
"""What an option needs."""


def _programs(op: str, option: str) -> Iterator[tuple[Any, list[np.ndarray], list[P]]]:
    """The program with each of the two values, its arrays and how they are sharded."""
    rng = np.random.default_rng(0)
    is_latent = option == "value_head_size"
    pool = rng.standard_normal((16, 16, 16) if is_latent else (16, 16, 8, 16), np.float32)
    heads, of_pool = P(None, "model"), P() if is_latent else P(None, None, "model")
    for value in OPTIONS[op][option]:
        options = {"scale": 0.25} | _BESIDE.get(option, {}) | {option: value}
        if op == "kv_cache_update":
            new = rng.standard_normal((3, 4, 16), np.float32)
            arrays = [pool, new, new, np.int32([5, 40, -1])]
            specs = [of_pool, heads, heads, P()]
            yield partial(jax_frontend.kv_cache_update, kv_layout=value), arrays, specs
            continue
        query = rng.standard_normal((3, 16, 16), np.float32)
        metadata = [np.int32(x) for x in ([40], [[7, 2, 9]], [0, 3], [1])]
        specs = [heads, of_pool, *[P()] * 4]
        yield partial(jax_frontend.paged_attention, **options), [query, pool, *metadata], specs


def _leave_out(option: str) -> None:
    """Plants a fault: the HLO does not hold this option."""
    as_text, custom_call = Arguments.as_text, lowering.custom_call

    def without(arguments: Arguments) -> Arguments:
        others = tuple(x for x in arguments.options if x[0] != option)
        return Arguments(arguments.check, arguments.arrays, others)

    def call_without(call: Any, *rest: Any, **keywords: Any) -> Any:
        attributes = tuple((n, v * 0 if n == option else v) for n, v in call.attributes)
        object.__setattr__(call, "attributes", attributes)
        return custom_call(call, *rest, **keywords)

    Arguments.as_text = lambda self: as_text(without(self))  # type: ignore[method-assign]
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
