"""Tensors as engines have them: rows of a fused QKV projection, and a result of the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from harness.compare import assert_same_bits
from shared_ffi import kv_cache_update, paged_attention
from tests.cases.all import SHORT_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.sound_calls import attention, split, update
from tests.support import backends
from tests.support.calls import (
    call_handler,
    observed_calls,
    overload_of,
    split_keywords,
)
from tests.support.models import tensors

OPS = torch.ops.xla_gpu
Calls = list[tuple[str, list[int]]]


def fused(tensor: torch.Tensor, before: int = 3, after: int = 5) -> torch.Tensor:
    """The same numbers as rows between columns that hold NaN, or 99 where a dtype has none."""
    num_tokens, num_heads, head_size = tensor.shape
    other = torch.nan if tensor.is_floating_point() else 99
    width = before + num_heads * head_size + after
    columns = torch.full((num_tokens, width), other).to(tensor.dtype)
    rows = columns[:, before : before + num_heads * head_size].view(tensor.shape)
    rows.copy_(tensor)
    return rows


def to_torch(attributes: dict[str, Any]) -> dict[str, Any]:
    arrays, options = split_keywords(attributes)
    return options | {name: backends.to_torch(x) for name, x in arrays.items()}


@pytest.fixture
def calls() -> Iterator[list[tuple[str, list[int]]]]:
    with observed_calls() as made:
        yield made


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.id)
def test_attention_of_fused_rows(case: Case, calls: Calls) -> None:
    overload, keywords = overload_of("paged_attention", to_torch(case.attributes()))
    query, *rest = map(backends.to_torch, case.inputs())
    expected = overload(query, *rest, **keywords)
    rows = fused(query)
    result = overload(rows, *rest, **keywords)
    assert rows.data_ptr() in calls[-1][1] or rows.is_contiguous()
    for a, b in zip(result, expected, strict=True):
        assert_same_bits(backends.to_numpy(a), backends.to_numpy(b))


@pytest.mark.pairwise
@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_update_from_fused_rows(case: Any, calls: Calls) -> None:
    cache, key, value, slots = map(backends.to_torch, case.inputs())
    keywords = to_torch(case.attributes())
    names = [x for x in kv_cache_update.WRITTEN if x in keywords]
    copy = {k: x.clone() if k in names else x for k, x in keywords.items()}
    expected = cache.clone()
    OPS.kv_cache_update(expected, key, value, slots, **copy)
    rows = [fused(key), fused(value, 0, 1)]
    if "query" in keywords:
        keywords["query"] = fused(keywords["query"], 2, 3)
        rows.append(keywords["query"])
    OPS.kv_cache_update(cache, *rows[:2], slots, **keywords)
    assert all(x.data_ptr() in calls[-1][1] for x in rows if not x.is_contiguous())
    assert_same_bits(backends.to_numpy(cache), backends.to_numpy(expected))
    for name in names:
        assert_same_bits(*map(backends.to_numpy, (keywords[name], copy[name])))


@pytest.mark.parametrize(
    "query",
    [
        torch.randn(4, 8, 4).transpose(1, 2),
        torch.randn(4, 4, 2, 8)[:, :, 0],
        torch.randn(1, 4, 8).expand(4, 4, 8),
    ],
    ids=["elements-apart", "heads-apart", "repeated"],
)
def test_other_strides_are_copied(query: torch.Tensor, calls: Calls) -> None:
    _, *rest = tensors(attention())
    expected = OPS.paged_attention(query.contiguous(), *rest, 0.5)
    calls.clear()
    assert torch.equal(OPS.paged_attention(query, *rest, 0.5), expected)
    assert query.data_ptr() not in calls[-1][1]


@pytest.mark.parametrize(
    ("shape", "heads"), [((4, 31), 4), ((4, 32), 5), ((4, 32), -1), ((4, 32), 2**62)], ids=str
)
def test_short_rows_are_refused(shape: tuple[int, int], heads: int) -> None:
    operands, attributes = split(attention(sliding_window=0, soft_cap=0.0))
    query, *rest = operands
    attributes |= {"row_heads": heads, "row_head_size": 8}
    rule = "(operand query|attribute row_heads) must"
    with pytest.raises(ValueError, match=f"^paged_attention: {rule}"):
        target, result = paged_attention.TARGET, np.empty_like(query)
        call_handler(target, attributes, [np.zeros(shape, np.float32), *rest], [result])

    operands, attributes = split(update())
    cache, key, _, slots = operands
    wide = np.zeros((len(key), key[0].size - 1), key.dtype)
    with pytest.raises(ValueError, match="^kv_cache_update: operand value must hold num_heads=2"):
        rows = {"row_heads": 2, "row_head_size": 8}
        call_handler(kv_cache_update.TARGET, rows, [cache, key, wide, slots], [cache])


def test_keys_and_values_of_different_sizes() -> None:
    cache, key, _, slots = split(update())[0]
    rows = {"row_heads": 1, "row_head_size": 8}
    wide = np.zeros((len(key), 64), key.dtype)
    with pytest.raises(ValueError, match="^kv_cache_update: operand value must have the shape of"):
        call_handler(kv_cache_update.TARGET, rows, [cache, key, wide, slots], [cache])


def test_out_on_cuda(cuda: Any) -> None:
    operands = tensors(attention())
    expected = OPS.paged_attention.default.redispatch(cuda, *operands, 0.5)
    out = torch.full_like(expected, torch.nan)
    OPS._paged_attention_out.default.redispatch(cuda, *operands, 0.5, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "openxla"])
def test_out_in_a_compiled_function(backend: str) -> None:
    device = "cpu"
    if backend == "openxla":
        pytest.importorskip("torch_xla")  # which installs the backend
        device = "xla"
    operands = [x.to(device) for x in tensors(attention())]
    expected = OPS.paged_attention(*operands, 0.5)

    @torch.compile(backend=backend, fullgraph=True)
    def step(out: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        OPS.paged_attention(*operands, 0.5, out=out)
        return out * 2

    out = torch.full_like(expected, torch.nan)
    with torch.no_grad():
        result = step(out, *operands)
    torch.testing.assert_close(result.cpu(), expected.cpu() * 2)
    torch.testing.assert_close(out.cpu(), expected.cpu())


def test_out_on_xla() -> None:
    pytest.importorskip("torch_xla")
    expected = OPS.paged_attention(*tensors(attention()), 0.5)
    operands = [x.to("xla") for x in tensors(attention())]
    out = torch.full_like(operands[0], torch.nan)
    assert OPS.paged_attention(*operands, 0.5, out=out) is out
    torch.testing.assert_close(out.cpu(), expected)
    for wrong, rule in (
        (torch.zeros(1, *out.shape, device="xla"), "out must have shape"),
        (out.half(), "out must have dtype float32; got float16"),
        (out.cpu(), "all tensors must be on one device; got out on cpu"),
        (out.to("meta"), "all tensors must be on one device; got out on meta"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^paged_attention: {rule}"):
            OPS.paged_attention(*operands, 0.5, out=wrong)


def refused_outs() -> dict[str, tuple[torch.Tensor, str]]:
    query = tensors(attention())[0]
    wide = torch.zeros(len(query), 2, *query.shape[1:])
    return {
        "shape": (torch.zeros(3, 4, 8), r"have shape \[4, 4, 8\]; got \[3, 4, 8\]"),
        "dtype": (query.half(), "have dtype float32; got float16"),
        "strides": (wide[:, 0], "be contiguous; got strides"),
        "negated": (torch.randn(4, 4, 8, dtype=torch.cfloat).conj().imag, "not be a lazily neg"),
    }


@pytest.mark.parametrize("name", refused_outs())
def test_refused_out(name: str) -> None:
    out, rule = refused_outs()[name]
    with pytest.raises((ValueError, TypeError), match=f"^paged_attention: out must {rule}"):
        OPS.paged_attention(*tensors(attention()), 0.5, out=out)


def test_out_that_overlaps_an_operand() -> None:
    query, cache, *rest = tensors(attention())
    size = query.numel()
    rule = "^paged_attention: out must share no memory with an argument; got memory of"
    memory = torch.zeros(2 * size)
    for first in (0, 1, size - 1):
        out = memory[first : first + size].view(query.shape)
        with pytest.raises(ValueError, match=f"{rule} query"):
            OPS.paged_attention(memory[:size].view(query.shape), cache, *rest, 0.5, out=out)
    with pytest.raises(ValueError, match=f"{rule} kv_cache"):
        OPS.paged_attention(query, cache, *rest, 0.5, out=cache.flatten()[:size].view(query.shape))


def test_out_adjacent_to_query_rows() -> None:
    query, *rest = tensors(attention())
    size, width = query.numel(), query[0].numel()
    memory = torch.zeros(3 * size)
    columns = memory[: 2 * size].view(len(query), 2 * width)
    out = memory[2 * size :].view(query.shape)
    rows = columns[:, width:].view(query.shape)  # ends where `out` begins
    rows.copy_(query)
    assert torch.equal(
        OPS.paged_attention(rows, *rest, 0.5, out=out), OPS.paged_attention(query, *rest, 0.5)
    )


def test_out_follows_the_rules_of_autograd() -> None:
    operands = tensors(attention())
    out = torch.zeros_like(operands[0])
    OPS.paged_attention(*operands, 0.5, out=out)
    assert out._version == 1
    with pytest.raises(NotImplementedError, match="^paged_attention: inference only"):
        OPS.paged_attention(*operands, 0.5, out=torch.zeros_like(out).requires_grad_())
    with torch.inference_mode():
        out = torch.zeros_like(out)
    with pytest.raises(RuntimeError, match="^paged_attention: out must be a normal tensor"):
        OPS.paged_attention(*operands, 0.5, out=out)
    meta = torch.zeros_like(operands[0], device="meta")
    with pytest.raises(ValueError, match="^paged_attention: all tensors must be on one device"):
        OPS.paged_attention(*operands, 0.5, out=meta)
