"""ragged_paged_attention: calls written for the TPU kernels agree with the oracle."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from harness.arrays import DTYPES
from harness.compare import assert_same_bits
from jax_frontend.compat import _common
from tests.cases.all import SHORT_CASES
from tests.cases.bad_calls import assert_says
from tests.cases.case import MIXED, Case
from tests.support import backends, scripts
from tests.support.tpu_calls import inputs, oracle

F32, I32 = np.float32, np.int32

CALLS: dict[str, tuple[Any, ...]] = {
    "float32": ("float32", 8, 2, 128, (4, 1, 128)),
    "bfloat16, two rows packed": ("bfloat16", 8, 2, 128, (2, 2, 128)),
    "a padded head_dim": ("float32", 6, 3, 80, (6, 1, 128)),
    "padded heads": ("float32", 6, 3, 32, (4, 2, 128)),
    "head_dim 64, K and V in one row": ("bfloat16", 8, 2, 64, (1, 2, 128)),
    # In each of these two pairs, the caches of both functions have one shape.
    "one head of 64": ("bfloat16", 5, 1, 64, (1, 2, 128)),
    "one head of 64, K and V in one row": ("bfloat16", 5, 1, 64, (1, 2, 128)),
    "two heads of 8 bits": ("bfloat16", 6, 2, 64, (1, 4, 128), "float8_e4m3fn"),
    "two heads of 8 bits, K and V in one row": ("bfloat16", 6, 2, 64, (1, 4, 128), "float8_e4m3fn"),
    "one head of 8 bits, K and V in one row": ("bfloat16", 5, 1, 64, (1, 4, 128), "float8_e5m2"),
}


def function(name: str) -> Any:
    if "one row" in name:
        return jax_frontend.ragged_paged_attention_hd64
    return jax_frontend.ragged_paged_attention_v3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 6, "soft_cap": 3.0},
        {"use_causal_mask": False},
        {"use_causal_mask": False, "sliding_window": 4},
        {"k_scale": 0.5, "v_scale": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CALLS)
def test_v3(name: str, options: dict[str, Any]) -> None:
    call = inputs(*CALLS[name])
    is_one_row = "one row" in name
    sinks = np.random.default_rng(1).standard_normal(call["queries"].shape[1]).astype(F32)
    our_options = {k: v for k, v in options.items() if k in ("sliding_window", "soft_cap")}
    expected, cache = oracle(
        call,
        is_one_row=is_one_row,
        scale=0.2 * options.get("k_scale", 1.0),
        causal=options.get("use_causal_mask", True),
        sinks=sinks,
        **our_options,
    )
    arrays = {name: jnp.asarray(x) for name, x in call.items()}
    output, updated = function(name)(
        **arrays, attention_sink=jnp.asarray(sinks), sm_scale=0.2, debug_mode=False, **options
    )
    assert arrays["kv_cache"].is_deleted()  # donated
    assert_same_bits(np.asarray(updated), cache.astype(updated.dtype))
    expected *= options.get("v_scale", 1.0)
    tolerance = 0.02 if call["queries"].dtype.itemsize == 2 else 1e-5
    np.testing.assert_allclose(
        np.asarray(output, np.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", CALLS)
def test_v3_does_not_copy_the_cache(name: str) -> None:
    call = {k: jnp.asarray(x) for k, x in inputs(*CALLS[name]).items()}
    attend = jax.jit(function(name), donate_argnames="kv_cache")
    program = attend.lower(**call).compile().as_text()
    size = "[" + ",".join(map(str, call["kv_cache"].shape)) + "]"
    copies = [line for line in program.splitlines() if " copy(" in line and size in line]
    assert "xla_gpu_kv_cache_update" in program and copies == []


def test_v3_without_an_update() -> None:
    call = {k: jnp.asarray(x) for k, x in inputs(*CALLS["float32"]).items()}
    expected, cache = jax_frontend.ragged_paged_attention_v3(**call)
    call |= {"kv_cache": cache + 0, "keys": call["keys"] * 0}
    output, unchanged = jax_frontend.ragged_paged_attention_v3(**call, update_kv_cache=False)
    assert_same_bits(np.asarray(output), np.asarray(expected))
    assert_same_bits(np.asarray(unchanged), np.asarray(cache))


def test_v3_in_a_jitted_function_with_another_output_dtype() -> None:
    call = {k: jnp.asarray(x) for k, x in inputs(*CALLS["float32"]).items()}
    step = jax.jit(
        lambda call: jax_frontend.ragged_paged_attention_v3(**call, out_dtype=jnp.bfloat16)
    )
    output, _ = step(call)
    assert output.dtype == jnp.bfloat16
    expected, _ = jax_frontend.ragged_paged_attention_v3(**call)
    assert_same_bits(np.asarray(output), np.asarray(expected.astype(jnp.bfloat16)))


HD64 = "head_dim 64, K and V in one row"
PACKED = "kv_cache must have shape [num_pages, page_size, rows // packing, packing, "
TWO_HEADS = "width], with at least {}num_kv_heads=2 rows and a width of at least {}head_dim=64"
PAGES = "page_indices must have shape [max_seqs=6 * pages_per_seq], of at least one page"


def bf16(*shape: int) -> np.ndarray:
    return np.zeros(shape, DTYPES["bfloat16"])


def refused(base_call: str, message: str, function: Any = None, **changes: Any) -> Any:
    """A call that is changed, and the error. `function`: the other one, if not that of the call."""
    name = "-".join([base_call, *(f"{k}={[*v.shape]}" for k, v in changes.items())])
    return pytest.param(base_call, function, changes, message, id=name)


BAD_CALLS = [
    refused(
        HD64,
        f"{PACKED}{TWO_HEADS.format('2 * ', '')}; got [40, 8, 1, 2, 128]",
        jax_frontend.ragged_paged_attention_v3,
    ),
    refused(
        HD64,
        f"{PACKED}{TWO_HEADS.format('', '2 * ')}; got [40, 8, 1, 1, 128]",
        kv_cache=bf16(40, 8, 1, 1, 128),
    ),
    refused(
        "a padded head_dim",
        "queries must have shape [num_tokens, num_q_heads, 64]; got [22, 6, 80]",
        jax_frontend.ragged_paged_attention_hd64,
    ),
    refused(HD64, f"{PACKED}128]; got [40, 8, 1, 2, 256]", kv_cache=bf16(40, 8, 1, 2, 256)),
    refused(
        "float32",
        f"{PACKED}width], with at least 2 * num_kv_heads=2 rows and a width of at least head_dim=128; "
        "got [40, 8, 4, 128]",
        kv_cache=np.zeros((40, 8, 4, 128), F32),
    ),
    refused(
        "float32",
        "queries must have shape [num_tokens, num_q_heads, head_dim]; got [22, 128]",
        queries=np.zeros((22, 128), F32),
    ),
    refused(
        "float32",
        "keys must have shape [num_tokens=22, num_kv_heads, head_dim=128]; got [22, 2, 64]",
        keys=np.zeros((22, 2, 64), F32),
    ),
    refused(
        "float32",
        "queries' num_q_heads must be a multiple of num_kv_heads=3; got 8",
        keys=np.zeros((22, 3, 128), F32),
    ),
    refused(
        "float32",
        "values must have shape [22, 2, 128]; got [22, 1, 128]",
        values=np.zeros((22, 1, 128), F32),
    ),
    refused(
        "padded heads",
        "attention_sink must have shape [6]; got [5]",
        attention_sink=np.zeros(5, F32),
    ),
    refused(
        "two heads of 8 bits, K and V in one row",
        "keys must have kv_cache's dtype float8_e4m3fn; got bfloat16. Cast keys to float8_e4m3fn",
        keys=bf16(22, 2, 64),
    ),
    refused("float32", f"{PAGES}; got [6, 5]", page_indices=np.zeros((6, 5), I32)),
    refused("float32", f"{PAGES}; got [29]", page_indices=np.zeros(29, I32)),
    refused("float32", f"{PAGES}; got [0]", page_indices=np.zeros(0, I32)),
    refused(HD64, "cu_q_lens must have shape [7]; got [6]", cu_q_lens=np.zeros(6, I32)),
    refused("float32", "cu_q_lens must have shape [7]; got [0]", cu_q_lens=np.zeros(0, I32)),
    refused("float32", "distribution must have shape [3]; got [2]", distribution=np.zeros(2, I32)),
]


@pytest.mark.parametrize(("base_call", "other", "changes", "message"), BAD_CALLS)
def test_v3_refuses(base_call: str, other: Any, changes: dict[str, Any], message: str) -> None:
    call, attend = inputs(*CALLS[base_call]) | changes, other or function(base_call)
    with pytest.raises((ValueError, TypeError)) as raised:
        attend(**{name: jnp.asarray(x) for name, x in call.items()})
    assert_says(str(raised.value), f"{attend.__name__}: {message}")


# Metadata of three sequences, which is wrong, and the pages that it may write to.
FAULTY: dict[str, tuple[dict[str, list[Any]], set[int]]] = {
    "a length below the number of queries": ({"kv_lens": [1, 5, 5]}, {2, 3}),
    "a length past the table": ({"kv_lens": [100, 5, 5]}, {2, 3}),
    "a negative length": ({"kv_lens": [-3, 5, 5]}, {2, 3}),
    "a page whose slots overflow int32": ({"page_indices": [2**29, 9, 2, 9, 3, 9]}, {2, 3}),
    "a page past the end": ({"page_indices": [10, 9, 2, 9, 3, 9]}, {2, 3}),
    "a negative page": ({"page_indices": [-1, 9, 2, 9, 3, 9]}, {2, 3}),
    "starts that decrease": ({"cu_q_lens": [0, 5, 3, 8]}, {1, 2, 3}),
    "a negative start": ({"cu_q_lens": [-4, 2, 3, 8]}, {1, 2, 3}),
    "a negative number of sequences": ({"distribution": [0, 0, -1]}, set()),
    "too many sequences": ({"distribution": [0, 0, 4]}, set()),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_metadata_writes_to_no_other_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU the attention of the call is an error, and nobody sees the cache. A GPU reports no
    error, and the cache is what the next call reads: here the attention is left out."""
    changes, may_write = FAULTY[name]
    metadata = {
        "kv_lens": [5, 5, 5],
        "page_indices": [1, 9, 2, 9, 3, 9],  # no sequence needs page 9
        "cu_q_lens": [0, 5, 6, 8],
        "distribution": [0, 0, 3],
    }
    new = jnp.ones((8, 1, 16), F32)

    def call(**changed: Any) -> np.ndarray:
        arrays = {key: jnp.array(x, I32) for key, x in (metadata | changed).items()}
        cache = jnp.zeros((10, 8, 2, 1, 16), F32)
        _, cache = jax_frontend.ragged_paged_attention_v3(new, new, new, cache, **arrays)
        return np.asarray(cache)

    assert {*np.flatnonzero(call().any((1, 2, 3, 4)))} == {1, 2, 3}
    with pytest.raises(backends.JAX_ERRORS, match="^INVALID_ARGUMENT"):
        call(**changes)
    _common._update_and_attend.clear_cache()
    monkeypatch.setattr(_common, "paged_attention", lambda queries, *_, **__: queries)
    try:
        cache = call(**changes)
    finally:
        _common._update_and_attend.clear_cache()
    assert {*np.flatnonzero(cache.any((1, 2, 3, 4)))} <= may_write


