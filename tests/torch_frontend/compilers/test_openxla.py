"""torch.compile(backend="openxla") on PyTorch's own tensors, which XLA runs through JAX's client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch_xla
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from harness import reference
from harness.compare import assert_same_bits
from shared_ffi.xla import programs as xla_programs
from tests.cases.all import SHORT_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.updates import UpdateCase
from tests.support import backends, scripts
from torch_frontend.compilers import openxla


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    openxla.install()  # as torch_xla's entry point does, where the package is installed


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="openxla", fullgraph=True, **options)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were compiled, as calls of compile_stablehlo."""
    calls = []
    compile_stablehlo = xla_programs.compile_stablehlo

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return compile_stablehlo(*arguments)

    monkeypatch.setattr(xla_programs, "compile_stablehlo", record)
    return calls


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, jax.Array]]:
    """The tensors that JAX has taken, and its arrays of them."""
    found = []
    from_dlpack = jax.dlpack.from_dlpack
    monkeypatch.setattr(
        jax.dlpack, "from_dlpack", lambda x: found.append((x, from_dlpack(x))) or found[-1][1]
    )
    return found


class Copies(TorchDispatchMode):
    """Keeps how many elements each copy has that PyTorch makes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, op: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = op(*arguments, **(keywords or {}))
        if op.name() in ("aten::copy_", "aten::clone", "aten::_to_copy"):
            self.sizes.append(result.numel())
        return result


def _has_float8_scales(case: Case | UpdateCase) -> bool:
    return case.groups is not None and case.groups.dtype.startswith("float8")


EXCHANGEABLE = [
    x
    for x in SHORT_CASES
    if not (x.cache_dtype or "").startswith("float8") and not _has_float8_scales(x)
]
EXCHANGEABLE_UPDATES = [x for x in UPDATE_CASES if not _has_float8_scales(x)]


@pytest.mark.parametrize("case", EXCHANGEABLE, ids=lambda case: case.id)
def test_paged_attention(case: Case, programs: list[Any]) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    expected = backends.in_torch("paged_attention", *inputs, **attributes)
    result = backends.in_openxla_on_torch("paged_attention", *inputs, **attributes)
    assert_same_bits(result, expected)
    assert len(programs) == 1


@pytest.mark.pairwise
@pytest.mark.parametrize("case", EXCHANGEABLE_UPDATES, ids=lambda case: case.id)
def test_kv_cache_update(case: UpdateCase, programs: list[Any]) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    result = backends.in_openxla_on_torch("kv_cache_update", *inputs, **attributes)
    assert_same_bits(result, reference.kv_cache_update(*inputs, **attributes))
    assert programs == []  # the update runs eagerly


def test_a_graph_of_other_operators(programs: list[Any]) -> None:
    """Results of every kind, constants of the graph, and arguments that are returned or unused."""
    table = torch.tensor([3.0, 1.0, 2.0])

    def function(x: torch.Tensor, index: torch.Tensor, unused: torch.Tensor) -> Any:
        y = torch.nn.functional.softmax(x.bfloat16() @ x.bfloat16().t(), -1)
        device = x.device
        where = torch.arange(3, device=device) + index
        return (
            y,
            None,
            x > 0,
            table[where % 3] + torch.ones(3, device=device),
            index,
            5,
            where.sum(),
        )

    arguments = (torch.randn(4, 8), torch.tensor([1, 2, 0]), torch.empty(3))
    with torch.no_grad():
        expected, results = function(*arguments), compiled(function)(*arguments)
        again = compiled(function)(*arguments)
    assert results[1] is None and results[5] == 5
    for right, first, second in zip(expected, results, again, strict=True):
        if isinstance(right, torch.Tensor):
            assert first.dtype == right.dtype and first.device == right.device
            torch.testing.assert_close(first, right, rtol=1e-2, atol=1e-2)
            assert torch.equal(first, second)
    assert len(programs) == 1


def test_equal_numbers_of_different_types_have_programs_of_their_own() -> None:
    graph = torch.fx.Graph()
    operands = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, operands),))
    multiply = openxla.compile_graph(torch.fx.GraphModule({}, graph))
    x = torch.tensor([3, 5])
    for number in (1, 1.0, True, 0.0, -0.0):
        (product,) = multiply(x, number)
        expected = x * number
        assert product.dtype == expected.dtype and torch.equal(product, expected)
        assert torch.equal(torch.signbit(product), torch.signbit(expected))


def test_memory_is_shared(imported: list[Any]) -> None:
    x = torch.randn(1024)
    with torch.no_grad():
        compiled(lambda x: x + 1)(x)
    assert x.data_ptr() in [array.unsafe_buffer_pointer() for _, array in imported]


def two_layers(caches: Any, slots: torch.Tensor, query: torch.Tensor, *metadata: Any) -> Any:
    for cache in caches:
        torch.ops.xla_gpu.kv_cache_update(cache, query[:, :1] * 2, query[:, 1:], slots)
        query = torch.ops.xla_gpu.paged_attention(query, cache, *metadata, 0.5).relu()
    return query


def two_layers_inputs(is_stacked: bool = False) -> list[Any]:
    caches: Any = torch.randn(2, 64, 16, 2, 32)
    if not is_stacked:
        caches = [cache.clone() for cache in caches]
    metadata = [torch.tensor(x, dtype=torch.int32) for x in ([3], [[2, 5]], [0, 3], [1])]
    return [caches, torch.tensor([32, 33, 34]), torch.randn(3, 2, 32), *metadata]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_caches_are_updated_in_place(
    is_stacked: bool, imported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs read them there, and have no memory in which a copy would fit."""
    compiled_programs, copies = [], Copies()
    compile_stablehlo = xla_programs.compile_stablehlo
    monkeypatch.setattr(
        xla_programs,
        "compile_stablehlo",
        lambda *x: compiled_programs.append(compile_stablehlo(*x)) or compiled_programs[-1],
    )

    inputs = two_layers_inputs(is_stacked)
    eager_inputs = copy.deepcopy(inputs)
    with torch.no_grad():
        function = compiled(two_layers)
        results = [function(*inputs)]
        with copies:
            results += [function(*inputs)]
        for result in results:
            torch.testing.assert_close(result, two_layers(*eager_inputs))
    assert all(map(torch.equal, inputs[0], eager_inputs[0]))
    addresses = {array.unsafe_buffer_pointer() for _, array in imported}
    assert {cache.data_ptr() for cache in inputs[0]} < addresses
    assert not copies.sizes
    cache_bytes = inputs[0][0].nbytes
    for program in compiled_programs:
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < cache_bytes


