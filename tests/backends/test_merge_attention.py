"""Merged partial results equal attention over the whole context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from harness.compare import assert_same_bits
from tests.cases.case import Case, Inputs
from tests.support import backends

I32, F32 = np.int32, np.float32

CASE = Case(
    id="parts",
    sequences=((1, 150), (5, 64), (1, 1), (30, 90), (0, 7), (2, 2)),
    num_heads=6,
    block_size=8,
    head_size=24,
    return_lse=True,
)


def parts_of(inputs: Inputs, num_parts: int) -> list[tuple[Inputs, bool]]:
    """Splits the contexts. Returns the call on each part, and whether the call is causal. Parts
    end at block boundaries. The last part has all query tokens. Some parts of short contexts are
    empty."""
    lengths, tables = inputs.context_lens.copy(), inputs.block_tables.copy()
    calls, done = [], np.zeros(len(lengths), int)  # in blocks
    for part in range(num_parts):
        context_lens, block_tables = lengths.copy(), tables.copy()
        for s, (q_len, context_len) in enumerate(CASE.sequences):
            before_queries = (context_len - q_len) // CASE.block_size
            end = before_queries * (part + 1) // num_parts
            context_lens[s] = (end - done[s]) * CASE.block_size
            if part == num_parts - 1:
                context_lens[s] = context_len - done[s] * CASE.block_size
            block_tables[s] = np.roll(tables[s], -done[s])
            done[s] = end
        call = inputs._replace(context_lens=context_lens, block_tables=block_tables)
        calls.append((call, part == num_parts - 1))
    return calls


MERGE = {
    "jax": lambda *parts: jax.tree.map(np.asarray, jax.jit(jax_frontend.merge_attention)(*parts)),
    "torch": lambda *parts: tuple(
        map(
            backends.to_numpy,
            torch_frontend.merge_attention(*([backends.to_torch(x) for x in xs] for xs in parts)),
        )
    ),
}


@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", MERGE)
def test_merged_parts_equal_the_whole_context(
    backend: str, num_parts: int, features: dict[str, Any]
) -> None:
    case = Case(**(vars(CASE) | features))
    inputs, attributes = case.inputs(), case.attributes()
    whole = backends.BACKENDS[backend]("paged_attention", *inputs, **attributes)
    parts = []
    for call, is_last in parts_of(inputs, num_parts):
        kept = {k: v for k, v in attributes.items() if is_last or k != "sinks"}
        parts.append(backends.BACKENDS[backend]("paged_attention", *call, **kept, causal=is_last))
    merged = MERGE[backend](*([part[i] for part in parts] for i in (0, 1)))
    if num_parts > 1:
        assert any(np.isneginf(lse[0 : inputs.query_start_loc[6]]).any() for _, lse in parts)
    for actual, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_merged_parts_can_be_merged_again() -> None:
    rng = np.random.default_rng(0)
    outputs, lses = rng.standard_normal((3, 4, 2, 8), F32), rng.standard_normal((3, 4, 2), F32)
    merge = MERGE["jax"]
    first = merge(outputs[:2], lses[:2])
    nested = merge([first[0], outputs[2]], [first[1], lses[2]])
    for actual, expected in zip(nested, merge(outputs, lses), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_numpy_parts() -> None:
    rng = np.random.default_rng(0)
    outputs, lses = rng.standard_normal((3, 4, 2, 8), F32), rng.standard_normal((3, 4, 2), F32)
    for merge in (jax_frontend.merge_attention, torch_frontend.merge_attention):
        whole, parts = merge(outputs, lses), merge([*outputs], [*lses])
        for actual, expected in zip(parts, whole, strict=True):
            assert_same_bits(np.asarray(actual), np.asarray(expected))


@pytest.mark.parametrize("backend", MERGE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_part_without_keys_changes_nothing(backend: str, dtype: str) -> None:
    outputs = jnp.array([[[[1.0, 2.0]]], [[[jnp.nan, jnp.inf]]]], dtype)
    output, lse = MERGE[backend](outputs, np.array([[[3.0]], [[-np.inf]]], F32))
    assert output.dtype == outputs.dtype
    assert (np.asarray(output, F32) == [[[1, 2]]]).all() and lse == 3
    output, lse = MERGE[backend](outputs, np.full((2, 1, 1), -np.inf, F32))
    assert not np.asarray(output, F32).any() and np.isneginf(lse).all()


def test_large_log_sum_exps_do_not_overflow() -> None:
    outputs = np.array([[[[2.0]]], [[[4.0]]]], F32)
    output, lse = MERGE["torch"](outputs, np.full((2, 1, 1), 1000.0, F32))
    assert output == 3 and lse == F32(1000 + np.log(2))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 8), (2, 4)), r"outputs must have shape \[num_parts, num_tokens, num_heads, head_"),
        (
            ((2, 4, 2, 8), (2, 4)),
            r"lses must have shape \[num_parts=2, num_tokens=4, num_heads=2\]",
        ),
        (((0, 4, 2, 8), (0, 4, 2)), "outputs must have shape .*of at least one part; got"),
    ],
)
def test_wrong_shapes(shapes: Any, message: str) -> None:
    for merge, ones in (
        (jax_frontend.merge_attention, jnp.ones),
        (torch_frontend.merge_attention, torch.ones),
    ):
        with pytest.raises(ValueError, match=f"^merge_attention: {message}"):
            merge(*map(ones, shapes))  # type: ignore[operator]


def test_a_wrong_dtype() -> None:
    with pytest.raises(TypeError, match="lses must have dtype float32; got bfloat16"):
        jax_frontend.merge_attention(jnp.ones((2, 4, 2, 8)), jnp.ones((2, 4, 2), jnp.bfloat16))


ONE_OUTPUT, ONE_LSE = np.ones((4, 2, 8), F32), np.ones((4, 2), F32)


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "message"),
    [
        (None, [ONE_LSE], TypeError, "outputs must be an array; got None. It is not optional"),
        ([ONE_OUTPUT], None, TypeError, "lses must be an array; got None. It is not optional"),
        (
            "ab",
            [ONE_LSE],
            TypeError,
            "outputs must have type array, or be a sequence of arrays; got str 'ab'. Pass what the "
            "parts returned",
        ),
        (
            [ONE_OUTPUT],
            3,
            TypeError,
            "lses must have type array, or be a sequence of arrays; got int 3. Pass what the parts "
            "returned",
        ),
        (
            [ONE_OUTPUT, None],
            [ONE_LSE] * 2,
            TypeError,
            "outputs must have type array, or be a sequence of arrays; got NoneType None. Pass what "
            "the parts returned",
        ),
        (
            [],
            [],
            ValueError,
            "outputs must have shape [num_parts, num_tokens, num_heads, head_size], of at least "
            "one part; got []. Pass a part at least",
        ),
        (
            [ONE_OUTPUT, ONE_OUTPUT[:3]],
            [ONE_LSE] * 2,
            ValueError,
            "outputs[1] must have shape [4, 2, 8] as outputs[0] has; got [3, 2, 8]. All parts have "
            "the same tokens and heads",
        ),
        (
            [ONE_OUTPUT] * 2,
            [ONE_LSE, ONE_LSE[:3]],
            ValueError,
            "lses[1] must have shape [4, 2] as lses[0] has; got [3, 2]. All parts have the same "
            "tokens and heads",
        ),
        (
            [ONE_OUTPUT] * 2,
            [ONE_LSE],
            ValueError,
            "lses must have shape [num_parts=2, num_tokens=4, num_heads=2]; got [1, 4, 2]. It has a number for "
            "each head of outputs, in as many parts",
        ),
        (
            [ONE_OUTPUT.astype(I32)],
            [ONE_LSE],
            TypeError,
            "outputs must have a floating-point dtype; got int32. Cast outputs to float32",
        ),
    ],
    ids=lambda x: str(x)[:20],
)
def test_wrong_parts(outputs: Any, lses: Any, error: type[Exception], message: str) -> None:
    for merge, convert in (
        (jax_frontend.merge_attention, jnp.asarray),
        (torch_frontend.merge_attention, backends.to_torch),
    ):
        given = jax.tree.map(
            lambda x: convert(x) if isinstance(x, np.ndarray) else x,  # noqa: B023
            (outputs, lses),
            is_leaf=lambda x: x is None or isinstance(x, str | np.ndarray),
        )
        with pytest.raises(error) as raised:
            merge(*given)  # type: ignore[operator]
        assert str(raised.value) == f"merge_attention: {message}"


@pytest.mark.parametrize("backend", MERGE)
def test_an_infinite_log_sum_exp_has_all_the_weight(backend: str) -> None:
    """Such is that of a part with an infinite sink."""
    outputs = np.array([[[[2.0]]], [[[4.0]]]], F32)
    output, lse = MERGE[backend](outputs, np.array([[[np.inf]], [[5.0]]], F32))
    assert output == 2 and lse == np.inf


@pytest.mark.parametrize("are_lists", [False, True])
def test_several_sizes_in_one_program(are_lists: bool) -> None:
    def parts(num_tokens: int) -> Any:
        whole = torch.randn(2, num_tokens, 3, 8), torch.randn(2, num_tokens, 3)
        return [[*x] for x in whole] if are_lists else whole

    def check(merge: Any, num_tokens: int) -> None:
        given = parts(num_tokens)
        for found, expected in zip(
            merge(*given), torch_frontend.merge_attention(*given), strict=True
        ):
            torch.testing.assert_close(found, expected)

    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        merge = torch.compile(
            torch_frontend.merge_attention, fullgraph=True, backend="aot_eager", **options
        )
        for num_tokens in (20, 21, 22, 1):
            check(merge, num_tokens)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    dim = {0: tokens} if are_lists else {1: tokens}
    shapes = ([dim, dim],) * 2 if are_lists else (dim, dim)
    program = torch.export.export(_Merge(), tuple(parts(20)), dynamic_shapes=shapes, strict=True)
    check(program.run_decompositions().module(), 33)


class _Merge(torch.nn.Module):
    def forward(self, outputs: Any, lses: Any) -> Any:
        return torch_frontend.merge_attention(outputs, lses)


def test_the_default_device_moves_nothing() -> None:
    outputs, lses = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 8)
    arrays = outputs.numpy(), lses.numpy()
    expected = torch_frontend.merge_attention(outputs, lses)
    with torch.device("meta"):
        for given in ((outputs, lses), ([*outputs], [*lses]), arrays):
            for found, right in zip(torch_frontend.merge_attention(*given), expected, strict=True):
                assert torch.equal(found, right)