@pytest.mark.parametrize("name", ["float32", "head_dim 64, K and V in one row"])
def test_v3_mask_value(name: str) -> None:
    attend = function(name)
    call = {k: jnp.asarray(x) for k, x in inputs(*CALLS[name]).items()}
    message = f"^{attend.__name__}: mask_value must be None or at most -10000, .*; got -50.0. Leave mask_value out$"
    with pytest.raises(ValueError, match=message):
        attend(**call, mask_value=-50.0)
    attend(**call, mask_value=-1e4)


def test_v3_refuses_an_unknown_argument() -> None:
    call = {k: jnp.asarray(x) for k, x in inputs(*CALLS["float32"]).items()}
    with pytest.raises(TypeError, match="no argument is called sofd_cap; got 3. Leave"):
        jax_frontend.ragged_paged_attention_v3(**call, sofd_cap=3)


PLAIN_CASES = [
    case for case in SHORT_CASES if [*case.attributes()] == ["scale", "sliding_window", "soft_cap"]
]
assert PLAIN_CASES


def test_both_frontends_have_the_same_arguments() -> None:
    in_jax = inspect.signature(jax_frontend.ragged_paged_attention).parameters
    in_torch = torch.ops.xla_gpu.ragged_paged_attention.default._schema.arguments
    # use_kernel is torch_xla's own.
    assert [x.name for x in in_torch if x.name != "use_kernel"] == [*in_jax]


