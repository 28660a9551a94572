"""The line of the log that names the kernels of a call."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from harness.compare import has_products_of_16_bits
from shared_ffi import _native, kernel_log, paged_attention
from tests.cases.sound_calls import attention, split, update
from tests.support import backends
from tests.support.calls import checked_call, cpu_instruction_set
from tests.support.models import tensors


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.name == "shared_ffi"]


def test_a_prepared_call_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shared_ffi")
    operands = tensors(attention())
    # A scale and a shape that no other test has: its call is not prepared yet.
    for _ in range(2):
        torch.ops.xla_gpu.paged_attention(*operands, 0.171875)
    rest = (
        "query float32[4, 4, 8], kv_cache float32[4, 2, 4, 8], context_lens int32[3], "
        "block_tables int32[3, 2], query_start_loc int32[4], num_seqs int32[]"
    )
    kernel = f"the kernel for {_native.cpu_instruction_set()}, the best of this processor"
    assert lines(caplog) == [f"paged_attention(scale=0.171875) on cpu: {kernel}; {rest}"]
    caplog.clear()
    arrays = split(attention())[0]
    attend = jax.jit(lambda *x: jax_frontend.paged_attention(*x, 0.171875))
    for _ in range(2):
        attend(*arrays)
    assert lines(caplog) == [f"paged_attention(scale=0.171875) on cpu: {kernel}; {rest}"]


def test_nothing_is_logged_by_default(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "shared_ffi")
    monkeypatch.setattr(kernel_log, "_kernels", None)  # it is not asked
    torch.ops.xla_gpu.kv_cache_update(*tensors(update(key=np.ones((3, 2, 8), np.float32))))
    torch.ops.xla_gpu.paged_attention(*tensors(attention()), 0.140625)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("version", "in_use", "kernels"),
    [
        (None, [], "kernels of the build that runs it"),
        ((13, 0), [], "kernels chosen by GPU, on the machine that runs it"),
        (
            (13, 0),
            ["decode", "prefill", "portable"],
            "kernels chosen by GPU: decode, prefill, portable, each where it applies",
        ),
    ],
    ids=["no-cuda", "no-gpu", "hopper"],
)
def test_cuda(
    version: tuple[int, int] | None,
    in_use: list[str],
    kernels: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "cuda_version", version)
    monkeypatch.setattr(_native, "cuda_kernels_in_use", lambda: in_use, raising=False)
    monkeypatch.setattr(_native, "cuda_choice", lambda: "by GPU", raising=False)
    caplog.set_level(logging.DEBUG, "shared_ffi")
    in_16_bits = {
        "query": np.ones((4, 4, 8), np.float16),
        "kv_cache": np.ones((4, 2, 4, 8), np.float16),
    }
    odd = {"query": np.ones((4, 4, 12), np.float16), "kv_cache": np.ones((4, 2, 4, 12), np.float16)}
    for changes, expected in (
        (in_16_bits, kernels),
        ({}, "the kernel for CUDA cores, slowly, as query is float32"),
        (odd, "the kernel for CUDA cores, slowly, as head_size=12 is no multiple of 8"),
    ):
        caplog.clear()
        operands = split(attention(**changes))[0]
        call, _ = checked_call(paged_attention.OP, operands, {"scale": 0.5})
        kernel_log.log(call, "cuda")
        (line,) = lines(caplog)
        assert line.startswith(f"paged_attention(scale=0.5) on cuda: {expected}; query ")


@pytest.mark.parametrize(
    ("dtype", "scales", "value_scales", "values", "reason"),
    [
        ("float16", ("float8_e4m3fn", 4), ("float8_e4m3fn", 4), "uint8", ""),
        ("bfloat16", ("float8_e8m0fnu", 2), ("float8_e8m0fnu", 2), "uint8", ""),
        ("float16", ("float8_e4m3fn", 4), ("float8_e8m0fnu", 2), "uint8", ""),
        (
            "float16",
            ("float8_e8m0fnu", 2),
            ("float8_e8m0fnu", 2),
            "uint8",
            "k_scale is float8_e8m0fnu",
        ),
        ("float16", ("float8_e4m3fn", 4), ("float16", 2), "uint8", "v_scale is float16"),
        ("float16", ("float8_e4m3fn", 8), ("float8_e4m3fn", 4), "uint8", "k_scale has groups of 8"),
        ("float16", ("float8_e4m3fn", 4), ("float32", 1), "int8", ""),
        (
            "float16",
            ("float8_e4m3fn", 4),
            ("float8_e4m3fn", 4),
            "int8",
            "one of K and V has scales of groups and one is int8",
        ),
    ],
)
def test_scales_of_groups_on_cuda(
    dtype: str,
    scales: tuple[str, int],
    value_scales: tuple[str, int],
    values: str,
    reason: str,
) -> None:
    """The log gives a reason exactly where the oracle expects CUDA cores."""
    columns = {"int8": 64, "uint8": 32}
    query = np.ones((4, 4, 64), jnp.dtype(dtype))
    keys = np.ones((4, 2, 2, 32), np.uint8)
    arrays = {"value_cache": np.ones((4, 2, 2, columns[values]), values)}
    for name, (of_dtype, groups) in (("k_scale", scales), ("v_scale", value_scales)):
        arrays[name] = np.ones((4, 2, 2, groups), jnp.dtype(of_dtype))
    operands, _ = split(attention(query=query, kv_cache=keys))
    attributes = {"scale": 0.5, "kv_layout": "nbhd", "codes": "e2m1", **arrays}
    call, _ = checked_call(paged_attention.OP, operands, attributes)
    assert kernel_log._reason_for_cuda_cores(call) == reason
    assert has_products_of_16_bits(operands, attributes) == (reason == "")


def test_another_instruction_set_than_the_best(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shared_ffi")
    best, *others = _native.cpu_instruction_sets()
    for name in others[:1]:
        with cpu_instruction_set(name):
            call, _ = checked_call(paged_attention.OP, split(attention())[0], {"scale": 0.5})
            kernel_log.log(call, "cpu")
        assert f"the kernel for {name}, chosen instead of {best}; query" in lines(caplog)[0]


def test_pytorch_says_what_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shared_ffi")
    query, *others = tensors(attention())
    permuted = query.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    sliced = torch.cat([query, query], 1)[:, :4]
    ops = torch.ops.xla_gpu
    for rows in (permuted, sliced):
        ops.paged_attention(rows, *others, 0.203125)
    table = others[2].t().contiguous().t()
    ops.paged_attention(query, *others[:2], table, *others[3:], 0.203125)
    reasons = [
        "copies query, whose strides [1, 32, 4] are not tokens of dense heads; query ",
        "processor; query ",
        "copies block_tables, whose strides [1, 3] are not contiguous; query ",
    ]
    assert all(x in line for x, line in zip(reasons, lines(caplog), strict=True))


def test_jax_says_what_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shared_ffi")
    arrays = [np.asarray(x) for x in split(update(key=np.ones((3, 2, 8), np.float32)))[0]]
    update_cache = jax_frontend.kv_cache_update
    copies = "; copies kv_cache if it is an argument, as none like it is donated (donate_argnums); "
    for function, donated, is_copied in (
        (lambda *x: update_cache(*x), (), True),
        (lambda *x: update_cache(*x), (0,), False),
        (lambda x, *others: update_cache(jnp.zeros(x.shape), *others), (), False),
    ):
        caplog.clear()
        program = jax.jit(function, donate_argnums=donated).lower(*arrays).compile().as_text()
        (line,) = lines(caplog)
        assert (copies in line) == is_copied
        if donated:
            assert "copy(" not in program
    caplog.clear()
    update_cache(*arrays)
    assert all(copies in line for line in lines(caplog))


def test_torch_xla_owns_its_caches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shared_ffi")
    backends.in_torch_xla("kv_cache_update", *split(update(slot_mapping=np.arange(3)))[0])
    assert "copies" not in lines(caplog)[0]
