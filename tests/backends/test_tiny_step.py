"""Every backend that needs no GPU works, says ``python -m shared_ffi``."""

from __future__ import annotations

import pytest

from shared_ffi import _backends

BACKENDS = [backend for backend in _backends.BACKENDS if backend.platform == "cpu"]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_tiny_step(backend: _backends.Backend) -> None:
    outcome = _backends.try_backend(backend, 180)
    assert outcome.status == _backends.WORKS, outcome