TORCH = torch.ops.xla_gpu
FRONTENDS: dict[str, tuple[Any, Any, Any]] = {
    "jax": (jnp.asarray, jax_frontend.ragged_paged_attention, jax_frontend.paged_attention),
    "torch": (backends.to_torch, TORCH.ragged_paged_attention, TORCH.paged_attention),
    "torch_xla": (backends.to_xla, TORCH.ragged_paged_attention, TORCH.paged_attention),
}
"""How arrays are made, the function, and what it calls."""


@pytest.mark.parametrize("name", FRONTENDS)
def test_is_paged_attention(name: str) -> None:
    convert, ragged, plain = FRONTENDS[name]
    for case in PLAIN_CASES:
        arrays = [convert(x) for x in case.inputs()]
        scale, window, cap = case.attributes().values()
        result = ragged(
            *arrays, sm_scale=scale, sliding_window=window, soft_cap=cap, num_kv_pages_per_block=8
        )
        assert_same_bits(*map(to_numpy, (result, plain(*arrays, scale, window, cap))))
    result = ragged(*arrays, sm_scale=0.2, k_scale=0.5, v_scale=3.0)
    assert_same_bits(*map(to_numpy, (result, plain(*arrays, 0.1) * 3)))


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_a_traced_scale_multiplies_the_query(soft_cap: float | None) -> None:
    """As Levanter gives it: an array in the query's dtype, within shard_map."""
    case = PLAIN_CASES[0]
    arrays = [jnp.asarray(x) for x in case.inputs()]
    attend = jax.jit(
        jax.shard_map(
            lambda scale, *arrays: jax_frontend.ragged_paged_attention(
                *arrays, sm_scale=scale, soft_cap=soft_cap
            ),
            mesh=jax.make_mesh((1,), ("model",)),
            in_specs=jax.P(),
            out_specs=jax.P(),
        )
    )
    query, *others = arrays
    for dtype in ("float32", "bfloat16"):
        scale = jnp.asarray(0.125, dtype)
        expected = jax_frontend.ragged_paged_attention(
            query * jnp.float32(0.125).astype(query.dtype), *others, sm_scale=1, soft_cap=soft_cap
        )
        assert_same_bits(*map(to_numpy, (attend(scale, *arrays), expected)))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.ones(2, F32), r"sm_scale must have shape \[\]; got \[2\]. It is one number"),
        (I32(1), "sm_scale must have a float dtype; got int32. Cast sm_scale to float32"),
    ],
)
def test_a_wrong_scale(scale: Any, message: str) -> None:
    arrays = [jnp.asarray(x) for x in PLAIN_CASES[0].inputs()]
    with pytest.raises((ValueError, TypeError), match=f"^ragged_paged_attention: {message}$"):
        jax_frontend.ragged_paged_attention(*arrays, sm_scale=jnp.asarray(scale))


