"""The line of the log that names the kernels of a call."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from shared_ffi import _native, kernel_log, paged_attention
from tests.support.calls import checked_call
from tests.support.models import tensors
from tests.support.sound_calls import attention, split, update


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
    kernel = f"the kernel for {_native.cpu_instruction_set()}"
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
    call, _ = checked_call(paged_attention.OP, split(attention())[0], {"scale": 0.5})
    kernel_log.log(call, "cuda")
    (line,) = lines(caplog)
    assert line.startswith(f"paged_attention(scale=0.5) on cuda: {kernels}; query ")
