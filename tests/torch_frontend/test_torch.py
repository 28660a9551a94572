"""The ops in PyTorch on the CPU: schemas, opcheck, torch.compile, export, autograd."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import jax_frontend
from harness.compare import assert_close_on_cuda, assert_same_bits
from shared_ffi import eager, simple_add
from shared_ffi.spec import ArraySpec
from tests.cases.all import SHORT_CASES
from tests.cases.case import Case
from tests.cases.sound_calls import (
    DECODE_TABLE,
    SOUND,
    add,
    attention,
    decode_steps,
    rotated_update,
    split,
    update,
)
from tests.support import backends, scripts
from tests.support.calls import observed_calls, overload_of, split_keywords
from tests.support.models import tensors

OPS = torch.ops.xla_gpu


def test_schemas() -> None:
    """The positional arguments never change. The keyword-only ones are those of the JAX function."""
    attention_arguments = (
        "(Tensor query, Tensor kv_cache, Tensor context_lens, Tensor block_tables, "
        "Tensor query_start_loc, Tensor num_seqs, float scale, SymInt? sliding_window=None, "
        "float? soft_cap=None, *, "
    )
    training_arguments = (
        "(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor num_seqs, "
        "float scale, SymInt? sliding_window=None, float? soft_cap=None, *, "
    )
    schemas = {
        OPS.varlen_attention.default: (training_arguments, " -> Tensor"),
        OPS.varlen_attention.lse: (training_arguments, " -> (Tensor output, Tensor lse)"),
        OPS.paged_attention.default: (attention_arguments, " -> Tensor"),
        OPS.paged_attention.lse: (attention_arguments, " -> (Tensor output, Tensor lse)"),
        OPS.kv_cache_update.default: (
            "(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slot_mapping, *, ",
            " -> ()",
        ),
        OPS.kv_cache_update.with_scales: (
            "(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slot_mapping, *, ",
            " -> ()",
        ),
        OPS.kv_cache_update.full: (
            "(Tensor(a!) kv_cache, Tensor key, Tensor value, Tensor slot_mapping, *, ",
            " -> ()",
        ),
        OPS.simple_add.default: ("(Tensor a, Tensor b)", " -> Tensor"),
    }
    for op, (arguments, results) in schemas.items():
        schema = str(op._schema)
        assert arguments in schema and schema.endswith(results)
        function = getattr(jax_frontend, op._schema.name.removeprefix("xla_gpu::"))
        in_jax = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name != "return_lse"
        }
        in_torch = {x.name: x.default_value for x in op._schema.arguments if x.kwarg_only}
        if function is jax_frontend.kv_cache_update and op is not OPS.kv_cache_update.full:
            assert in_torch.keys() <= in_jax.keys()  # the overload full has all
            in_jax = {name: in_jax[name] for name in in_torch}
        if "causal" in in_torch:  # no type of a schema is a bool or a tensor
            assert in_torch.pop("causal_seqs") is None
        assert in_torch == in_jax


@pytest.mark.parametrize(
    "attributes", [(0.5,), (0.5, 2), (0.5, None, 30.0), (0.5, 2, 30.0)], ids=str
)
def test_opcheck_paged_attention(attributes: tuple[Any, ...]) -> None:
    torch.library.opcheck(OPS.paged_attention.default, (*tensors(attention()), *attributes))


def test_opcheck_other_ops() -> None:
    torch.library.opcheck(OPS.kv_cache_update.default, tensors(update()))
    torch.library.opcheck(OPS.kv_cache_update.full, tensors(update()), NORMS)
    torch.library.opcheck(OPS.simple_add.default, tensors(add()))


NORMS = {"k_norm": torch.linspace(1, 2, 8), "norm_eps": 1e-6, "v_norm": True}


@pytest.mark.parametrize("norms", [{}, NORMS], ids=["plain", "normalized"])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_update_keeps_the_address(backend: str, norms: dict[str, Any]) -> None:
    cache, key, value, slots = tensors(update())
    expected = cache.clone()
    OPS.kv_cache_update(expected, key, value, slots, **norms)
    expected_sum = expected.sum()

    @torch.compile(backend=backend, fullgraph=True)
    def step(cache: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        OPS.kv_cache_update(cache, *rest, **norms)
        return cache.sum()

    address = cache.data_ptr()
    assert step(cache, key, value, slots) == expected_sum
    assert torch.equal(cache, expected) and cache.data_ptr() == address


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_update_writes_the_scales_in_place(backend: str) -> None:
    """Also where a scale is a part of a larger array, and is read in the same program."""
    _, key, value, slots = tensors(update())
    caches = torch.zeros(4, 2, 4, 8, dtype=torch.int8), torch.zeros(2, 4, 2, 2)

    def step(cache: torch.Tensor, scales: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        made = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
        OPS.kv_cache_update(cache, key, value, slots, **made)
        return scales.sum() + cache.sum()

    expected = [x.clone() for x in caches]
    addresses = [x.data_ptr() for x in caches]
    total = step(*expected, key * 3)
    assert torch.compile(step, backend=backend, fullgraph=True)(*caches, key * 3) == total
    assert [x.data_ptr() for x in caches] == addresses
    for one, other in zip(caches, expected, strict=True):
        assert torch.equal(one, other) and one.count_nonzero() > 0


def test_inductor_updates_without_a_copy_of_the_cache() -> None:
    from torch._inductor.utils import run_and_get_code  # noqa: PLC0415

    @torch.compile(fullgraph=True)
    def step(cache: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        OPS.kv_cache_update(cache, *rest)
        return rest[0] + 1

    torch._dynamo.reset()
    _, (code, *_) = run_and_get_code(step, *tensors(update()))
    assert "kv_cache_update" in code
    program = code.partition("def call(")[2]
    assert "(4, 2, 4, 8)" in program, "the check of the cache's size"
    assert "empty_strided_cpu((4, 2, 4, 8)" not in program, "a buffer of the cache's size is made"


def test_strided_caches_are_not_copied() -> None:
    """Some engines keep the caches of all layers in one array."""
    case = next(case for case in SHORT_CASES if case.id == "layout-n2hbd-mixed-f32")
    inputs, attributes = case.inputs(), case.attributes()
    expected = backends.in_torch("paged_attention", *inputs, **attributes)
    query, dense, *metadata = map(backends.to_torch, inputs)
    layers = torch.full((len(dense), 3, *dense.shape[1:]), torch.nan)
    cache = layers[:, 1]
    cache.copy_(dense)
    assert not cache.is_contiguous()
    for _ in range(2):  # the second call is made without the check
        with observed_calls() as calls:
            result = OPS.paged_attention(query, cache, *metadata, **attributes)
        assert_same_bits(backends.to_numpy(result), expected)
        assert [cache.data_ptr() in addresses for _, addresses in calls] == [True]

    key = torch.randn(2, dense.shape[2], dense.shape[4])
    slots = torch.tensor([3, 9])
    for x in (dense, cache):
        OPS.kv_cache_update(x, key, -key, slots, kv_layout="n2hbd")
    assert_same_bits(backends.to_numpy(cache), backends.to_numpy(dense))
    assert layers[:, ::2].isnan().all()

    for x in (cache, dense):  # also where K and V are views of one array
        keys, values = x.unbind(1)
        result = OPS.paged_attention(
            query, keys, *metadata, **attributes | {"kv_layout": "nhbd"}, value_cache=values
        )
        assert_same_bits(
            backends.to_numpy(result),
            backends.to_numpy(OPS.paged_attention(query, x, *metadata, **attributes)),
        )


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_scales_in_the_rows_of_the_cache(dtype: torch.dtype, how: str) -> None:
    """vLLM's rows with scales per token and head: 32 numbers of K, their scale, 32 of V, theirs.
    Inductor of PyTorch 2.9, not of 2.13, makes wrong programs of views with another dtype."""
    num_blocks, block_size, num_kv_heads, head_size = 8, 4, 2, 32
    rows = torch.zeros(num_blocks, num_kv_heads, block_size, 2 * (head_size + 4), dtype=torch.uint8)
    key, value = torch.randn(2, 5, num_kv_heads, head_size)
    slots = torch.tensor([12, 13, 14, 15, 4])
    query, num_seqs = torch.randn(2, 4, head_size), torch.tensor([1], dtype=torch.int32)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([5], [[3, 1]], [0, 2])]

    def views(rows: torch.Tensor) -> list[torch.Tensor]:
        halves = rows.unflatten(-1, (2, head_size + 4)).unbind(-2)
        scales = [half[..., head_size:].view(torch.float32).squeeze(-1) for half in halves]
        return [x[..., :head_size].view(dtype) for x in halves] + [x.mT for x in scales]

    def step(*caches: torch.Tensor) -> torch.Tensor:
        cache, value_cache, k_scale, v_scale = caches
        kept = {"value_cache": value_cache, "kv_layout": "nhbd"}
        made = {"k_scale_cache": k_scale, "v_scale_cache": v_scale}
        OPS.kv_cache_update(cache, key, value, slots, **kept, **made)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return OPS.paged_attention(query, cache, *numbers, num_seqs, 0.2, **kept, **scales)

    dense = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in views(rows)]
    expected = step(*dense)

    def step_on_rows(rows: torch.Tensor) -> torch.Tensor:
        return step(*views(rows))

    function = step_on_rows
    if how != "eager":
        function = torch.compile(step_on_rows, fullgraph=True, backend=how)
    for _ in range(2):  # the second call is made without the check
        assert torch.equal(function(rows), expected)
    for strided, contiguous in zip(views(rows), dense, strict=True):
        assert torch.equal(strided.float(), contiguous.float())
    assert dense[2].count_nonzero() == 5 * num_kv_heads


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_nvfp4_in_pages(how: str) -> None:
    """vLLM's pages: codes of K, their scales, codes of V, theirs; in each, head by head, a row for
    each position."""
    num_blocks, block_size, num_kv_heads, head_size = 8, 4, 2, 32
    rows = num_kv_heads * block_size
    sizes = 2 * [rows * head_size // 2, rows * head_size // 16]
    pages = torch.zeros(num_blocks, sum(sizes), dtype=torch.uint8)
    key, value = torch.randn(2, 5, num_kv_heads, head_size)
    slots = torch.tensor([12, 13, 14, 15, 4])
    query, num_seqs = torch.randn(2, 4, head_size), torch.tensor([1], dtype=torch.int32)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([5], [[3, 1]], [0, 2])]
    given = {"k_global": torch.tensor(0.01), "v_global": torch.tensor([0.02]), "codes": "e2m1"}

    def views(pages: torch.Tensor) -> list[torch.Tensor]:
        regions = [
            x.unflatten(1, (num_kv_heads, block_size, -1)) for x in pages.split(sizes, dim=1)
        ]
        scales = [x.view(torch.float8_e4m3fn).transpose(1, 2) for x in regions[1::2]]
        return [*regions[::2], *scales]

    def step(*caches: torch.Tensor) -> torch.Tensor:
        cache, value_cache, k_scale, v_scale = caches
        kept = {"value_cache": value_cache, "kv_layout": "nhbd", **given}
        made = {"k_scale_cache": k_scale, "v_scale_cache": v_scale}
        OPS.kv_cache_update(cache, key, value, slots, **kept, **made)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return OPS.paged_attention(query, cache, *numbers, num_seqs, 0.2, **kept, **scales)

    dense = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in views(pages)]
    expected = step(*dense)

    def step_on_pages(pages: torch.Tensor) -> torch.Tensor:
        return step(*views(pages))

    function = step_on_pages
    if how != "eager":
        function = torch.compile(step_on_pages, fullgraph=True, backend=how)
    for _ in range(2):  # the second call is made without the check
        assert torch.equal(function(pages), expected)
    for strided, contiguous in zip(views(pages), dense, strict=True):
        assert torch.equal(strided.float(), contiguous.float())
    assert dense[2].float().count_nonzero() == 5 * num_kv_heads * head_size / 16


def test_a_scale_for_each_head_may_be_strided_or_repeated() -> None:
    query, cache, *rest = tensors(attention())
    cache = (cache * 20).to(torch.int8)
    of_heads = torch.tensor([0.1, 9, 0.3, 9])[::2]
    for_all = torch.tensor(0.2)
    expected = OPS.paged_attention(
        *(query, cache, *rest, 0.5), k_scale=of_heads.contiguous(), v_scale=for_all
    )
    shape = (*cache.shape[:2], 2)
    for k_scale in (of_heads, of_heads.expand(shape)):
        for v_scale in (for_all, for_all.expand(2), for_all.expand(shape)):
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            with observed_calls() as calls:
                found = OPS.paged_attention(query, cache, *rest, 0.5, **scales)
            assert torch.equal(found, expected)
            assert [x.data_ptr() in addresses for x in (k_scale, v_scale) for _, addresses in calls]


def test_strided_scales_of_a_latent_cache() -> None:
    query, cache = torch.randn(1, 2, 16), torch.randint(-9, 9, (4, 2, 16), dtype=torch.int8)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([5], [[1, 2, 0]], [0, 1], [1])]
    scales = torch.rand(4, 2, 2)[..., :1]
    found, expected = (
        OPS.paged_attention(query, cache, *numbers, 0.25, k_scale=x, value_head_size=8)
        for x in (scales, scales.contiguous())
    )
    assert torch.equal(found, expected)


def test_keys_of_int8_and_values_of_int4_in_the_rows_of_one_tensor() -> None:
    """48 bytes for a head: 32 numbers of K, then 32 of V, two in each."""
    rows = torch.randint(0, 256, (8, 4, 2, 48), dtype=torch.uint8)
    caches = rows[..., :32].view(torch.int8), rows[..., 32:]
    query, key = torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    metadata = [torch.tensor(x, dtype=torch.int32) for x in ([9], [[5, 2, 7]], [0, 3], [1])]
    slots, scales = (
        torch.tensor([10, 11, 28]),
        {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor(0.3)},
    )

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return OPS.paged_attention(query, keys, *metadata, 0.2, value_cache=values, **scales)

    dense = [x.clone() for x in caches]
    for keys, values in (dense, caches):
        OPS.kv_cache_update(keys, key, -key, slots, value_cache=values, **scales)
    for cache, right in zip(caches, dense, strict=True):
        assert torch.equal(cache, right)
    for run in (attend, torch.compile(attend, backend="aot_eager")):
        assert torch.equal(run(*caches), attend(*dense))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_requires_grad_without_grad_mode(mode: Any) -> None:
    query, *rest = tensors(attention())
    with mode():
        assert OPS.paged_attention(query.requires_grad_(), *rest, 0.5).shape == query.shape


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_autograd_is_refused(device: str) -> None:
    if device == "xla":
        pytest.importorskip("torch_xla")
    query, *rest = (x.to(device) for x in tensors(attention()))
    with pytest.raises(NotImplementedError, match="^paged_attention: inference only.*no_grad"):
        OPS.paged_attention(query.requires_grad_(), *rest, 0.5)
    cache, key, *rest = (x.to(device) for x in tensors(update()))
    with pytest.raises(NotImplementedError, match="^kv_cache_update: inference only"):
        OPS.kv_cache_update(cache, key.requires_grad_(), *rest)


def derivatives() -> dict[str, Any]:
    """Every way to a derivative of a function at a tensor."""
    func = torch.func

    def forward_mode(function: Any, x: torch.Tensor) -> Any:
        with forward_ad.dual_level(), torch.no_grad():
            return function(forward_ad.make_dual(x, x))

    return {
        "grad": lambda function, x: func.grad(function)(x),
        "vjp": lambda function, x: func.vjp(function, x),
        "jvp": lambda function, x: func.jvp(function, (x,), (x,)),
        "linearize": lambda function, x: func.linearize(function, x),
        "hessian": lambda function, x: func.hessian(function)(x),
        "vmap-of-grad": lambda function, x: func.vmap(func.grad(function))(x[None]),
        "forward": forward_mode,
    }


@pytest.mark.parametrize("name", derivatives())
def test_derivatives_are_refused(name: str) -> None:
    query, *rest = tensors(attention())
    cache, key, *others = tensors(update())
    functions = {
        "paged_attention": (lambda x: OPS.paged_attention(x, *rest, 0.5).sum(), query),
        "kv_cache_update": (lambda x: (OPS.kv_cache_update(cache, x, *others), x.sum())[1], key),
        "simple_add": (lambda x: OPS.simple_add(x, x).sum(), query),
    }
    for op, (function, x) in functions.items():
        with pytest.raises(NotImplementedError, match=f"^{op}: inference only, it has no deriv"):
            derivatives()[name](function, x)


def test_constant_operands_inside_grad() -> None:
    operands, cache_operands = tensors(attention()), tensors(update())

    def function(x: torch.Tensor) -> torch.Tensor:
        OPS.kv_cache_update(*cache_operands)
        return (x * OPS.paged_attention(*operands, 0.5)).sum()

    x = torch.ones_like(operands[0])
    assert torch.equal(torch.func.grad(function)(x), OPS.paged_attention(*operands, 0.5))
    assert cache_operands[0].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_update_increments_cache_versions(mode: Any) -> None:
    cache, key, value, slots = tensors(update())
    keys, values = cache[:, :, 0::2].clone(), cache[:, :, 1::2].clone()
    keywords = {name: backends.to_torch(x) for name, x in split(rotated_update())[1].items()}
    with mode():
        OPS.kv_cache_update(cache.clone(), key, value, slots, **keywords)
        OPS.kv_cache_update(cache, key, value, slots)
        OPS.kv_cache_update(keys, key, value, slots, value_cache=values)
    assert [x._version for x in (cache, keys, values, key)] == [1, 1, 1, 0]
    assert [x._version for x in keywords.values()] == [1, 0, 0]


def test_autograd_notices_overwritten_values() -> None:
    cache, *rest = tensors(update())
    factor = torch.ones((), requires_grad=True)
    product = (cache * factor).sum()
    OPS.kv_cache_update(cache, *rest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_tensors_are_only_updated_in_inference_mode() -> None:
    _, *rest = tensors(update())
    with torch.inference_mode():
        cache, keys, values = (torch.zeros(4, 2, heads, 8) for heads in (4, 2, 2))
        OPS.kv_cache_update(cache, *rest)
    expected = cache.clone()
    rule = "must be a normal tensor outside of torch.inference_mode"
    with pytest.raises(RuntimeError, match=f"^kv_cache_update: kv_cache {rule}"):
        OPS.kv_cache_update(cache, -rest[0], *rest[1:])
    with pytest.raises(RuntimeError, match=f"^kv_cache_update: value_cache {rule}"):
        OPS.kv_cache_update(torch.zeros(4, 2, 2, 8), *rest, value_cache=values)
    keywords = {name: backends.to_torch(x) for name, x in split(rotated_update())[1].items()}
    with torch.inference_mode():
        keywords["query"] = keywords["query"].clone()
    with pytest.raises(RuntimeError, match=f"^kv_cache_update: query {rule}"):
        OPS.kv_cache_update(torch.zeros(4, 2, 4, 8), *rest, **keywords)
    assert (keywords["query"] == 1).all()
    assert torch.equal(cache, expected) and not keys.any() and not values.any()


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.id)
def test_paged_attention_on_cuda_tensors(case: Case, cuda: Any) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    overload, keywords = overload_of("paged_attention", attributes)
    arrays, options = split_keywords(keywords)
    on_cuda = {name: backends.to_torch(x) for name, x in arrays.items()}
    result = overload.redispatch(cuda, *map(backends.to_torch, inputs), **on_cuda, **options)
    result = (
        tuple(map(backends.to_numpy, result)) if len(result) == 2 else backends.to_numpy(result)
    )
    assert_close_on_cuda(result, inputs, attributes)


def test_kv_cache_update_on_cuda_tensors(cuda: Any) -> None:
    operands, _ = split(update())
    on_cpu, on_cuda = (list(map(backends.to_torch, operands)) for _ in range(2))
    OPS.kv_cache_update(*on_cpu)
    OPS._kv_cache_update_mutable.default.redispatch(cuda, *on_cuda)
    assert torch.equal(on_cuda[0], on_cpu[0])
    strided = torch.zeros_like(on_cuda[0]).transpose(0, 1).contiguous().transpose(0, 1)
    OPS._kv_cache_update_mutable.default.redispatch(cuda, strided, *on_cuda[1:])
    assert torch.equal(strided, on_cpu[0])


def test_simple_add_on_cuda_tensors(cuda: Any) -> None:
    a = torch.arange(5.0)
    assert torch.equal(OPS.simple_add.default.redispatch(cuda, a, a), a + a)


def test_tensors_on_two_devices(cuda: Any) -> None:
    a = torch.arange(5.0)
    message = "^simple_add: all tensors must be on one device; got b on meta beside a on cpu. Move "
    message += r"one with to\(device\)$"
    with pytest.raises(ValueError, match=message):
        OPS.simple_add.default.redispatch(cuda, a, a.to("meta"))


@pytest.mark.parametrize("op", SOUND)
def test_meta_tensor_among_cpu_tensors(op: str) -> None:
    """It would choose the fake kernel, which returns memory that nothing was written to."""
    operands, attributes = split(SOUND[op]())
    for i in range(len(operands)):
        tensors = [backends.to_torch(x) for x in operands]
        tensors[i] = tensors[i].to("meta")
        with pytest.raises(ValueError, match=f"^{op}: all tensors must be on one device; got "):
            getattr(OPS, op)(*tensors, **attributes)


def test_a_platform_without_handlers() -> None:
    call = simple_add.check(*(ArraySpec((2,), "float32"),) * 2)
    with pytest.raises(
        NotImplementedError, match="^simple_add: this build has no handlers for tpu"
    ):
        eager.handler_of(call, "tpu")


def test_set_num_threads_bounds_the_pool() -> None:
    script = """
        import os, torch, torch_frontend
        query, cache = torch.randn(64, 8, 64), torch.randn(8, 16, 16, 64)
        metadata = [torch.tensor(x, dtype=torch.int32) for x in ([128], [list(range(8))], [0, 64], 1)]
        started = []
        for num_threads in (1, 2, 2, 1):
            torch.set_num_threads(num_threads)
            before = len(os.listdir("/proc/self/task"))
            torch.ops.xla_gpu.paged_attention(query, cache, *metadata, 0.1)
            started.append(len(os.listdir("/proc/self/task")) - before)
        assert started == [0, min(1, os.cpu_count()), 0, 0], started
    """
    assert scripts.output(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == []


PERSISTENT = """
    import sys
    import torch, torch_frontend
    from torch._dynamo.utils import counters

    operands = [torch.arange(512.0).reshape(1, 8, 64).sin(), torch.arange(65536.0).sin()]
    operands[1] = operands[1].reshape(16, 16, 4, 64)
    for x in ([45], [[7, 2, 9]], [0, 1], [1]):
        operands.append(torch.tensor(x, dtype=torch.int32))
    for scale in map(float, sys.argv[1:]):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: torch.ops.xla_gpu.paged_attention(*x, scale) + 1)
        print(scale, compiled(*operands).numpy().tobytes().hex())
    print(*(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")))
"""


def test_programs_in_inductors_cache() -> None:
    """Another process finds the programs and does not confuse those of two scales."""
    run = partial(scripts.output, PERSISTENT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    scales = [f"0.{digit}{os.getpid()}" for digit in (2, 5)]  # that no other process has
    small, large, counts = run(*scales)
    assert small.split()[1] != large.split()[1] and counts == "0 2"
    assert run(*reversed(scales)) == [large, small, "2 0"]


def test_decode_loop_compiles_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    tables, starts = torch.from_numpy(DECODE_TABLE), torch.tensor([0, 1], dtype=torch.int32)

    @torch.compile(backend=counter, fullgraph=True)
    def step(cache: torch.Tensor, token: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        slot, length, num_seqs = numbers
        OPS.kv_cache_update(cache, token[:, :2], token[:, :2] * 2, slot)
        return OPS.paged_attention(token, cache, length, tables, starts, num_seqs, 0.5, None, 30.0)

    torch._dynamo.reset()
    cache = torch.zeros(16, 16, 4, 8)
    for arrays in decode_steps():
        step(cache, *map(torch.from_numpy, arrays))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "parent_script",
    [
        "pass",
        "run()",
        "torch.ones(4_000_000) + 1",
        "torch.ones(4_000_000) + 1; run()",
        "import jax; jax.numpy.ones(4_000_000) + 1",
    ],
    ids=["no-call", "a-call", "a-torch-op", "torch-op-and-call", "jax"],
)
def test_calls_after_a_fork(parent_script: str) -> None:
    """A forked child has none of the parent's threads, whatever started them."""
    script = """
        import os, signal, sys, torch, torch_frontend
        torch.set_num_threads(4)
        query, cache = torch.randn(64, 8, 64), torch.randn(8, 16, 16, 64)
        metadata = [torch.tensor(x, dtype=torch.int32) for x in ([128], [list(range(8))], [0, 64], 1)]
        run = lambda: torch.ops.xla_gpu.paged_attention(query, cache, *metadata, 0.1).numpy().tobytes()
        exec(sys.argv[1])
        for generation in range(2):
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                os._exit(0)
            signal.alarm(250)
            result = run()
        torch.set_num_threads(1)
        os._exit(run() != result)  # JAX cannot be torn down in a child
    """
    assert scripts.output(script, parent_script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == []
