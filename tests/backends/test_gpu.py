"""On a GPU, every installed backend gives the same bits, inside CUDA graphs and outside. `make
gpu-check` runs this file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from harness.arrays import CACHE_DTYPES, DTYPES
from harness.compare import assert_close_on_cuda, assert_same_bits
from harness.reference import kv_cache_update
from tests.cases.all import CASES, SHORT_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.updates import UpdateCase
from tests.support.calls import overload_of, split_keywords, written
from tests.support.gpu import ON_CUDA, attend, from_cuda, keywords_to_cuda, to_cuda

pytestmark = pytest.mark.skipif(not ON_CUDA, reason="XLA_GPU_TEST_ON=cuda is not set")

if ON_CUDA:
    torch = pytest.importorskip("torch")
    import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)

# One case for each kernel. test_cuda_kernel.py covers the other differences between cases.
BACKEND_CASES = [case for case in CASES if case.id.rpartition("-")[0].startswith(("mixed", "block-16", "head-size", "context-2000", "ragged-1", "window-64", "cap-30", "all-", "lse-", "fewer-keys", "layout-"))]  # fmt: skip


def in_torch(op: str, *operands: Any, **attributes: Any) -> Any:
    overload, keywords = overload_of(op, attributes)
    return run_torch(overload, op, operands, keywords)


def in_compiled(backend: str, op: str, *operands: Any, **attributes: Any) -> Any:
    torch._dynamo.reset()
    overload, keywords = overload_of(op, attributes)
    arrays, options = split_keywords(keywords)

    def function(*tensors: Any, **arrays: Any) -> Any:
        return overload(*tensors, **arrays, **options)

    return run_torch(torch.compile(function, backend=backend, fullgraph=True), op, operands, arrays)


def run_torch(
    function: Callable[..., Any], op: str, operands: Any, keywords: dict[str, Any]
) -> Any:
    tensors, keywords = [to_cuda(x) for x in operands], keywords_to_cuda(keywords)
    with torch.no_grad():
        result = function(*tensors, **keywords)
    return outcome(op, result, tensors, keywords)


def outcome(op: str, result: Any, tensors: Any, keywords: dict[str, Any]) -> Any:
    """The arrays that an op returned or updated, as NumPy arrays."""
    if op == "kv_cache_update":
        others = written(keywords)
        result = (tensors[0], *others) if others else tensors[0]
    if isinstance(result, tuple | list):
        return tuple(to_array(x) for x in result)
    return to_array(result)


def to_array(tensor: Any) -> np.ndarray:
    dtypes = DTYPES | CACHE_DTYPES
    array = np.empty(tuple(tensor.shape), dtypes[str(tensor.dtype).removeprefix("torch.")])
    from_cuda(tensor, array)
    return array


def in_cuda_graph(op: str, *operands: Any, **attributes: Any) -> Any:
    """Captures a CUDA graph while lengths, tables and num_seqs are zero: it must not depend on
    them."""
    overload, keywords = overload_of(op, attributes)
    keywords = keywords_to_cuda(keywords)
    tensors = [to_cuda(x) for x in operands]
    values = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = overload(*tensors, **keywords)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return outcome(op, result, tensors, keywords)


def in_jax(op: str, *operands: Any, **attributes: Any) -> Any:
    import jax  # noqa: PLC0415

    import jax_frontend  # noqa: PLC0415

    arrays, options = split_keywords(attributes)
    on_gpu = jax.device_put((operands, arrays), jax.devices("gpu")[0])
    function = jax.jit(partial(getattr(jax_frontend, op), **options))
    return jax.tree.map(np.asarray, function(*on_gpu[0], **on_gpu[1]))


def in_torch_xla(op: str, *operands: Any, **attributes: Any) -> Any:
    import torch_xla  # noqa: PLC0415

    overload, keywords = overload_of(op, attributes)
    arrays, options = split_keywords(keywords)
    tensors, arrays = torch.utils._pytree.tree_map(
        lambda x: to_cuda(x).cpu().to(torch_xla.device()), (list(operands), arrays)
    )
    with torch.no_grad():
        result = overload(*tensors, **arrays, **options)
    return outcome(op, result, tensors, arrays)


@cache
def jax_has_a_gpu() -> bool:
    if importlib.util.find_spec("jax") is None:
        return False
    import jax  # noqa: PLC0415

    return any(device.platform == "gpu" for device in jax.devices())


@cache
def torch_xla_has_a_gpu() -> bool:
    if importlib.util.find_spec("torch_xla") is None:
        return False
    import torch_xla  # noqa: PLC0415

    return torch_xla.runtime.device_type() == "CUDA"


BACKENDS: dict[str, tuple[Callable[..., np.ndarray], Callable[[], bool]]] = {
    "torch": (in_torch, lambda: torch.cuda.is_available()),
    "cuda_graph": (in_cuda_graph, lambda: torch.cuda.is_available()),
    "jax": (in_jax, jax_has_a_gpu),
    "torch_xla": (in_torch_xla, torch_xla_has_a_gpu),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    function, is_there = BACKENDS[request.param]
    if not is_there():
        pytest.skip(f"{request.param} has no GPU here")
    return function


@pytest.mark.parametrize("case", BACKEND_CASES, ids=lambda case: case.id)
def test_paged_attention(case: Case, backend: Callable[..., np.ndarray], gpu: Any) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    result = backend("paged_attention", *inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert_same_bits(result, attend(gpu, inputs, **attributes))


@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_kv_cache_update(case: UpdateCase, backend: Callable[..., np.ndarray]) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    expected = kv_cache_update(*inputs, **attributes)
    if inputs.slot_mapping.dtype == "int64" and backend is in_jax:
        pytest.skip("JAX makes 32-bit integers of them")
    assert_same_bits(backend("kv_cache_update", *inputs, **attributes), expected)


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.id)
def test_compiled(case: Case, backend: str) -> None:
    if backend == "openxla":
        pytest.importorskip("torch_xla")
    inputs, attributes = case.inputs(), case.attributes()
    assert_same_bits(
        in_compiled(backend, "paged_attention", *inputs, **attributes),
        in_torch("paged_attention", *inputs, **attributes),
    )


def test_opcheck() -> None:
    inputs = next(case for case in SHORT_CASES if case.id == "mixed-bf16").inputs()
    tensors = [to_cuda(x) for x in inputs]
    tensors = [torch.nan_to_num(x) if x.is_floating_point() else x for x in tensors]
    torch.library.opcheck(torch.ops.xla_gpu.paged_attention.default, (*tensors, 0.3))


def test_a_side_stream() -> None:
    """The op runs on the current stream, so it sees earlier work there without a
    synchronization."""
    case = next(case for case in CASES if case.id == "context-2000-bf16")
    inputs, attributes = case.inputs(), case.attributes()
    expected = in_torch("paged_attention", *inputs, **attributes)
    stream = torch.cuda.Stream()
    tensors = [to_cuda(x) for x in inputs]
    query = tensors[0].clone()
    tensors[0].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(100_000_000)
        tensors[0].copy_(query)
        result = torch.ops.xla_gpu.paged_attention(*tensors, **attributes)
        array = np.empty_like(inputs[0])
        from_cuda(result, array)
    assert_same_bits(array, expected)


def test_jax_in_a_loop_on_the_device() -> None:
    """A while loop, which XLA may record as a command buffer, gives the same bits."""
    if not jax_has_a_gpu():
        pytest.skip("jax has no GPU here")
    import jax  # noqa: PLC0415

    import jax_frontend  # noqa: PLC0415

    case = next(case for case in CASES if case.id == "mixed-f32")
    inputs, attributes = case.inputs(), case.attributes()
    expected = in_jax("paged_attention", *inputs, **attributes)

    @jax.jit
    def repeated(query: Any, *rest: Any) -> Any:
        def step(_: Any, result: Any) -> Any:
            return jax_frontend.paged_attention(query + 0 * result[:1].sum(), *rest, **attributes)

        return jax.lax.fori_loop(0, 5, step, jax.numpy.zeros_like(query))

    assert_same_bits(np.asarray(repeated(*inputs)), expected)
