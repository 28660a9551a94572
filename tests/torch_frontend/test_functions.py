"""The functions of torch_frontend: the operators, with types and messages for a person."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch

import jax_frontend
import shared_ffi
import torch_frontend
from tests.cases.sound_calls import add, attention, update
from tests.support.models import tensors

OPS = torch.ops.xla_gpu


@pytest.mark.parametrize("name", ["paged_attention", "kv_cache_update", "simple_add"])
def test_arguments_are_those_of_jax(name: str) -> None:
    in_torch, in_jax = (
        dict(inspect.signature(getattr(x, name)).parameters) for x in (torch_frontend, jax_frontend)
    )
    in_torch.pop("out", None)
    assert [*in_torch] == [*in_jax]
    assert [x.default for x in in_torch.values()] == [x.default for x in in_jax.values()]


@pytest.mark.parametrize("package", [jax_frontend, shared_ffi, torch_frontend])
def test_version(package: Any) -> None:
    assert package.__version__ == version("xla-paged-attention")


@pytest.mark.parametrize("name", torch_frontend.__all__)
def test_everything_has_a_docstring(name: str) -> None:
    assert len(inspect.getdoc(getattr(torch_frontend, name)) or "") > 60


def test_attention() -> None:
    operands = tensors(attention())
    expected = OPS.paged_attention(*operands, 0.5, 3)
    assert torch.equal(torch_frontend.paged_attention(*operands, 0.5, 3), expected)
    output, lse = torch_frontend.paged_attention(*operands, 0.5, 3, return_lse=True)
    assert torch.equal(output, expected)
    assert torch.equal(lse, OPS.paged_attention.lse(*operands, 0.5, 3)[1])
    out = torch.empty_like(expected)
    assert torch_frontend.paged_attention(*operands, 0.5, sliding_window=3, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(
        torch_frontend.ragged_paged_attention(*operands, 0.5, 3),
        OPS.ragged_paged_attention(*operands, 0.5, 3),
    )
    a, b = tensors(add())
    assert torch.equal(torch_frontend.simple_add(a, b), a + b)


def test_causal_for_each_sequence() -> None:
    """Booleans and integers, in both frontends; the first sequence has two query tokens."""
    kv_cache = np.random.default_rng(0).standard_normal((4, 2, 4, 8), np.float32)
    operands = tensors(attention(kv_cache=kv_cache))
    flags = torch.tensor([False, True, False])
    result = torch_frontend.paged_attention(*operands, 0.5, causal=flags)
    assert torch.equal(result[:2], OPS.paged_attention(*operands, 0.5, causal=False)[:2])
    assert not torch.equal(result[0], OPS.paged_attention(*operands, 0.5)[0])
    assert torch.equal(result, OPS.paged_attention(*operands, 0.5, causal_seqs=flags.int()))
    arrays = [x.numpy() for x in operands]
    for causal in (flags.numpy(), flags.int().numpy()):
        in_jax = jax_frontend.paged_attention(*arrays, 0.5, causal=causal)
        assert np.array_equal(in_jax, result.numpy())


def test_numbers_of_numpy() -> None:
    operands = tensors(attention())
    expected = OPS.paged_attention(*operands, 0.5, 3)
    given = torch_frontend.paged_attention(*operands, np.float32(0.5), np.int64(3))
    assert torch.equal(given, expected)


def test_scales_may_be_numbers() -> None:
    """In both frontends, with the bits of arrays."""
    cache = torch.ones((4, 2, 4, 8), dtype=torch.int8)
    operands = tensors(attention(kv_cache=cache.numpy()))
    new = tensors(update(kv_cache=cache.numpy()))
    numbers = {"k_scale": 0.1, "v_scale": np.float32(0.3)}
    arrays = {name: torch.tensor(x) for name, x in numbers.items()}
    expected = torch_frontend.paged_attention(*operands, 0.5, **arrays)
    assert torch.equal(torch_frontend.paged_attention(*operands, 0.5, **numbers), expected)
    in_jax = jax_frontend.paged_attention(*[x.numpy() for x in operands], 0.5, **numbers)
    assert np.array_equal(in_jax, expected.numpy())
    updated = [(new[0].clone(), scales) for scales in (arrays, numbers)]
    for kv_cache, scales in updated:
        torch_frontend.kv_cache_update(kv_cache, *new[1:], **scales)
    assert torch.equal(updated[0][0], updated[1][0]) and not torch.equal(updated[0][0], cache)


def test_update() -> None:
    operands = tensors(update())
    expected = [x.clone() for x in operands]
    OPS.kv_cache_update(*expected)
    assert torch_frontend.kv_cache_update(*operands) is None
    assert torch.equal(operands[0], expected[0])


@pytest.mark.parametrize("window", [3, None])
def test_compiled(window: int | None) -> None:
    torch._dynamo.reset()
    operands, new = tensors(attention()), tensors(update())

    def step(cache: torch.Tensor, *operands: torch.Tensor) -> Any:
        torch_frontend.kv_cache_update(cache, *new[1:])
        return torch_frontend.paged_attention(*operands, 0.5, window, return_lse=True)

    caches = [new[0].clone(), new[0].clone()]
    expected = step(caches[0], *operands)
    results = torch.compile(step, fullgraph=True)(caches[1], *operands)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert torch.equal(*caches)


ATTENTION: list[tuple[str, Any, str]] = [
    (
        "context_lens",
        (3, 45),
        r"context_lens must have type torch.Tensor; got tuple. Pass torch.tensor\(context_lens, "
        r"dtype=torch.int32\)",
    ),
    ("query", None, "query must be an array; got None. It is not optional"),
    (
        "kv_cache",
        np.zeros(3),
        r"kv_cache must have type torch.Tensor; got ndarray. Pass torch.from_dlpack\(kv_cache\)",
    ),
    ("scale", True, "scale must have type float; got bool. Pass a number"),
    ("scale", torch.tensor([0.5]), r"scale must have type float; got Tensor. Pass float\(scale\)"),
    (
        "block_tables",
        torch.zeros(3, 2, dtype=torch.int64),
        r"block_tables must have dtype int32; got int64. Pass block_tables.int\(\)",
    ),
    (
        "sliding_window",
        2.5,
        r"sliding_window must have type int; got float. Pass int\(sliding_window\)",
    ),
]
"""tests/cases/bad_calls.py has those that both frontends refuse in the same words."""


@pytest.mark.parametrize(("argument", "value", "message"), ATTENTION)
def test_messages_of_attention(argument: str, value: Any, message: str) -> None:
    names = ["query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"]
    call: dict[str, Any] = dict(zip(names, tensors(attention()), strict=True)) | {"scale": 0.5}
    call[argument] = value
    with pytest.raises(TypeError, match=f"^paged_attention: {message}$"):
        torch_frontend.paged_attention(**call)


@pytest.mark.parametrize("frontend", [jax_frontend, torch_frontend], ids=["jax", "torch"])
def test_an_array_that_is_left_out(frontend: Any) -> None:
    """With positional arguments, `scale` takes the place of `num_seqs`."""
    operands = [*attention().values()][:6]
    if frontend is torch_frontend:
        operands = list(tensors(attention()))
    with pytest.raises(TypeError, match="^paged_attention: scale must have type float; got None"):
        frontend.paged_attention(*operands)
    rule = "(type torch.Tensor; got float|dtype int32; got float32)"
    remedy = "It may be scale, if an array before it was left out"
    with pytest.raises(TypeError, match=rf"^paged_attention: num_seqs must have {rule}\. {remedy}"):
        frontend.paged_attention(*operands[:5], 0.5)


def test_other_messages() -> None:
    operands = tensors(attention())
    with pytest.raises(ValueError, match="^paged_attention: out must be None with return_lse"):
        torch_frontend.paged_attention(  # type: ignore[call-overload]
            *operands, 0.5, return_lse=True, out=torch.empty_like(operands[0])
        )
    with pytest.raises(
        TypeError, match="^kv_cache_update: interleaved must have type bool; got None"
    ):
        torch_frontend.kv_cache_update(*tensors(update()), interleaved=None)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="^ragged_paged_attention: sm_scale must have type float; g"
    ):
        torch_frontend.ragged_paged_attention(*operands, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^kv_cache_update: key must have type torch.Tensor; got l"):
        torch_frontend.kv_cache_update(operands[1], [1.0], operands[0], operands[2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^simple_add: b must have type torch.Tensor; got float"):
        torch_frontend.simple_add(operands[0], 1.0)  # type: ignore[arg-type]
