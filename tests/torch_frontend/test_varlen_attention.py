"""varlen_attention and its derivative in the settings that people use PyTorch in. Each gives the gradients of
the eager call, or is refused by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torch_frontend
from tests.support import backends, scripts

with contextlib.suppress(ImportError):  # it is there beside some versions of PyTorch alone
    import torch_xla  # noqa: F401  (before the first backward pass: see tests/conftest.py)

OPS = torch.ops.xla_gpu
HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 16, 9
I32 = torch.int32


def arrays(
    dtype: torch.dtype = torch.float32, kv_heads: int = KV_HEADS, seed: int = 0
) -> list[torch.Tensor]:
    """Query, key and value of two sequences."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 5, 9], dtype=I32), torch.tensor([2], dtype=I32)


def attend(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch_frontend.varlen_attention(*inputs, *batch(), 0.25, **options)


def gradients(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves).float().square().sum(), leaves)


def assert_equal(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@cache  # not at import: a first backward pass knows the devices that are there, and no others
def expected() -> tuple[torch.Tensor, ...]:
    return gradients(attend, *arrays())


def mapped(*inputs: torch.Tensor) -> torch.Tensor:
    return func.vmap(attend)(*[x[None] for x in inputs])[0]


def compiled(backend: str, function: Any = attend, **options: Any) -> Any:
    def run(*inputs: torch.Tensor) -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)

    return run


def on_xla(*inputs: torch.Tensor) -> torch.Tensor:
    device = backends.xla_device()
    arguments = [x.to(device) for x in (*inputs, *batch())]
    return torch_frontend.varlen_attention(*arguments, 0.25).cpu()


def openxla_on_xla(*inputs: torch.Tensor) -> torch.Tensor:
    device = backends.xla_device()
    function = torch.compile(
        lambda *x: torch_frontend.varlen_attention(*x, 0.25), backend="openxla", fullgraph=True
    )
    return function(*[x.to(device) for x in (*inputs, *batch())]).cpu()


def openxla(*inputs: torch.Tensor) -> torch.Tensor:
    backends.xla_device()
    return compiled("openxla")(*inputs)