def test_a_computed_query_is_rotated_and_the_cache_not_copied() -> None:
    def function(
        cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (rows * 2).unflatten(1, (4, 8)).split([2, 1, 1], 1)
        torch.ops.xla_gpu.kv_cache_update(
            cache, key, value, slots, query=query, positions=slots, cos_sin_cache=table
        )
        return query + cache[0, 1, 1]

    arguments = [torch.zeros(8, 4, 2, 8), torch.randn(3, 32), torch.tensor([1, 0, 30])]
    arguments.append(torch.randn(32, 8))
    eager_arguments = copy.deepcopy(arguments)
    with torch.no_grad():
        run = compiled(function)
        run(*arguments)
        with Copies() as copies:
            result = run(*arguments)
        assert torch.equal(result, function(*eager_arguments))
    assert torch.equal(arguments[0], eager_arguments[0])
    assert arguments[0].numel() not in copies.sizes


def test_openxla_copies_cache_if_old_value_is_read() -> None:
    def function(cache: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        old = cache * 1
        torch.ops.xla_gpu.kv_cache_update(cache, key, key, slots)
        return cache - old

    def with_a_view(cache: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        copied = cache.clone()
        torch.ops.xla_gpu.kv_cache_update(copied, key, key, slots)
        torch.ops.xla_gpu.kv_cache_update(cache, key * 2, key, slots)
        return copied[1] - cache[1]

    for f in (function, with_a_view):
        arguments = [torch.randn(4, 2, 2, 8), torch.randn(2, 1, 8), torch.tensor([3, 5])]
        eager_arguments = copy.deepcopy(arguments)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(f)(*arguments), f(*eager_arguments))
        assert torch.equal(arguments[0], eager_arguments[0])


def test_two_caches_in_one_array() -> None:
    """K and V as views of one array, at any offset, updated by one call."""

    def function(both: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        keys, values = both[:, 0], both[:, 1]
        torch.ops.xla_gpu.kv_cache_update(keys, key, key * 3, slots, value_cache=values)
        return both.sum((1, 2))

    arguments = [torch.randn(4, 2, 2, 1, 3), torch.randn(2, 1, 3), torch.tensor([3, 5])]
    eager_arguments = copy.deepcopy(arguments)
    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(*arguments), function(*eager_arguments))
    assert torch.equal(arguments[0], eager_arguments[0])


@pytest.mark.parametrize("offset", [0, 1, 3, 4])
def test_views_at_any_offset(offset: int, imported: list[Any]) -> None:
    """XLA's programs assume that an operand is aligned to 16 bytes."""
    x = torch.randn(1000)[offset : offset + 512]
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: x * 2)(x), x * 2)
    assert x.is_contiguous() and all(tensor.data_ptr() % 16 == 0 for tensor, _ in imported)


