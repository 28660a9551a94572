"""The HLO of a call follows from the call alone, not from what the process called before."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from harness import hlo
from jax_frontend import _call
from tests.cases.sound_calls import F32, attention, rotated_update, training, training_backward
from tests.support import backends, calls
from tests.support.calls import BESIDE, OPTIONS, codes_beside, overload_of, split_keywords
from torch_frontend.operator import arguments


def spellings(value: Any) -> list[Any]:
    """The ways to write a value that Python takes to be equal, or that float32 does."""
    if isinstance(value, str):
        return [value, np.str_(value)]
    types = (int, float, bool, np.float32, np.float64, np.int32, np.int64, np.bool_)
    return (
        [value, -value, *(kind(value) for kind in types)]
        if value == 0
        else [spelled for kind in types if np.float32(spelled := kind(value)) == np.float32(value)]
    )


def in_jax(op: str, call: dict[str, Any]) -> str:
    arrays, options = split_keywords(call)
    lowered = jax.jit(
        lambda x: (
            calls.in_jax(op, x, options)
            if op.startswith("varlen_")
            else getattr(jax_frontend, op)(**x, **options)
        )
    ).lower(arrays)
    return lowered.as_text()


def in_torch_xla(op: str, call: dict[str, Any]) -> str:
    pytest.importorskip("torch_xla")
    arrays, options = split_keywords(call)
    given = {name: torch.from_numpy(x).to("xla") for name, x in arrays.items()}
    function = getattr(torch_frontend, op, None)
    if op.startswith("varlen_"):
        function, options = overload_of(op, options)
    results = function(**given, **options)
    if op == "kv_cache_update":
        results = given["kv_cache"]
    text = hlo.from_torch_xla([*results] if isinstance(results, tuple | list) else [results])
    return "".join(hlo.custom_calls(text, f"xla_gpu_{op}"))


def forget() -> None:
    """Empties the caches that find a call's program by the call."""
    jax.clear_caches()
    caches: list[Any] = [_call._function, arguments._checked]
    if xla := sys.modules.get("torch_frontend.operator.xla"):
        caches.append(xla._computation)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("program_of", [in_jax, in_torch_xla])
@pytest.mark.parametrize(("op", "option"), [(op, x) for op in OPTIONS for x in OPTIONS[op]])
def test_a_program_does_not_depend_on_earlier_calls(op: str, option: str, program_of: Any) -> None:
    """Each spelling of a value is the first call of the process once, and follows all others."""
    shape = (4, 2, 16) if option == "value_head_size" else (4, 2, 4, 16)
    sound = {
        "paged_attention": attention(query=np.ones((4, 4, 16), F32), kv_cache=np.ones(shape, F32)),
        "kv_cache_update": rotated_update(),
        "varlen_attention": training(),
        "varlen_attention_backward": training_backward(),
    }[op] | BESIDE.get(option, {})
    beside = codes_beside(op, option, sound["kv_cache"].shape) if "kv_cache" in sound else {}
    if program_of is in_torch_xla and not backends.are_of_torch_xla(beside):
        pytest.skip("torch_xla has no such dtype")
    sound |= beside
    values = [x for x in OPTIONS[op][option] if x is not None]
    is_float = any(isinstance(x, float) for x in values)
    values += [1, 0.1, 0.0] if is_float else [] if isinstance(values[0], bool | str) else [1]
    for value in values:
        outcomes: dict[str, set[str]] = {}
        for first in spellings(value):
            forget()
            for spelled in (first, *spellings(value)):
                try:
                    outcome = program_of(op, sound | {option: spelled})
                except (TypeError, ValueError, RuntimeError) as error:  # the last: by a schema
                    outcome = f"refused: {type(error).__name__}"
                outcomes.setdefault(f"{type(spelled)} {spelled}", set()).add(outcome)
        assert [name for name, found in outcomes.items() if len(found) != 1] == []
        texts = {x for found in outcomes.values() for x in found if not x.startswith("refused")}
        assert len(texts) == (0 if option == "soft_cap" and value == 0 else 1), (value, outcomes)
