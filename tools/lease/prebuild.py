"""Compiles the kernels of FlashInfer that the lab's rows need, for a GPU machine that has no time
to compile: ``python -m tools.lease.prebuild FOLDER``, as tools.lease.pack runs it.

FlashInfer takes what lies in its folder data/aot, and needs no sources then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Backend, dtype of the cache, head size, and whether there is a sliding window.
MODULES = (
    ("fa2", "bfloat16", 128, False),
    ("fa3", "bfloat16", 128, False),
    ("fa2", "float8_e4m3fn", 128, False),
    ("fa2", "bfloat16", 64, True),
    ("fa3", "bfloat16", 128, True),
)


def toolkit(nvcc: Path, folder: Path) -> None:
    """Sets CUDA_HOME to a toolkit as FlashInfer expects it, though nvcc came as a wheel: that has
    no lib64, and no library of the driver to link with."""
    real = nvcc.resolve().parents[1]
    (folder / "lib64/stubs").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(real / name)
    runtime = next(real.glob("lib*/libcudart.so.*"))
    for name in ("libcudart.so", "libcuda.so", "stubs/libcuda.so"):
        (folder / "lib64" / name).symlink_to(runtime)
    os.environ |= {"CUDA_HOME": str(folder), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    os.environ["LIBRARY_PATH"] = str(folder / "lib64")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder.parent)


def prebuild(target: Path) -> None:
    """Compiles what is not in `target` yet."""
    import torch  # noqa: PLC0415
    from flashinfer import jit, prefill  # noqa: PLC0415

    specs: list[Any] = []

    class Asked(Exception):
        """FlashInfer wants a module."""

    def ask(spec: Any, *_: Any) -> None:
        specs.append(spec)
        raise Asked

    jit.JitSpec.build_and_load = ask
    for backend, cache_dtype, head_size, has_window in MODULES:
        query, cache = torch.bfloat16, getattr(torch, cache_dtype)
        sizes = (head_size, head_size, 0, has_window, False, False)
        with contextlib.suppress(Asked):
            prefill.get_batch_prefill_module(backend, query, cache, query, torch.int32, *sizes)
    for spec in specs:
        path = target / spec.name / f"{spec.name}.so"
        if not path.exists():
            print(f"compiles {spec.name}", flush=True)
            # What is left out is bound when it is called, and no row calls it.
            left_out = ("ragged", "mask_2", "mask_3")  # K and V without pages, other masks
            spec.sources = [x for x in spec.sources if not any(y in x.name for y in left_out)]
            spec.build(verbose=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(spec.jit_library_path, path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        toolkit(Path(sys.argv[2]), Path(scratch) / "toolkit")
        prebuild(Path(sys.argv[1]))
