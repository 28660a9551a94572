"""The ops in torch_xla: lazy mode, torch.compile(backend="openxla"), export, and the traps of
`_xla_custom_call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.stablehlo import exported_program_to_stablehlo

from harness import hlo
from harness.compare import assert_same_bits
from harness.hlo import ATTENTION, UPDATE
from tests.cases.sound_calls import DECODE_TABLE, attention, decode_steps, split, update
from tests.support import backends
from tests.support.models import Layer, layer_inputs

OPS = torch.ops.xla_gpu


def random_attention(seed: int = 0) -> list[np.ndarray]:
    query, kv_cache, *metadata = split(attention())[0]
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(query.shape, dtype=np.float32),
        rng.standard_normal(kv_cache.shape, dtype=np.float32),
        *metadata,
    ]


def on_xla(arrays: Sequence[Any]) -> list[torch.Tensor]:
    return [backends.to_xla(array) for array in arrays]


SYNCHRONIZE: dict[str, Callable[[], None]] = {
    "torch_xla.sync": torch_xla.sync,
    "mark_step": xm.mark_step,
    "wait_device_ops": lambda: (torch_xla.sync(), xm.wait_device_ops())[0],
    "none": lambda: None,
}


@pytest.mark.parametrize("synchronize", SYNCHRONIZE)
def test_lazy_step(synchronize: str) -> None:
    operands = random_attention()
    result = OPS.paged_attention(*on_xla(operands), 0.5)
    SYNCHRONIZE[synchronize]()
    expected = backends.in_torch("paged_attention", *operands, scale=0.5)
    assert_same_bits(backends.to_numpy(result), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "openxla"])
def test_update_then_attention_in_one_step(compiled: bool, mode: Any) -> None:
    inputs = layer_inputs()
    expected = Layer()(*inputs)
    with mode():
        layer = Layer().to(torch_xla.device())
        function = torch.compile(layer, backend="openxla", fullgraph=True) if compiled else layer
        on_device = [x.to(torch_xla.device()) for x in inputs]
        for _ in range(2):
            assert torch.equal(function(*on_device).cpu(), expected)


@pytest.mark.parametrize("backend", [None, "openxla"])
def test_update_is_in_place(backend: str | None, compiled: hlo.CompiledPrograms) -> None:
    num_blocks = 5 if backend else 6  # unique shapes, so that new programs are compiled
    _, *rest = on_xla(split(update())[0])
    cache = torch.zeros(num_blocks, 2, 4, 8).to(torch_xla.device())
    function = OPS.kv_cache_update
    if backend:
        torch._dynamo.reset()
        function = torch.compile(
            lambda *a: OPS.kv_cache_update(*a), backend=backend, fullgraph=True
        )
    torch_xla.sync(wait=True)
    address = torch_xla._XLAC._unsafe_buffer_pointer(cache)
    for _ in range(3):
        function(cache, *rest)
        torch_xla.sync(wait=True)
        assert torch_xla._XLAC._unsafe_buffer_pointer(cache) == address
    programs = [
        after
        for _, after in compiled.all()
        if UPDATE in after and f"f32[{num_blocks},2,4,8]" in after
    ]
    assert programs
    for program in programs:
        assert " copy(" not in program
        assert "input_output_alias={ {0}:" in program
        assert "output_to_operand_aliasing={{}: (0, {})}" in program


def test_two_updates_in_one_compiled_step() -> None:
    cache, key, value, slots = split(update())[0]

    def step(
        cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        OPS.kv_cache_update(cache, key, value, slots)
        OPS.kv_cache_update(
            cache, value * 3, key, slots + 8 * (slots == 0).int() - (slots == 7).int()
        )

    expected = backends.to_torch(cache)
    step(expected, *map(backends.to_torch, (key, value, slots - 1)))
    on_device = on_xla([cache, key, value, slots - 1])
    torch_xla.sync()
    torch.compile(step, backend="openxla", fullgraph=True)(*on_device)
    assert torch.equal(on_device[0].cpu(), expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "openxla"])
def test_a_clone_of_the_cache_keeps_its_values(compiled: bool) -> None:
    cache, *rest = on_xla(split(update())[0])
    torch_xla.sync()

    def update_clone(cache: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        clone = cache.clone()
        OPS.kv_cache_update(clone, *rest)
        return clone

    torch._dynamo.reset()
    function = torch.compile(update_clone, backend="openxla") if compiled else update_clone
    for _ in range(3):
        assert function(cache, *rest).cpu().any()
        assert not cache.cpu().any()
    held = cache.clone()
    OPS.kv_cache_update(cache, *rest)
    assert cache.cpu().any() and not held.cpu().any()


def test_export_to_stablehlo() -> None:
    program = torch.export.export(Layer(), layer_inputs())
    text = exported_program_to_stablehlo(program).get_stablehlo_text()
    assert f"stablehlo.custom_call @{ATTENTION}(" in text
    assert f"stablehlo.custom_call @{UPDATE}(" in text
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text


def test_nothing_falls_back_to_aten() -> None:
    metrics.clear_all()
    backends.in_torch_xla(
        "paged_attention", *random_attention(), scale=0.5, sliding_window=2, soft_cap=30.0
    )
    backends.in_torch_xla("kv_cache_update", *split(update())[0])
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []


# The traps: each of these gave a wrong result without an error through `_xla_custom_call`.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"scale": 0.5}, {"scale": 0.25}),
        ({"scale": 0.5, "soft_cap": 30.0}, {"scale": 0.5, "soft_cap": 1.0}),
        ({"scale": 0.5}, {"scale": 0.5, "soft_cap": 1.0}),
        ({"scale": 0.5, "sliding_window": 1}, {"scale": 0.5, "sliding_window": 2}),
        ({"scale": 0.5}, {"scale": 0.5, "sliding_window": 1}),
    ],
    ids=["scale", "soft_cap", "no-soft_cap", "sliding_window", "no-sliding_window"],
)
@pytest.mark.parametrize("backend", ["torch_xla", "openxla"])
def test_calls_that_differ_in_an_attribute(
    backend: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    operands = random_attention()
    results = [
        backends.BACKENDS[backend]("paged_attention", *operands, **a)
        for a in (first, second, first)
    ]
    for result, attributes in zip(results, (first, second, first), strict=True):
        assert_same_bits(result, backends.in_torch("paged_attention", *operands, **attributes))
    assert (results[0] != results[1]).any()


@pytest.mark.parametrize("backend", ["torch_xla", "openxla"])
def test_swapped_operands(backend: str) -> None:
    cache, key, value, slots = split(update())[0]
    for one, other in ((key, value * 2), (value * 2, key)):
        result = backends.BACKENDS[backend]("kv_cache_update", cache, one, other, slots)
        assert_same_bits(result, backends.in_torch("kv_cache_update", cache, one, other, slots))


def test_transposed_operand_reaches_the_kernel_in_row_major_order(
    compiled: hlo.CompiledPrograms,
) -> None:
    query, *rest = random_attention()
    query = np.concatenate([query] * 3)  # a unique shape, so that a new program is compiled
    transposed = backends.to_xla(np.ascontiguousarray(query.transpose(1, 0, 2)))
    rest_on_xla = on_xla(rest)
    torch_xla.sync()
    result = OPS.paged_attention(transposed.transpose(0, 1), *rest_on_xla, 0.5).cpu()
    assert_same_bits(
        backends.to_numpy(result), backends.in_torch("paged_attention", query, *rest, scale=0.5)
    )
    calls = [
        call
        for _, after in compiled.all()
        for call in hlo.custom_calls(after, ATTENTION)
        if call.startswith("f32[12,4,8]")
    ]
    assert calls
    for call in calls:
        assert "operand_layout_constraints={f32[12,4,8]{2,1,0}, " in call


@pytest.mark.xfail(strict=True, reason="pytorch/xla issue 8353: it hashes these two graphs alike")
def test_graphs_with_permuted_inputs() -> None:
    """A bug of torch_xla that affects all of its ops. When this test begins to pass, delete the
    entry in the troubleshooting page."""
    inputs = [torch.randn(12, 12) for _ in range(3)]

    def one(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.T, y.T, z.T, OPS.simple_add(x * y, z)

    def other(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.T, y.T, z.T, OPS.simple_add(x * z, y)

    for graph in (one, other):
        on_device = graph(*(x.to(torch_xla.device()) for x in inputs))
        torch_xla.sync()
        torch.testing.assert_close(on_device[-1].cpu(), graph(*inputs)[-1])


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "openxla"])
def test_decode_loop_compiles_once(compiled: bool) -> None:
    """Nothing is compiled after the second step."""
    cache = torch.zeros(16, 16, 4, 8).to(torch_xla.device())
    tables, start = on_xla([DECODE_TABLE, np.array([0, 1], np.int32)])
    torch_xla.sync(wait=True)

    def step(cache: torch.Tensor, token: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        slot, length, num_seqs = numbers
        OPS.kv_cache_update(cache, token[:, :2], token[:, :2] * 2, slot)
        return OPS.paged_attention(token, cache, length, tables, start, num_seqs, 0.5, None, 30.0)

    torch._dynamo.reset()
    function = torch.compile(step, backend="openxla", fullgraph=True) if compiled else step
    compiles_after_warm_up = None
    for i, arrays in enumerate(decode_steps()):
        function(cache, *on_xla(arrays))
        torch_xla.sync()
        if i == 1:
            xm.wait_device_ops()
            compiles_after_warm_up = metrics.metric_data("CompileTime")[0]
    xm.wait_device_ops()
    assert metrics.metric_data("CompileTime")[0] == compiles_after_warm_up


def test_cpu_tensor_among_xla_tensors() -> None:
    """It has no value in torch_xla's program."""
    operands, attributes = split(attention())
    for i in range(1, len(operands)):
        tensors = [backends.to_xla(x) for x in operands]
        tensors[i] = tensors[i].cpu()
        with pytest.raises(ValueError, match="^paged_attention: all tensors must be on one device"):
            torch.ops.xla_gpu.paged_attention(*tensors, **attributes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", range(4))
def test_an_update_with_a_tensor_on_another_device(number: int, device: str) -> None:
    tensors = [backends.to_xla(x) for x in split(update())[0]]
    tensors[number] = tensors[number].cpu().to(device)
    with pytest.raises(ValueError, match="^kv_cache_update: all tensors must be on one device"):
        OPS.kv_cache_update(*tensors)


def test_caches_that_are_not_written() -> None:
    """torch_xla's tensors have neither addresses nor strides of their own to see it by."""
    cache, key, value, slots = (backends.to_xla(x) for x in split(update())[0])
    one_block = torch.zeros_like(cache[:1])
    rule = "kv_cache must have no overlapping elements: .* got a view of 64 elements"
    with pytest.raises(ValueError, match=f"^kv_cache_update: {rule}"):
        OPS.kv_cache_update(one_block.expand_as(cache), key, value, slots)
    keys = torch.zeros_like(cache[:, :, :2])
    with pytest.raises(ValueError, match="^kv_cache_update: value_cache must not share memory"):
        OPS.kv_cache_update(keys, key, value, slots, value_cache=keys)
    assert not one_block.cpu().any() and not keys.cpu().any()


class Projected(torch.nn.Module):
    """A layer for torch_xla's scan_layers: a projection, and attention to a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(32) + torch.rand(32, 32) / 32)
        _, *arrays = random_attention()
        for name, array in zip(("cache", "m0", "m1", "m2", "m3"), arrays, strict=True):
            self.register_buffer(name, backends.to_torch(array))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = (x.reshape(-1, 32) @ self.weight).view(x.shape)
        metadata = (self.m0, self.m1, self.m2, self.m3)
        return OPS.paged_attention(query, self.cache, *metadata, 0.5)


def test_scan_layers() -> None:
    layers = torch.nn.ModuleList([Projected() for _ in range(3)]).to("xla")
    (query,) = on_xla(random_attention()[:1])
    with torch.no_grad():
        scanned = scan_layers(layers, query)
        for layer in layers:
            query = layer(query)
    assert torch.allclose(scanned.cpu(), query.cpu(), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="^paged_attention: inference only.*no_grad"):
        scan_layers(layers, query)


def test_scan_with_updates_of_caches() -> None:
    query, cache, *metadata = random_attention()
    slots = np.array([6, 7, 2, -1], np.int32)
    layers = on_xla([np.stack([x, x]) for x in (cache, slots, *metadata)])

    def step(x: torch.Tensor, layer: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        cache, slots, *metadata = layer
        cache = cache.clone()
        OPS.kv_cache_update(cache, x[:, :2], x[:, 2:], slots)
        return OPS.paged_attention(x, cache, *metadata, 0.5), cache

    expected, (x,) = [], on_xla([query])
    with torch.no_grad():
        scanned, caches = scan(step, x, tuple(layers))
        for i in range(2):
            x, cache = step(x, tuple(operand[i] for operand in layers))
            expected.append(cache)
    assert torch.equal(scanned.cpu(), x.cpu())
    assert torch.equal(caches.cpu(), torch.stack(expected).cpu())


def test_traced_derivative_is_refused_when_it_runs() -> None:
    query, *rest = on_xla(random_attention())
    function = torch.compile(OPS.paged_attention, backend="openxla", fullgraph=True)
    output = function(query.requires_grad_(), *rest, 0.5)
    expected = backends.in_torch("paged_attention", *random_attention(), scale=0.5)
    assert_same_bits(backends.to_numpy(output.detach()), expected)
    with pytest.raises(ValueError, match="paged_attention: inference only, it has no derivative"):
        output.sum().backward()
