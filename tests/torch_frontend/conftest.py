"""The dispatch keys of CUDA, for tests on the emulated GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from shared_ffi import eager
from shared_ffi.spec import Call


@pytest.fixture
def cuda(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> torch._C.DispatchKeySet:
    """The dispatch keys of CUDA tensors. Here the tensors are on the CPU and the GPU is
    emulated."""
    prepare = eager.prepare

    def prepare_emulated(call: Call, platform: str) -> eager.EagerCall:
        if platform == "cpu":
            return prepare(call, platform)
        with monkeypatch.context() as patch:
            patch.setattr(eager, "_native", emulated)
            return prepare(call, platform)

    monkeypatch.setattr(eager, "prepare", prepare_emulated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