def saved_on_the_host(*inputs: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return attend(*inputs)


SETTINGS: dict[str, Callable[..., torch.Tensor]] = {
    "lse": lambda *x: OPS.varlen_attention.lse(*x, *batch(), 0.25)[0],
    "checkpoint": lambda *x: checkpoint(attend, *x, use_reentrant=False),
    "saved on the host": saved_on_the_host,
    "vmap": mapped,
    "vmap, compiled": compiled("aot_eager", function=mapped),
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
    "dynamic": compiled("inductor", dynamic=True),
    "torch_xla": on_xla,
    "openxla on XLA's tensors": openxla_on_xla,
    "openxla": openxla,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str) -> None:
    assert_equal(gradients(SETTINGS[name], *arrays()), expected())


def strided() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Inputs of all kinds of strides."""
    query, key, value = arrays()
    fused = torch.cat([query, key, value], 1).split([HEADS, KV_HEADS, KV_HEADS], 1)
    wide = torch.cat([key, key], 2)[..., :SIZE]
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    by_column = [x.movedim(2, 0).contiguous().movedim(0, 2) for x in (query, key, value)]
    yield "slices of a projection", [*fused]
    yield "value a slice", [query, key, fused[2]]
    yield "query a slice", [fused[0], key, value]
    yield "heads first", by_head
    yield "key with heads first", [query, by_head[1], value]
    yield "columns first", by_column
    yield "wider rows of a head", [query, wide, value]
    yield "expanded", [query, key[:, :1].expand(-1, KV_HEADS, -1), value]
    yield "every second token", [torch.cat([x, x], 1).view(-1, *x.shape[1:])[::2] for x in arrays()]


def of_strides() -> Iterator[Any]:
    """Inductor compiles C++ for each of them."""
    for name, inputs in strided():
        for backend in (None, "aot_eager", "inductor"):
            is_rare = backend == "inductor" and name not in ("slices of a projection", "expanded")
            marks = [pytest.mark.nightly] * is_rare
            yield pytest.param(name, inputs, backend, id=f"{name}-{backend}", marks=marks)


@pytest.mark.parametrize(("name", "inputs", "backend"), [*of_strides()])
def test_strides(name: str, inputs: list[torch.Tensor], backend: str | None) -> None:
    function = attend if backend is None else compiled(backend)
    found = gradients(function, *inputs)
    assert_equal(found, gradients(attend, *[x.contiguous() for x in inputs]))
    assert torch.equal(function(*inputs), attend(*[x.contiguous() for x in inputs]))


@pytest.mark.parametrize("layout", ["expanded", "transposed", "rows"])
def test_strides_of_the_derivative(layout: str) -> None:
    leaves = [x.requires_grad_() for x in arrays()]
    dout = torch.randn(TOKENS, HEADS, SIZE)
    if layout == "expanded":
        dout = dout[:, :1, :1].expand(-1, HEADS, SIZE)
    elif layout == "transposed":
        dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        dout = torch.cat([dout, dout], 1)[:, :HEADS]
    found = torch.autograd.grad(attend(*leaves), leaves, dout)
    assert_equal(found, torch.autograd.grad(attend(*leaves), leaves, dout.contiguous()))


def sdpa(*inputs: torch.Tensor) -> torch.Tensor:
    heads = (x.transpose(0, 1)[None] for x in inputs)
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, lower: torch.dtype, backend: str | None) -> None:
    """As SDPA: computed in the lower dtype, forwards and backwards, whatever the inputs are."""
    inputs = arrays(dtype)
    function = attend if backend is None else compiled(backend)
    expected = gradients(attend, *[x.to(lower) for x in inputs])
    with torch.autocast("cpu", dtype=lower):
        assert function(*inputs).dtype == sdpa(*inputs).dtype == lower
        found = gradients(function, *inputs)
        assert [x.dtype for x in found] == [x.dtype for x in gradients(sdpa, *inputs)]
        mixed = attend(inputs[0].float(), *inputs[1:], sinks=torch.zeros(HEADS))
    assert mixed.dtype == lower
    assert_equal(found, [x.to(dtype) for x in expected])


def test_a_derivative_after_autocast() -> None:
    leaves = [x.requires_grad_() for x in arrays()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = attend(*leaves).float().square().sum()
    found = torch.autograd.grad(loss, leaves)
    assert_equal(found, [x.float() for x in gradients(attend, *arrays(torch.bfloat16))])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd() -> None:
    """Forward passes that were eager, and that were compiled."""
    for function in (attend, compiled("aot_eager")):
        leaves = [x.requires_grad_() for x in arrays()]
        loss = function(*leaves).square().sum()
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda x: x.backward(), backend="aot_eager")(loss)
        assert_equal([x.grad for x in leaves], expected())


def test_only_some_operands_have_a_derivative() -> None:
    query, key, value = arrays()
    sinks = torch.zeros(HEADS, requires_grad=True)
    value.requires_grad_()
    attend(query, key, value, sinks=sinks, alibi_slopes=torch.ones(HEADS)).sum().backward()
    assert value.grad is not None and sinks.grad is not None
    assert query.grad is None and key.grad is None
    with torch.no_grad():
        assert not attend(query, key, value).requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(query, key, value), attend(query, key, value))
    lse = OPS.varlen_attention.lse(query, key, value, *batch(), 0.25)[1]
    assert not lse.requires_grad


DERIVATIVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: func.grad(f)(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "linearize": lambda f, x: func.linearize(f, x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "vmap of grad": lambda f, x: func.vmap(func.grad(f))(x[None]),
    "vmap of jvp": lambda f, x: func.vmap(lambda y: func.jvp(f, (y,), (y,))[1])(x[None]),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", DERIVATIVES)
def test_torch_func_is_refused(name: str, which: int, needs_grad: bool) -> None:
    inputs = [x.requires_grad_(needs_grad) for x in arrays()]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return attend(*inputs[:which], x, *inputs[which + 1 :]).sum()

    with pytest.raises(NotImplementedError, match="^varlen_attention: only torch.autograd diff"):
        DERIVATIVES[name](loss, inputs[which])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_forward_mode_is_refused(needs_grad: bool) -> None:
    query, key, value = (x.requires_grad_(needs_grad) for x in arrays())
    message = "^varlen_attention: only torch.autograd .* got an operand that has a tangent"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        attend(query, key, forward_ad.make_dual(value, value))
    with forward_ad.dual_level():
        assert attend(query, key, value).shape == query.shape  # nobody has a tangent


def test_second_derivatives_are_refused() -> None:
    """Only where they are needed: others may be computed in the same pass."""
    message = "^varlen_attention: it has no second derivative"
    leaves = [x.requires_grad_() for x in arrays()]
    output = attend(*leaves)
    found = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    assert_equal(found, expected())
    other = torch.ones((), requires_grad=True)
    (twice,) = torch.autograd.grad((other**3).sum(), other, create_graph=True)
    twice.backward()
    with pytest.raises(NotImplementedError, match=message):
        found[0].sum().backward()
    dout = torch.ones_like(output, requires_grad=True)
    found = torch.autograd.grad(attend(*leaves), leaves, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(found[2].sum(), dout)
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.functional.hessian(lambda x: attend(x, *leaves[1:]).sum(), leaves[0])


META: dict[str, Any] = {
    "sinks": lambda: torch.zeros(HEADS),
    "alibi_slopes": lambda: torch.zeros(HEADS),
    "bidirectional_ranges": lambda: torch.zeros(TOKENS, 2, dtype=I32),
    "causal": lambda: torch.ones(2, dtype=I32),
    "prefix_seqs": lambda: torch.tensor([-1, 0], dtype=I32),
}


@pytest.mark.parametrize("needs_grad", [False, True])
def test_meta_tensors(needs_grad: bool) -> None:
    """One among others is refused. All of them give shapes, forwards and backwards."""
    names = ("query", "key", "value", "query_start_loc", "num_seqs")
    given = dict(zip(names, (*arrays(), *batch()), strict=True))
    given |= {name: make() for name, make in META.items()}
    for name, x in given.items():
        x.requires_grad_(needs_grad and x.is_floating_point())
        with pytest.raises(ValueError, match="^varlen_attention: all tensors must be on one dev"):
            torch_frontend.varlen_attention(**given | {name: x.to("meta")}, scale=0.25)
    on_meta = {name: x.detach().to("meta") for name, x in given.items()}
    leaves = [on_meta[x].requires_grad_() for x in ("query", "key", "value", "sinks")]
    output = torch_frontend.varlen_attention(**on_meta, scale=0.25)
    assert output.device.type == "meta" and output.requires_grad
    found = torch.autograd.grad(output.sum(), leaves)
    assert [x.shape for x in found] == [x.shape for x in leaves]


VMAPPED: dict[str, tuple[str, ...]] = {
    "all": ("query", "key", "value", "sinks", "alibi_slopes"),
    "query": ("query",),
    "key": ("key",),
    "sinks": ("sinks",),
    "ranges": ("query", "bidirectional_ranges"),
    "causal": ("causal",),
    "starts": ("query_start_loc",),
}


@pytest.mark.parametrize("kv_heads", [1, KV_HEADS])
@pytest.mark.parametrize("name", VMAPPED)
def test_vmap(name: str, kv_heads: int) -> None:
    """Each call, and each of a batch of derivatives, has the bits that it has alone. Calls that share their
    sequences are one call."""
    names = ("query", "key", "value", "query_start_loc", "num_seqs")
    inputs = [x.requires_grad_() for x in arrays(kv_heads=kv_heads)]
    given = dict(zip(names, (*inputs, *batch()), strict=True))
    given |= {name: make() for name, make in META.items()}
    given |= {x: torch.rand(HEADS, requires_grad=True) for x in ("sinks", "alibi_slopes")}
    others = {"query_start_loc": torch.tensor([0, 2, 9], dtype=I32)}
    others |= {"causal": torch.tensor([0, 1], dtype=I32)}
    others["bidirectional_ranges"] = torch.tensor([[0, 3]] * TOKENS, dtype=I32)
    mapped = {
        x: torch.stack([given[x], others.get(x, -given[x]), given[x]], -1) for x in VMAPPED[name]
    }

    def attend(own: dict[str, torch.Tensor]) -> torch.Tensor:
        options = {"scale": 0.25, "soft_cap": 3.0, "sliding_window": 4, "window_right": 2}
        return torch_frontend.varlen_attention(**given | own, **options)

    def gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        loss = sum(x.square().sum() for x in outputs)
        leaves = [x for x in given.values() if x.requires_grad]
        return [*torch.autograd.grad(loss, leaves, retain_graph=True)]

    alone = [attend({x: y[..., i] for x, y in mapped.items()}) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of its own loop
        found = func.vmap(attend, -1, 1)(mapped)
        lse = func.vmap(lambda x: OPS.varlen_attention.lse(x, *inputs[1:], *batch(), 0.25), 1)
        lse(torch.stack([inputs[0]] * 2, 1))
    assert_equal(found.unbind(1), alone)
    assert_equal(gradients([*found.unbind(1)]), gradients(alone))
    leaves = [x for x in given.values() if x.requires_grad]
    douts = torch.randn(3, TOKENS, HEADS, SIZE)
    each = [torch.autograd.grad(alone[0], leaves, x, retain_graph=True) for x in douts]
    together = torch.autograd.grad(alone[0], leaves, douts, is_grads_batched=True)
    assert_equal(together, [torch.stack(x) for x in zip(*each, strict=True)])


def test_vmap_of_no_calls() -> None:
    inputs = [x.requires_grad_() for x in arrays()]
    found = func.vmap(attend)(*[x[None][:0] for x in inputs])
    assert found.shape == (0, TOKENS, HEADS, SIZE) and found.requires_grad
    assert all(not x.any() for x in torch.autograd.grad(found.sum(), inputs))
    starts = batch()[0][None][:0]
    run = func.vmap(lambda x: OPS.varlen_attention.lse(*inputs, x, batch()[1], 0.25))
    assert [x.shape for x in run(starts)] == [found.shape, found.shape[:-1]]


def test_vmap_names_the_shapes_of_one_call() -> None:
    inputs, sinks = [torch.stack([x, x]) for x in arrays()], torch.zeros(HEADS + 1)
    with pytest.raises(
        ValueError, match=rf"^varlen_attention: sinks .* \[num_heads={HEADS}\]; got"
    ):
        func.vmap(lambda *x: attend(*x, sinks=sinks))(*inputs)


def test_opcheck() -> None:
    features = {name: make() for name, make in META.items() if name != "causal"}
    for inputs in (arrays(), [x.requires_grad_() for x in arrays()]):
        for op in (OPS.varlen_attention.default, OPS.varlen_attention.lse):
            torch.library.opcheck(op, (*inputs, *batch(), 0.25))
            torch.library.opcheck(op, (*inputs, *batch(), 0.25), features)
        output, lse = OPS.varlen_attention.lse(*inputs, *batch(), 0.25)
        rest = (output.detach(), lse, output.detach(), *batch(), 0.25)
        torch.library.opcheck(
            OPS.varlen_attention_backward.default, (*[x.detach() for x in inputs], *rest)
        )


class Layer(torch.nn.Module):
    """Attention between two projections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = torch.nn.Linear(32, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = torch.nn.Linear(HEADS * SIZE, 32)

    def forward(self, x: torch.Tensor, starts: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        fused = self.fused(x).unflatten(1, (-1, SIZE))
        inputs = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
        output = torch_frontend.varlen_attention(*inputs, starts, count, 0.25)
        return self.out(output.flatten(1))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """For any number of tokens; the program has a derivative again."""
    layer, x = Layer(), torch.randn(TOKENS, 32)
    tokens = {0: torch.export.Dim("tokens", min=2, max=100)}
    program = torch.export.export(
        layer, (x, *batch()), dynamic_shapes=(tokens, None, None), strict=strict
    )
    assert OPS.varlen_attention.default in [node.target for node in program.graph.nodes]
    for rows in (x, torch.cat([x, x])):
        outputs = [module(rows, *batch()) for module in (layer, program.module())]
        assert torch.equal(*outputs)
    outputs[1].sum().backward()


def test_aot_inductor(tmp_path: Any) -> None:
    layer, x = Layer(), torch.randn(TOKENS, 32)
    with torch.no_grad():
        program = torch.export.export(layer, (x, *batch()))
        path = torch_frontend.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )
        found = torch._inductor.aoti_load_package(path)(x, *batch())
        assert torch.allclose(found, layer(x, *batch()), atol=1e-6)


def test_fsdp() -> None:
    """A process alone: parameters are gathered, and gradients reduced, as DTensors."""
    script = """
        import copy, torch, torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import init_device_mesh
        from tests.torch_frontend.test_varlen_attention import Layer, TOKENS, batch
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh, x = init_device_mesh("cpu", (1,)), torch.randn(TOKENS, 32)
        alone = Layer()
        sharded = copy.deepcopy(alone)
        fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        alone.bfloat16()(x.bfloat16(), *batch()).float().square().sum().backward()
        sharded(x, *batch()).float().square().sum().backward()
        for one, other in zip(alone.parameters(), sharded.parameters()):
            assert torch.equal(one.grad.float(), other.grad.full_tensor().float()), one.shape
        dist.destroy_process_group()
        print("done")
    """
    assert scripts.output(script)[-1] == "done"