def to_numpy(array: Any) -> np.ndarray:
    return backends.to_numpy(array) if isinstance(array, torch.Tensor) else np.asarray(array)


def test_mask_value() -> None:
    case = SHORT_CASES[0]
    arrays = [jnp.asarray(x) for x in case.inputs()]
    tensors = [backends.to_torch(x) for x in case.inputs()]
    for attend, operands in (
        (jax_frontend.ragged_paged_attention, arrays),
        (torch_frontend.ragged_paged_attention, tensors),
        (torch.ops.xla_gpu.ragged_paged_attention, tensors),
    ):
        message = "^ragged_paged_attention: mask_value must be None or at most -10000, .*; got 0.0. Leave mask_value out$"
        with pytest.raises(ValueError, match=message):
            attend(*operands, mask_value=0.0)
        attend(*operands, mask_value=-2.38e38)


@pytest.mark.parametrize("given", [(), ("k_scale",), ("v_scale",), ("k_scale", "v_scale")], ids=str)
def test_a_cache_of_integers_needs_both_factors(given: tuple[str, ...]) -> None:
    case = Case("integers", MIXED, cache_dtype="int8")
    arrays, call = case.inputs(), inputs("float32", 4, 2, 128, (1, 4, 128), "int8")
    factors: dict[str, Any] = dict.fromkeys(given, 0.5)
    v3 = partial(
        jax_frontend.ragged_paged_attention_v3, **{k: jnp.array(x) for k, x in call.items()}
    )
    tensors = [*map(backends.to_torch, arrays)]
    attend = (
        partial(jax_frontend.ragged_paged_attention, *map(jnp.asarray, arrays), sm_scale=0.5),
        partial(torch.ops.xla_gpu.ragged_paged_attention, *tensors, 0.5),
    )
    if len(given) < 2:
        (missing, *_) = [x for x in ("k_scale", "v_scale") if x not in given]
        for function in (v3, *attend):
            with pytest.raises(ValueError, match=f"^paged_attention: {missing} must be given with"):
                function(**factors)
        return
    ones = {name: jnp.float32(1) for name in given}
    expected = jax_frontend.paged_attention(*map(jnp.asarray, arrays), 0.25, **ones) * 0.5
    for function in attend:
        assert_same_bits(np.asarray(function(**factors)), np.asarray(expected))
    output, cache = v3(**factors, sm_scale=0.5)
    wanted, updated = oracle(call, is_one_row=False, scale=0.25)
    assert_same_bits(np.asarray(cache), updated.astype(np.int8))
    np.testing.assert_allclose(np.asarray(output), wanted * 0.5, rtol=1e-5, atol=1e-5)


REPLACED = """
    import torch
    import torch_frontend
    try:
        torch_frontend.replace_tpu_kernels()
    except RuntimeError as error:
        print(error)
    import torch_xla
    import torch_xla.experimental.custom_kernel
    from tests.support import backends
    from tests.cases.all import SHORT_CASES
    for _ in range(2):
        torch_frontend.replace_tpu_kernels()
    inputs = [x for x in SHORT_CASES if x.id == "mixed-f32"][0].inputs()
    expected = backends.in_torch("paged_attention", *inputs, scale=0.5)
    for convert in (backends.to_torch, backends.to_xla):
        result = torch.ops.xla.ragged_paged_attention(*map(convert, inputs), sm_scale=0.5)
        backends.np.testing.assert_array_equal(backends.to_numpy(result), expected)
    print("the same bits")
"""


def test_torch_xla_programs_for_tpus_run_here() -> None:
    assert scripts.output(REPLACED) == [
        "replace_tpu_kernels: torch.ops.xla.ragged_paged_attention is not defined yet; "
        "import torch_xla.experimental.custom_kernel before",
        "the same bits",
    ]
