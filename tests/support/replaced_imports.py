"""A pytest plugin for the test suites of other libraries: their kernels are this library's functions.

The suites import kernels and references from their own packages and skip where there is no TPU.
With ``-p tests.support.replaced_imports`` they find our functions under the kernels' names, and a
TPU of the fifth generation. Nothing else is replaced.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest, mock

import jax.experimental.pallas.ops.gpu.paged_attention as jax_gpu
import jax.experimental.pallas.ops.tpu.paged_attention as jax_tpu
import jax.experimental.pallas.ops.tpu.ragged_paged_attention as jax_ragged
from jax._src import test_util

from jax_frontend.compat import pallas_gpu, pallas_tpu, tpu_inference

SOURCES = "XLA_GPU_SUITES_OF_OTHERS"
"""Names the folder with the checkouts of jax and tpu-inference."""


def _open_packages(root: Path) -> None:
    """Makes tpu_inference importable without what its __init__ files import, which is vLLM."""
    for folder in (root, *(x for x in root.rglob("*") if x.is_dir())):
        name = ".".join(folder.relative_to(root.parent).parts)
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    # They log, and look up block sizes for a TPU's name.
    for name in ("logger", "utils"):
        sys.modules[f"{root.name}.{name}"] = mock.MagicMock()


def _pallas_gpu(q: Any, k_pages: Any, v_pages: Any, *arguments: Any, **options: Any) -> Any:
    if k_pages.dtype != v_pages.dtype:
        raise SkipTest("K and V have different dtypes, which is refused")
    return pallas_gpu.paged_attention(q, k_pages, v_pages, *arguments, **options)


def _replace() -> None:
    test_util.is_device_tpu_at_least = lambda version: version <= 5
    test_util.is_cuda_compute_capability_at_least = lambda capability: True
    jax_tpu.paged_attention = pallas_tpu.paged_attention
    jax_ragged.ragged_paged_attention = pallas_tpu.ragged_paged_attention
    jax_gpu.paged_attention = _pallas_gpu
    root = Path(os.environ[SOURCES]) / "tpu-inference/tpu_inference"
    if not root.exists():
        return
    _open_packages(root)
    for module, name, function in (
        ("v2.kernel", "ragged_paged_attention", tpu_inference.ragged_paged_attention_v2),
        ("v2.ragged_kv_cache_update", "kv_cache_update", tpu_inference.kv_cache_update),
        ("v3.kernel", "ragged_paged_attention", tpu_inference.ragged_paged_attention),
        (
            "v3.kernel_hd64",
            "ragged_paged_attention_hd64",
            tpu_inference.ragged_paged_attention_hd64,
        ),
    ):
        theirs = importlib.import_module(f"tpu_inference.kernels.ragged_paged_attention.{module}")
        setattr(theirs, name, function)


_replace()
