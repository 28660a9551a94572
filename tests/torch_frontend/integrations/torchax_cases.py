"""The ops inside torchax programs. test_torchax.py runs these in a process of their own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torchax
from torchax.interop import jax_jit, jax_view, torch_view

import jax_frontend
import torch_frontend.integrations.torchax

OPS = torch.ops.xla_gpu
SLOT = 9 * 16 + 12


def operands() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    cache = torch.randn(16, 16, 4, 64, generator=draw)
    key, value, query = (torch.randn(1, n, 64, generator=draw) for n in (2, 2, 8))
    metadata = [torch.tensor(x, dtype=torch.int32) for x in ([45], [[7, 2, 9]], [0, 1], [1])]
    return cache, key, value, query, torch.tensor([SLOT]), *metadata


def step(
    cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    slots: torch.Tensor,
    *metadata: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    OPS.kv_cache_update(cache, key, value, slots)
    output = OPS.paged_attention(query, cache, *metadata, 0.125, sliding_window=20, soft_cap=30.0)
    return output, cache


def on_jax(tensors: Any) -> Any:
    return torchax.default_env().to_xla(tensors)


def check(got: Any, wanted: Any) -> None:
    """PyTorch and JAX run the same handler, so they return the same bits."""
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a.jax()), b.numpy())


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_step(wrap: Any) -> None:
    wanted = step(*operands())
    with torchax.default_env():
        check(wrap(step)(*on_jax(operands())), wanted)


def test_lse() -> None:
    cache, _, _, query, _, *metadata = operands()
    wanted = OPS.paged_attention.lse(query, cache, *metadata, 0.125)
    with torchax.default_env():
        got = OPS.paged_attention.lse(*on_jax((query, cache, *metadata)), 0.125)
    check(got, wanted)


@pytest.mark.parametrize("causal", [0, 1])
def test_causality_of_each_sequence(causal: int) -> None:
    cache, _, _, query, _, lengths, *metadata = operands()
    query, metadata[1] = query.repeat(2, 1, 1), torch.tensor([0, 2], dtype=torch.int32)
    flags = torch.tensor([causal], dtype=torch.int32)
    wanted = OPS.paged_attention(query, cache, lengths, *metadata, 0.125, causal=bool(causal))
    with torchax.default_env():
        got = OPS.paged_attention(
            *on_jax((query, cache, lengths, *metadata)), 0.125, causal_seqs=on_jax(flags)
        )
    check([got], [wanted])


def test_packed_sequences() -> None:
    _, key, value, query, *_ = operands()
    starts, num_seqs = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [2]))
    inputs = [x.repeat(3, 1, 1) for x in (query, key, value)]
    call = (*inputs, starts, num_seqs)
    wanted = OPS.varlen_attention(*call, 0.125)
    with torchax.default_env():
        got = OPS.varlen_attention(*on_jax(call), 0.125)
        of_function = torch_frontend.varlen_attention(*on_jax(call), 0.125)
    check([got, of_function], [wanted, wanted])
    leaves = [x.requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(OPS.varlen_attention(*call, 0.125).sum(), leaves)
    rest = jax_view(on_jax((starts, num_seqs)))

    def loss(*inputs: Any) -> Any:
        return jax_view(OPS.varlen_attention(*torch_view((*inputs, *rest)), 0.125)).sum()

    with torchax.default_env():
        arrays = jax_view(on_jax([x.detach() for x in inputs]))
        got = torch_view(jax.grad(loss, (0, 1, 2))(*arrays))
    check(got, wanted)


def test_every_argument_of_an_operator_is_known() -> None:
    """What JAX's function does not have would be an error, or be dropped."""
    for operator, function in (
        (OPS.paged_attention.default, jax_frontend.paged_attention),
        (OPS.kv_cache_update.default, jax_frontend.kv_cache_update),
        (OPS.kv_cache_update.with_scales, jax_frontend.kv_cache_update),
        (OPS.kv_cache_update.full, jax_frontend.kv_cache_update),
        (OPS.ragged_paged_attention.default, jax_frontend.ragged_paged_attention),
        (OPS.varlen_attention.default, jax_frontend.varlen_attention),
        (OPS.simple_add.default, jax_frontend.simple_add),
    ):
        taken = {*inspect.signature(function).parameters} | {"causal_seqs", "use_kernel"}
        assert {x.name for x in operator._schema.arguments} <= taken


def test_other_ops() -> None:
    cache, key, _, query, _, *metadata = operands()
    wanted = OPS.simple_add(key, key), OPS.ragged_paged_attention(query, cache, *metadata, 0.125)
    with torchax.default_env():
        key, query, cache, *metadata = on_jax((key, query, cache, *metadata))
        got = OPS.simple_add(key, key), OPS.ragged_paged_attention(query, cache, *metadata, 0.125)
    check(got, wanted)