def test_a_result_outlives_its_program() -> None:
    def results() -> list[torch.Tensor]:
        function = compiled(lambda x: x + 1)
        with torch.no_grad():
            return [function(torch.full((1000,), float(i))) for i in range(10)]

    for i, result in enumerate(results()):
        assert torch.equal(result, torch.full((1000,), float(i + 1)))


def test_strided_views() -> None:
    x = torch.randn(6, 8)
    function = compiled(lambda x: x * 2)
    with torch.no_grad():
        for view in (x.t(), x[1:, 3:], x[:1].expand(6, 8), x[::2]):
            assert torch.equal(function(view), view * 2)


def test_one_program_for_each_shape(programs: list[Any]) -> None:
    function = compiled(lambda x, n: x * n, dynamic=True)
    with torch.no_grad():
        for size, number in [(4, 3), (5, 3), (4, 3), (5, 3), (4, 4), (4, 3)]:
            assert torch.equal(
                function(torch.ones(size), number), torch.full((size,), 1.0 * number)
            )
    assert len(programs) == 3


def test_pending_torch_xla_step_survives_compiled_call() -> None:
    lazy = torch.ones(3, device=torch_xla.device()) + 1
    with torch.no_grad():
        kept = compiled(lambda x: x * 2)(torch.ones(3))
    torch_xla.sync(wait=True)
    assert torch.equal(lazy.cpu(), kept)


def test_graphs_without_our_ops_can_be_trained() -> None:
    """Needs a new process: PyTorch before pytorch/pytorch#189325 wraps the compiler of backward
    graphs again for each graph, until the recursion is too deep."""
    script = """
    import torch
    import torch_frontend

    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: (x * x).sum(), backend="openxla", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    print("no error")
    """
    assert scripts.output(script) == ["no error"]


def test_random_numbers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="no random numbers on CUDA or CPU tensors; got"):
        compiled(lambda x: x + torch.rand(3))(torch.ones(3))


def test_dtypes_that_pytorch_cannot_exchange_are_refused() -> None:
    case = next(x for x in SHORT_CASES if x.cache_dtype == "float8_e4m3fn")
    message = (
        "PyTorch cannot exchange tensors of floats of 8 or 4 bits with JAX; got torch.float8_e4m3fn"
    )
    with pytest.raises(NotImplementedError, match=message):
        backends.in_openxla_on_torch("paged_attention", *case.inputs(), **case.attributes())


def test_operators_that_torch_xla_cannot_lower_are_refused() -> None:
    message = "torch_xla cannot lower aten.linalg_eig"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        compiled(torch.linalg.eigvals)(torch.eye(3))


def test_tensors_of_two_gpus_are_refused() -> None:
    with FakeTensorMode():
        tensors = [torch.empty(2, device=f"cuda:{i}") for i in range(2)]
        message = r"must be on one device; got \['cuda:0', 'cuda:1'\]. Compile"
        with pytest.raises(ValueError, match=message):
            openxla.compile_graph(torch.fx.symbolic_trace(lambda a, b: (a, b)))(*tensors)


def test_tracing_takes_no_memory() -> None:
    petabyte = torch.empty(1 << 20, 1 << 30, dtype=torch.uint8, device="meta")
    graph = torch.fx.symbolic_trace(lambda x: [x[0, :4]])
    trace = openxla.trace_on_placeholders(graph, [petabyte], "cpu")
    assert trace.operands[0].shape == petabyte.shape and trace.results[0].shape == (4,)
