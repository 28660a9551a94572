"""The tests that the kernels of the CPU and of GPUs share. The module of each kind imports them, and
defines the fixtures `kernels`, the plain ones, and `each_kernel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from harness import reference
from harness.compare import assert_same_bits, has_products_of_16_bits
from shared_ffi import kv_cache_update
from tests.cases import quantized
from tests.cases.all import LONG_CASES, SAMPLED_CASES, SHORT_CASES, UPDATE_CASES
from tests.cases.case import INT8_NVFP4, NVFP4, Case, without_range
from tests.cases.softmax import EXTREME_NUMBERS, extreme_call
from tests.cases.updates import UpdateCase
from tests.support.calls import checked_call, numbers, rows_in, with_wider_rows
from tests.support.gpu import Cpu, Gpu, Kernels, attend

F32, I32 = np.float32, np.int32


def one_sequence(operands: Any, s: int) -> list[Any]:
    """The operands of a call of one sequence of a batch."""
    query, kv_cache, context_lens, tables, starts, _ = operands
    rows = query[starts[s] : starts[s + 1]]
    metadata = [context_lens[s : s + 1], tables[s : s + 1], np.array([0, len(rows)], I32)]
    return [rows, kv_cache, *metadata, np.array(1, I32)]


@pytest.mark.pairwise
@pytest.mark.parametrize("case", quantized.INT4_CASES, ids=lambda case: case.id)
def test_int4_has_the_bits_of_int8(case: Case, kernels: Kernels) -> None:
    if isinstance(kernels, Gpu) and case.dtype != "float32" and case.head_size <= 128:
        pytest.skip("int8 has kernels of its own on GPUs")
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(kernels, inputs, **attributes)
    inputs, attributes = quantized.in_int8(inputs, attributes)
    assert_same_bits(attend(kernels, inputs, **attributes), result)


def is_on_tensor_cores(case: Case) -> bool:
    """Whether tensor cores multiply the numbers and scales of a case on GPUs."""
    sizes = case.head_size, case.own_value_head_size or case.value_head_size or 16
    is_small = case.dtype != "float32" and all(size % 16 == 0 for size in sizes)
    return is_small and has_products_of_16_bits(case.inputs(), case.attributes())


@pytest.mark.pairwise(each="case")
@pytest.mark.parametrize("case", quantized.GROUP_CASES, ids=lambda case: case.id)
def test_scales_of_groups_have_the_bits_of_their_products(case: Case, kernels: Kernels) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    dtype: Any = F32
    if isinstance(kernels, Gpu) and is_on_tensor_cores(case):
        if case.value_cache_dtype is not None or case.dtype != "bfloat16" or case.head_size > 128:
            pytest.skip("not one cache of 16 bits has the products, or no test has the kernel")
        for name in ("k_global", "v_global"):  # which are multiplied behind the products
            attributes.pop(name, None)
        dtype = inputs.query.dtype
    result = attend(kernels, inputs, **attributes)
    inputs, attributes = quantized.with_products(inputs, attributes, dtype)
    expected = attend(kernels, inputs, **attributes)
    if not attributes.get("return_lse"):
        result, expected = (result,), (expected,)
    for x, of_products in zip(result, expected, strict=True):
        rounded = of_products.astype(x.dtype)
        for array in (x, rounded):
            array[np.isnan(array)] = np.nan  # numpy's and a GPU's differ in their bits
        assert_same_bits(x, rounded)


def updated_by(kernels: Kernels, case: UpdateCase, more: int = 0) -> Any:
    """What kv_cache_update writes: an array, or a tuple of them. Its rows lie in wider ones."""
    call, arrays = checked_call("kv_cache_update", case.inputs(), case.attributes())
    query = dict(call.attributes).get("query")
    arrays, row_attributes = with_wider_rows("kv_cache_update", arrays, more, query)
    arrays = [kernels.copy(x) for x in arrays]
    updated = [arrays[operand] for operand, _ in call.aliases]
    kernels.run(kv_cache_update, arrays, updated, 0, **numbers(call) | row_attributes)
    updated = [rows_in(x, spec.shape) for x, spec in zip(updated, call.results, strict=True)]
    return updated[0] if len(updated) == 1 else tuple(updated)


@pytest.mark.pairwise(each="case")
@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_kv_cache_update(case: UpdateCase, kernels: Kernels) -> None:
    expected = reference.kv_cache_update(*case.inputs(), **case.attributes())
    assert_same_bits(updated_by(kernels, case), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("more", [3, 64], ids="{}-more".format)  # only 64 keep rows aligned
@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_kv_cache_update_from_wider_rows(case: UpdateCase, more: int, kernels: Kernels) -> None:
    expected = reference.kv_cache_update(*case.inputs(), **case.attributes())
    assert_same_bits(updated_by(kernels, case, more), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("more", [3, 64], ids="{}-more".format)
@pytest.mark.parametrize(
    "case", [*SHORT_CASES[:1], *SAMPLED_CASES, *LONG_CASES[:1]], ids=lambda case: case.id
)
def test_queries_in_wider_rows(case: Case, more: int, each_kernel: Kernels) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(each_kernel, inputs, more_columns=more, **attributes)
    each_kernel.assert_close(result, inputs, attributes)
    if isinstance(each_kernel, Cpu):  # on GPUs, other kernels may compute what is not aligned
        assert_same_bits(result, attend(each_kernel, inputs, **attributes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXTREME_NUMBERS)
def test_extreme_numbers(name: str, dtype: str, kernels: Kernels) -> None:
    inputs, attributes = extreme_call(name, dtype)
    output, lse = attend(kernels, inputs, **attributes)
    if name == "sinks-inf":
        assert (lse[:-3, 0] == np.inf).all() and not output[:, 0].any()
        with_nan = inputs._replace(query=inputs.query.copy())
        with_nan.query[1] = np.nan
        found = attend(kernels, with_nan, **attributes)
        assert all(np.isnan(x[1].astype(F32)).all() for x in found)
        attributes["sinks"] = np.where(attributes["sinks"] == np.inf, 3e38, -1).astype(F32)
        output, lse = attend(kernels, inputs, **attributes)
    if name == "alibi_slopes-inf":
        attributes["alibi_slopes"] = np.minimum(attributes["alibi_slopes"], F32(3e38))
        assert_same_bits(attend(kernels, inputs, **attributes), (output, lse))
    if name == "alibi_slopes--3e+38":  # float32 has no number as large as their log-sum-exp
        kernels.assert_close(output, inputs, attributes | {"return_lse": False})
    else:
        kernels.assert_close((output, lse), inputs, attributes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("scales", "scale"),
    [
        *(("float16", x) for x in (np.nan, np.inf, 0.0)),
        *(("float8_e4m3fn", x) for x in (np.nan, 0.0)),
        ("float8_e8m0fnu", np.nan),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_faulty_scales_of_groups(
    name: str, scales: str, scale: float, dtype: str, kernels: Kernels
) -> None:
    """They multiply as any number does, and reach no row that does not attend to them."""
    case = Case(
        id=f"faulty-{name}-{scales}-{scale}",
        sequences=((1, 70), (9, 40), (1, 5)),
        head_size=64,
        dtype=dtype,
        cache_dtype="e2m1",
        groups=quantized.Groups(16, scales),
    )
    inputs, attributes = case.inputs(), case.attributes()
    for sequence, position in ((0, 33), (1, 36)):  # of the second, some tokens come before it
        block, offset = divmod(position, case.block_size)
        attributes[name][inputs.block_tables[sequence, block], offset, 0, 2] = scale
    result = attend(kernels, inputs, **attributes)
    assert np.isfinite(result.astype(F32)).all() == (scale == 0)
    with np.errstate(invalid="ignore"):  # infinity times 0
        kernels.assert_close(result, inputs, attributes)


# Query tokens and context of each sequence: decode in one split, decode in several splits, a
# speculative step, a chunk of a prompt, a whole prompt.
BATCH = [(1, 70), (1, 700), (3, 600), (40, 330), (90, 90)]


def batch_case(dtype: str, sequences: Sequence[tuple[int, int]], **of_cache: Any) -> Case:
    return Case(
        id=f"batch-{dtype}",
        sequences=tuple(sequences),
        num_heads=6,
        num_kv_heads=2,
        head_size=32 if of_cache else 24,
        block_size=16,
        dtype=dtype,
        **of_cache,
    )


def batch(
    dtype: str, sequences: Sequence[tuple[int, int]] = BATCH, **of_cache: Any
) -> tuple[list[Any], np.ndarray]:
    case = batch_case(dtype, sequences, **of_cache)
    return list(case.inputs()), np.cumsum([0, *(q_len for q_len, _ in sequences)])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "of_cache",
    [{}, {"cache_dtype": "float8_e4m3fn"}, {"cache_dtype": "int8"}, NVFP4, INT8_NVFP4],
    ids=["16-bit", "float8", "int8", "nvfp4", "int8-nvfp4"],
)
@pytest.mark.parametrize("attributes", [{}, {"sliding_window": 300}, {"soft_cap": 20.0}], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(
    attributes: dict[str, Any], of_cache: dict[str, Any], dtype: str, each_kernel: Kernels
) -> None:
    """The first sequence fills a query tile of the decode kernel, which the others leave as it was."""
    sequences = [(5, 90), *BATCH]
    attributes = batch_case(dtype, sequences, **of_cache).attributes() | attributes | {"scale": 0.2}
    inputs, starts = batch(dtype, sequences, **of_cache)
    query, kv_cache, context_lens, tables, *_ = inputs
    together = attend(each_kernel, [*inputs[:5], np.array(len(sequences), I32)], **attributes)
    for order in ([5, 2, 4, 0, 1, 3], [3, 2], *([s] for s in range(len(sequences)))):
        for padding in (0, 5):
            rows = np.concatenate([query[starts[s] : starts[s + 1]] for s in order])
            rows = np.concatenate([rows, np.full((padding, *rows.shape[1:]), np.nan, rows.dtype)])
            begins = np.cumsum([0, *(sequences[s][0] for s in order), *[0] * padding])
            operands = [
                rows,
                kv_cache,
                np.concatenate([context_lens[order], np.full(padding, 99, I32)]),
                np.pad(tables[order], ((0, padding), (0, padding)), constant_values=2**30),
                begins.astype(I32),
                np.array(len(order), I32),
            ]
            seed = len(order) + padding
            result = attend(each_kernel, operands, seed=seed, **attributes)
            for place, s in enumerate(order):
                own = result[begins[place] : begins[place + 1]]
                assert_same_bits(own, together[starts[s] : starts[s + 1]])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4])  # on the CPU, K and V in place, or packed
def test_chain_tree_has_the_bits_of_causal_attention(
    group: int, dtype: str, each_kernel: Kernels
) -> None:
    case = Case(
        id="chain",
        sequences=((7, 150), (64, 700), (3, 3), (80, 90)),
        num_heads=2 * group,
        head_size=40,
        dtype=dtype,
        sliding_window=90,
        tree="chain",
        return_lse=True,
    )
    inputs, attributes = case.inputs(), case.attributes()
    trees = attributes.pop("tree_mask")
    causal = attend(each_kernel, inputs, **attributes)
    assert trees.any()
    for tree_mask in (trees, np.zeros_like(trees)):
        result = attend(each_kernel, inputs, tree_mask=tree_mask, seed=2, **attributes)
        assert_same_bits(result, causal)

    # NaN in what a row does not attend to changes none of its bits.
    with_nan = dataclasses.replace(case, nan_in_last_position=True).inputs()
    spoilt = np.isnan(attend(each_kernel, with_nan, **attributes)[1])
    assert 0 < spoilt.sum() < spoilt.size / 2
    results = attend(each_kernel, with_nan, tree_mask=trees, **attributes)
    for result, clean in zip(results, causal, strict=True):
        assert_same_bits(result[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4])
def test_a_token_without_a_range_keeps_its_bits(
    group: int, dtype: str, each_kernel: Kernels
) -> None:
    """With one query head for each kv head, short queries are the decode kernel's."""
    case = Case(
        id="ranges",
        sequences=((2, 1500), (4, 700), (60, 200), (70, 700), (3, 3), (80, 90)),
        num_heads=2 * group,
        head_size=40,
        dtype=dtype,
        sliding_window=90,
        ranges="any",
    )
    inputs, attributes = case.inputs(), case.attributes()
    ranges, is_empty = attributes.pop("bidirectional_ranges"), without_range(case)
    causal = attend(each_kernel, inputs, **attributes)
    result = attend(each_kernel, inputs, bidirectional_ranges=ranges, seed=2, **attributes)
    assert_same_bits(result[is_empty], causal[is_empty])
    assert (result[~is_empty] != causal[~is_empty]).any(axis=(1, 2)).mean() > 0.5