def test_two_caches() -> None:
    cache, key, value, query, slots, *metadata = operands()
    keys, values = cache[:, :, :2].clone(), cache[:, :, 2:].clone()

    def step(
        keys: Any, values: Any, key: Any, value: Any, query: Any, slots: Any, *rest: Any
    ) -> Any:
        OPS.kv_cache_update(keys, key, value, slots, value_cache=values)
        return OPS.paged_attention(query, keys, *rest, 0.125, value_cache=values), keys, values

    tensors = (keys, values, key, value, query, slots, *metadata)
    with torchax.default_env():
        got = jax_jit(step)(*on_jax(tensors))
    check(got, step(*tensors))


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_update_that_makes_scales(wrap: Any) -> None:
    cache, key, value, _, slots, *_ = operands()
    num_heads = key.shape[1]
    caches = torch.zeros_like(cache, dtype=torch.int8), *torch.zeros(2, *cache.shape[:2], num_heads)

    def step(cache: Any, k_scale: Any, v_scale: Any, *rest: Any) -> Any:
        OPS.kv_cache_update(cache, *rest, k_scale_cache=k_scale, v_scale_cache=v_scale)
        return cache, k_scale, v_scale

    tensors = (*caches, key, value, slots)
    with torchax.default_env():
        got = wrap(step)(*on_jax(tensors))
    wanted = step(*tensors)
    check(got, wanted)
    assert all(x.count_nonzero() > 0 for x in wanted)


def test_update_of_a_view() -> None:
    cache, key, value, _, slots, *_ = operands()
    layers = torch.stack([cache, cache])
    with torchax.default_env():
        given = on_jax(layers)
        OPS.kv_cache_update(given[1], *on_jax((key, value, slots)))
    OPS.kv_cache_update(layers[1], key, value, slots)
    check([given], [layers])


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_rotated_query_of_a_fused_projection(wrap: Any) -> None:
    cache, key, value, query, slots, *_ = operands()
    rows = torch.cat([query, key, value], 1)
    table = torch.randn(3, query.shape[2], generator=torch.Generator().manual_seed(0))
    positions = torch.arange(len(rows), dtype=torch.int32) % 3

    def rotate(cache: Any, rows: Any, slots: Any, positions: Any, table: Any) -> Any:
        num_kv_heads = cache.shape[2] // 2
        heads = [rows.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
        query, key, value = rows.split(heads, 1)
        rotary = {"query": query, "positions": positions, "cos_sin_cache": table}
        OPS.kv_cache_update(cache, key, value, slots, **rotary, interleaved=True)
        return query, cache

    tensors = (cache, rows, slots, positions, table)
    wanted = rotate(*(x.clone() for x in tensors))
    with torchax.default_env():
        check(wrap(rotate)(*on_jax(tensors)), wanted)


class Decoder(torch.nn.Module):
    """Three layers with a cache each."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(512, 768) for _ in range(3))

    def forward(
        self, x: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, *metadata: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for projection, cache in zip(self.projections, caches, strict=True):
            rows = projection(x).view(-1, 12, 64)
            OPS.kv_cache_update(cache, rows[:, 8:10], rows[:, 10:], slots)
            output = OPS.paged_attention(rows[:, :8], cache, *metadata, 0.125)
            x = x + output.reshape(-1, 512)
        return x, caches


def test_decoder_updates_its_caches_in_place() -> None:
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False)
    cache, _, _, _, slots, *metadata = operands()
    x = torch.randn(1, 512)
    wanted, cpu_caches = model(x, [cache.clone() for _ in range(3)], slots, *metadata)

    env = torchax.default_env()
    weights = env.to_xla(dict(model.named_parameters()))

    def step(weights: Any, caches: Any, x: Any, slots: Any, *metadata: Any) -> Any:
        return torch.func.functional_call(model, weights, (x, caches, slots, *metadata))

    jitted = jax.jit(jax_view(step), donate_argnums=1)
    with env:
        caches = on_jax([cache.clone() for _ in range(3)])
        arguments = jax_view((weights, caches, *on_jax((x, slots, *metadata))))
    program = jitted.lower(*arguments).compile().as_text()
    assert program.count('custom_call_target="xla_gpu_kv_cache_update"') == 3
    assert program.count('custom_call_target="xla_gpu_paged_attention"') == 3
    assert not [line for line in program.splitlines() if "copy" in line and "16,16,4,64" in line]
    pointers = {array.unsafe_buffer_pointer() for array in arguments[1]}
    got, updated = jitted(*arguments)
    assert {array.unsafe_buffer_pointer() for array in updated} == pointers
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-5)
    for array, tensor in zip(updated, cpu_caches, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-5, atol=1e-5)


def test_the_import_may_follow_the_environment() -> None:
    script = """
import torch, torchax
env = torchax.default_env()
import torch_frontend.integrations.torchax
with env:
    a = torch.ones(2, device="jax")
    print(torch.ops.xla_gpu.simple_add(a, a).tolist())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "[2.0, 2.0]\n", result.stderr
