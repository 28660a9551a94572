"""The handlers keep memory safe, whatever a program holds: they refuse a call, or run it within its
arrays. Which calls are right is the business of the checks in Python (tests/backends/test_bad_input.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases.corrupt_calls import HandlerCall, arguments_of, corrupt_calls, sound_calls
from tests.support import selection
from tests.support.calls import call_handler
from tests.support.gpu import Gpu

F32, F16 = np.float32, np.float16
REASON = " (the program was changed, or made by another version)"
SOUND = sound_calls()
ARGUMENTS = [(name, argument) for name, call in SOUND.items() for argument in arguments_of(call)]


def on_cpu(op: Any, operands: Sequence[Any], results: Sequence[Any], **attributes: Any) -> None:
    call_handler(op.TARGET, attributes, operands, results)


@pytest.mark.parametrize("name", SOUND)
def test_sound_call(name: str) -> None:
    assert SOUND[name].make(on_cpu) is None


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_corrupt_argument(name: str, argument: str) -> None:
    for what, call in corrupt_calls(SOUND[name], argument):
        try:
            call.make(on_cpu)
        except AssertionError as error:
            raise AssertionError(what) from error


def several(call: HandlerCall, rng: np.random.Generator) -> HandlerCall:
    """A call with two or three arguments corrupt."""
    for _ in range(rng.integers(2, 4)):
        arguments = arguments_of(call)
        found = [x for _, x in corrupt_calls(call, arguments[rng.integers(len(arguments))])]
        call = found[rng.integers(len(found))] if found else call
    return call


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SOUND)
def test_several_corrupt_arguments(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(1000 if selection.everything else 100):
        several(SOUND[name], rng).make(on_cpu)


@pytest.mark.parametrize("size", [9, 16, 17, 24, 1000])
def test_corrupt_value_head_size_with_an_output_of_that_size(size: int) -> None:
    """The output is not what refuses it."""
    sound = SOUND["attention-latent"]
    output = np.zeros((*sound.results["output"].shape[:2], size), F32)
    attributes = {**sound.attributes, "value_head_size": size}
    call = replace(sound, attributes=attributes, results={"output": output})
    assert (call.make(on_cpu) is None) == (size <= 16)


STRIDES = ("block_stride", "position_stride", "head_stride", "value_offset")


@pytest.mark.parametrize(
    "name", [name for name, x in SOUND.items() if "block_size" in x.attributes]
)
def test_corrupt_sizes_of_a_cache_with_strides_of_0(name: str) -> None:
    sound = SOUND[name]
    dense = replace(sound, attributes=sound.attributes | dict.fromkeys(STRIDES, 0))
    assert dense.make(on_cpu) is None
    for argument in ("num_blocks", "block_size", "num_kv_heads"):
        for _, call in corrupt_calls(dense, argument):
            call.make(on_cpu)


def on_gpu(gpu: Gpu) -> Any:
    """Runs a call on a GPU, with the scratch that the handler asks for."""

    def run(op: Any, operands: Sequence[Any], results: Sequence[Any], **attributes: Any) -> None:
        scratch = [np.empty(0, np.uint8)] if "attention" in op.OP else []
        try:
            gpu.run(op, operands, [*results, *scratch], 0, **attributes)
        except ValueError as error:
            wanted = re.search(r"result scratch must be uint8 \[(\d+)\]", str(error))
            if wanted is None or int(wanted[1]) > 2**24:
                raise
            gpu.run(op, operands, [*results, np.empty(int(wanted[1]), np.uint8)], 0, **attributes)

    return run


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_corrupt_argument_on_cuda(gpu: Gpu, name: str, argument: str) -> None:
    run = on_gpu(gpu)
    calls = [call for _, call in corrupt_calls(SOUND[name], argument)]
    for call in calls if selection.everything else calls[len(argument) % 3 :: 3]:
        call.make(run)


def changed(name: str, **attributes: Any) -> HandlerCall:
    call = SOUND[name]
    merged = {**call.attributes, **attributes}
    return replace(call, attributes={k: v for k, v in merged.items() if v is not None})


def with_operand(name: str, argument: str, array: np.ndarray) -> HandlerCall:
    return replace(SOUND[name], operands={**SOUND[name].operands, argument: array})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            with_operand("attention-plain", "block_tables", np.zeros((4, 16), F32)),
            "operand block_tables must be int32 [4, any]; got float32 [4, 16]",
        ),
        (
            with_operand("attention-plain", "num_seqs", np.zeros(2, np.int32)),
            "operand num_seqs must be int32 [] or [1]; got int32 [2]",
        ),
        (
            with_operand("attention-plain", "kv_cache", np.zeros((11, 4, 4, 16), F32)),
            "operand kv_cache must be float16 or float8_e4m3fn or float8_e5m2 or int8 or "
            "uint8 or float4_e2m1fn [any, any, any, 16]; got float32 [11, 4, 4, 16]",
        ),
        (
            with_operand("attention-plain", "query", np.zeros((7, 3, 16), F16)),
            "operand kv_cache must hold",
        ),
        (
            with_operand("attention-latent", "query", np.zeros((7, 4, 577), F32)),
            "operand query must have a head_size from 1 to 576; got float32 [7, 4, 577]",
        ),
        (changed("attention-plain", scale=None), "attribute scale must be float32; it is missing"),
        (
            changed("attention-of-8-bits", window_right=1.5),
            "attribute window_right must be int64; it has another type",
        ),
        (
            changed("attention-plain", sliding_window=-3),
            "attribute sliding_window must be at least 0; got -3",
        ),
        (
            changed("attention-latent", value_head_size=17),
            "attribute value_head_size must be from 1 to head_size=16; got 17",
        ),
        (
            changed("attention-plain", kv_layout=1),
            "the call has 4 attributes, of which 3 are known",
        ),
        (changed("attention-plain", sinks=6), "operand sinks is missing; its number is 6"),
        (
            changed("update-of-8-bits", head_stride=10**6),
            "operand kv_cache must hold num_blocks=",
        ),
        (
            replace(SOUND["update-plain"], in_place=frozenset()),
            "result kv_cache must alias its operand (output_to_operand_aliasing)",
        ),
        (
            replace(SOUND["attention-plain"], results={"output": np.zeros((7, 4, 17), F16)}),
            "result output must be float16 [7, 4, 16]; got float16 [7, 4, 17]",
        ),
        (
            replace(SOUND["add"], results={"sum": np.zeros((3, 2), F32)}),
            "result sum must be float32 [2, 3]; got float32 [3, 2]",
        ),
        (
            replace(SOUND["add"], results=SOUND["add"].results | {"more": np.zeros(3, F32)}),
            "the call must have 1 results; got 2",
        ),
        (
            replace(SOUND["add"], operands=SOUND["add"].operands | {"c": np.zeros(3, F32)}),
            "the call must have 2 operands; got 3",
        ),
    ],
    ids=lambda x: x[:60] if isinstance(x, str) else x.op,
)
def test_message(call: HandlerCall, message: str) -> None:
    found = call.make(on_cpu)
    assert found is not None
    assert found.startswith(f"{call.op}: {message}")
    assert found.endswith(REASON)
