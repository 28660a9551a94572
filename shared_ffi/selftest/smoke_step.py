"""The smallest decoding step, which shows whether the ops run. Each backend runs it in a process of
its own, which alone imports its framework.

A sequence of two tokens: the update writes their K and V into block 1, then one query attends to
them. K is zero, so both V, 1 and 3, have the same weight, and every element of the result is 2.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np

from shared_ffi.selftest import cuda_kernels

_SCALE = 1.0


def in_jax() -> str:
    """Runs the step on JAX's default device, whose name it returns. On a GPU it compares the
    kernels in use there with the plain one."""
    import jax

    import jax_frontend

    @jax.jit
    def step(cache: Any, key: Any, value: Any, slots: Any, *attention: Any) -> Any:
        query, lens, tables, starts, num_seqs = attention
        cache = jax_frontend.kv_cache_update(cache, key, value, slots)
        return jax_frontend.paged_attention(query, cache, lens, tables, starts, num_seqs, _SCALE)

    output = step(*operands())
    check(output.ravel())
    (device,) = output.devices()
    if device.platform == "cpu":
        return device.device_kind

    return f"{device.device_kind}; {cuda_kernels.compare(attend_in_jax)}"


def in_torch(device: str, compiler: str | None = None) -> str:
    """Runs the step on a device, whose name it returns. On a GPU, without a compiler, it compares
    the kernels in use there with the plain one.

    Args:
        device: as PyTorch names it.
        compiler: a backend of torch.compile, or ``aot_inductor``; None: the step is not compiled.
    """
    import torch

    if device == "xla" or compiler == "openxla":
        import torch_xla  # noqa: F401
    import torch_frontend

    class Step(torch.nn.Module):
        def forward(self, cache: Any, key: Any, value: Any, slots: Any, *attention: Any) -> Any:
            query, lens, tables, starts, num_seqs = attention
            torch_frontend.kv_cache_update(cache, key, value, slots)
            # The doubled query changes nothing. A compiler makes code of its own for it.
            return torch_frontend.paged_attention(
                2 * query, cache, lens, tables, starts, num_seqs, _SCALE
            )

    step: Any = Step()
    tensors = tuple(torch.from_numpy(x).to(device) for x in operands())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        if compiler == "aot_inductor":
            program, path = torch.export.export(step, tensors), f"{folder}/step.pt2"
            torch_frontend.aoti_compile_and_package(program, package_path=path)
            step = torch._inductor.aoti_load_package(path)
        elif compiler:
            step = torch.compile(step, backend=compiler, fullgraph=True)
        output = step(*tensors)
    check(output.flatten().tolist())
    if not output.is_cuda:
        return str(output.device)
    if compiler:
        return torch.cuda.get_device_name()

    return f"{torch.cuda.get_device_name()}; {cuda_kernels.compare(attend_in_torch)}"


def attend_in_jax(call: cuda_kernels.Call, is_plain: bool) -> np.ndarray:
    """Computes a call on JAX's default device, as `cuda_kernels.compare` wants it."""
    import jax

    import jax_frontend

    query = jax.numpy.array(call.query.astype(call.dtype))
    cache = jax.numpy.array(call.kv_cache.astype(call.cache_dtype))
    if is_plain:
        query = query.astype("float32")
        cache = cache.astype("float32") if call.cache_dtype == call.dtype else cache
    lens, tables, starts, num_seqs = map(jax.numpy.array, call.metadata)
    one = jax.numpy.array(1.0) if call.has_scales else None
    output = jax_frontend.paged_attention(
        query, cache, lens, tables, starts, num_seqs, call.scale, k_scale=one, v_scale=one
    )
    return np.asarray(output, np.float32)


def attend_in_torch(call: cuda_kernels.Call, is_plain: bool, device: str = "cuda") -> np.ndarray:
    """The same through PyTorch on a device."""
    import torch

    import torch_frontend

    query = torch.from_numpy(call.query).to(device, getattr(torch, call.dtype))
    cache = torch.from_numpy(call.kv_cache).to(device, getattr(torch, call.cache_dtype))
    if is_plain:
        query = query.float()
        cache = cache.float() if call.cache_dtype == call.dtype else cache
    lens, tables, starts, num_seqs = (torch.from_numpy(x).to(device) for x in call.metadata)
    one = torch.tensor(1.0, device=device) if call.has_scales else None
    output = torch_frontend.paged_attention(
        query, cache, lens, tables, starts, num_seqs, call.scale, k_scale=one, v_scale=one
    )
    return output.float().cpu().numpy()


def operands() -> list[np.ndarray]:
    """The cache, key, value and slots of the update, then the query and its metadata."""
    value = np.ones((2, 1, 8), np.float32)
    value[1] = 3
    update = [np.zeros((2, 2, 2, 8), np.float32), np.zeros((2, 1, 8), np.float32), value]
    metadata = [np.array(x, np.int32) for x in ([2], [[1]], [0, 1], [1])]
    return [*update, np.array([2, 3], np.int32), np.ones((1, 1, 8), np.float32), *metadata]


def check(output: Iterable[float]) -> None:
    """Raises ArithmeticError if the elements of the result are wrong."""
    values = sorted({*map(float, output)})
    if values != [2.0]:
        raise ArithmeticError(f"every element of the result must be 2; got {values}")
