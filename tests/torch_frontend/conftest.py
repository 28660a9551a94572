"""The dispatch keys of CUDA, for tests on the emulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_ffi import eager


@pytest.fixture
def cuda(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> torch._C.DispatchKeySet:
    """The dispatch keys of CUDA tensors. Here the tensors are on the CPU and the GPU is
    emulated."""
    monkeypatch.setitem(eager._HANDLERS, "cuda", emulated.handlers()["cuda"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
