"""The dispatch keys of CUDA, for tests on the emulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_ffi import eager


@pytest.fixture
def cuda(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch._C.DispatchKeySet]:
    """The dispatch keys of CUDA tensors. Here the tensors are on the CPU and the GPU is
    emulated."""
    monkeypatch.setattr(eager, "_native", emulated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    eager._prepare.cache_clear()
    yield torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    eager._prepare.cache_clear()
