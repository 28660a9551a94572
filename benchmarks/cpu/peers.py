"""Other libraries' attention on the CPU. What only they need (contiguous K and V, another cache
layout, a plan) is prepared beforehand and not timed."""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import (
    Contestant,
    DoesNotApply,
    Jitted,
    Maker,
    gathered,
    takes_8_bits,
    takes_latent,
    to_jax,
    torch_sdpa,
)
from benchmarks.workloads import DTYPES, SCALE, Workload


@takes_latent
def torch_sdpa_grouped(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """torch SDPA over gathered K and V, with the query heads of a GQA group as query tokens."""
    if workload.kind != "decode":
        raise DoesNotApply("anything but decoding")
    key, value = gathered(workload, operands)
    model = workload.model
    query = operands[0].unflatten(1, (model.num_kv_heads, -1))
    scale = model.attributes()["scale"]

    def run() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return out.flatten(1, 2)

    return run


@lru_cache(maxsize=1)
def _compiled_flex(workload: Workload) -> tuple[Any, Any]:
    """The function, and its mask for causal attention."""
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415
        create_block_mask,
        flex_attention,
    )

    q_len, context = workload.sequences[0]

    def causal(_b: Any, _h: Any, row: Any, column: Any) -> Any:
        return row + context - q_len >= column

    torch.compiler.reset()  # or it recompiles for any shape, and stops after a few
    mask = create_block_mask(causal, None, None, q_len, context, "cpu") if q_len > 1 else None
    return torch.compile(flex_attention, dynamic=False), mask


def torch_flex(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """torch's flex_attention over gathered K and V, compiled by Inductor for these shapes."""
    key, value = gathered(workload, operands)
    q_len, _ = workload.sequences[0]
    query = operands[0].unflatten(0, (-1, q_len)).transpose(1, 2)
    scale = workload.model.attributes()["scale"]
    attend, mask = _compiled_flex(workload)

    def run() -> torch.Tensor:
        with torch.no_grad():
            out = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def ejkernel(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """ejKernel's unified attention, written in JAX, over separate K and V."""
    from ejkernel.kernels._xla.unified_attention import unified_attention  # noqa: PLC0415

    query, cache, lengths, tables, starts, _ = operands
    model = workload.model
    if max(q_len for q_len, _ in workload.sequences) > 2048:
        raise DoesNotApply("so many query tokens within minutes")
    attend = partial(
        unified_attention,
        softmax_scale=model.attributes()["scale"],
        sliding_window=model.sliding_window,
        logits_soft_cap=model.soft_cap,
    )
    caches = (cache[:, :, 0::2], cache[:, :, 1::2])
    tables = tables.clamp(max=len(cache) - 1)
    return Jitted(attend, *map(to_jax, (query, *caches, lengths, tables, starts)))


def jax_numpy(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """Paged attention written with jax.numpy, compiled by XLA."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    q_lens = {q_len for q_len, _ in workload.sequences}
    if len(q_lens) != 1 or workload.kind == "prefill":
        raise DoesNotApply("query tokens in number, for its memory")
    model, (q_len,) = workload.model, q_lens
    scale = model.attributes()["scale"]
    group = model.num_heads // model.num_kv_heads

    def attend(query: Any, cache: Any, lengths: Any, tables: Any) -> Any:
        rows = cache.at[tables].get(mode="clip")
        rows = rows.reshape(len(tables), -1, model.num_kv_heads, 2, model.head_size)
        key, value = rows[:, :, :, 0], rows[:, :, :, 1]
        shape = (len(tables), q_len, model.num_kv_heads, group, model.head_size)
        query = query.reshape(shape)
        logits = scale * jnp.einsum(
            "bqhgd,bchd->bhgqc", query, key, preferred_element_type=jnp.float32
        )
        if model.soft_cap:
            logits = model.soft_cap * jnp.tanh(logits / model.soft_cap)
        position = lengths[:, None] - q_len + jnp.arange(q_len)
        ahead = position[:, :, None] - jnp.arange(key.shape[1])
        seen = (ahead >= 0) & (ahead < (model.sliding_window or 2**30))
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        out = jnp.einsum("bhgqc,bchd->bqhgd", weights, value)
        return out.reshape(-1, model.num_heads, model.head_size)

    return Jitted(attend, *map(to_jax, operands[:4]))


@cache
def _load_vllm() -> None:
    """Loads vLLM's operators without the package: they need only one file of it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'vllm'")
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    if torch.cpu._is_avx512_bf16_supported():
        name = "_C"  # vLLM's own choice: the same with bfloat16 products
    (path,) = Path(spec.origin).parent.glob(f"{name}.*so")
    torch.ops.load_library(path)


@takes_8_bits
@takes_latent
def vllm(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """vLLM's CPU attention, in its own layout: [blocks, kv heads, 2 x block size, head size]."""
    if workload.model.value_head_size is not None:
        return _vllm_latent(workload, operands)
    kinds = {None: "auto", "float8_e4m3fn": "fp8_e4m3"}
    if workload.cache_dtype not in kinds:
        raise DoesNotApply(f"a cache of {workload.cache_dtype}")
    kind = kinds[workload.cache_dtype]
    scales = (1.0, 1.0) if kind == "auto" else (SCALE, SCALE)
    _load_vllm()
    ops, model = torch.ops._C, workload.model
    query, cache, lengths, tables, starts, _ = operands
    block_size, isa = 32, "vec"  # vLLM's choice on x86-64 without AMX
    kv = torch.zeros(
        (
            sum(-(-context // block_size) for _, context in workload.sequences),
            *(model.num_kv_heads, 2 * block_size, model.head_size),
        ),
        dtype=cache.dtype if kind == "auto" else torch.uint8,
    )
    key, value = kv.chunk(2, dim=2)
    own_tables = torch.zeros(len(lengths), int(lengths.max()) // block_size + 1, dtype=torch.int32)
    first = 0
    for s, (_, context) in enumerate(workload.sequences):
        blocks = tables[s, : -(-context // workload.block_size)].long()
        rows = _numbers(workload, cache, blocks)[:context]
        count = -(-context // block_size)
        own_tables[s, :count] = torch.arange(first, first + count)
        slots = torch.arange(context) + first * block_size
        ops.cpu_attn_reshape_and_cache(
            rows[:, 0::2].contiguous(), rows[:, 1::2].contiguous(), key, value, slots, isa,
            *scales, kind,
        )  # fmt: skip
        first += count
    window = model.sliding_window or -1
    plan = ops.get_scheduler_metadata(
        len(lengths), model.num_heads, model.num_kv_heads, model.head_size, lengths, query.dtype,
        starts, True, window, isa, True, None, kind,
    )  # fmt: skip
    scale, cap = model.attributes()["scale"], model.soft_cap or 0.0

    def run() -> torch.Tensor:
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query, key, value, out, starts, lengths, scale, True, None, window, own_tables, cap,
            plan, None, None, *scales, kind,
        )  # fmt: skip
        return out

    return run


def _vllm_latent(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """vLLM's latent decoding, which takes blocks of 16 only. A batch has no padding."""
    if workload.kind != "decode" or workload.cache_dtype is not None:
        raise DoesNotApply("anything but decoding of latent rows with the query's dtype")
    _load_vllm()
    query, cache, lengths, tables, _, _ = operands
    blocks = [-(-context // 16) for _, context in workload.sequences]
    kv = torch.zeros(sum(blocks), 16, workload.model.head_size, dtype=cache.dtype)
    own_tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    order = torch.randperm(len(kv), generator=torch.Generator().manual_seed(0)).int()
    for s, (own, (_, context)) in enumerate(
        zip(order.split(blocks), workload.sequences, strict=True)
    ):
        rows = cache[tables[s, : -(-context // workload.block_size)].long()].flatten(0, 1)
        own_tables[s, : len(own)] = own
        slots = (own.long()[:, None] * 16 + torch.arange(16)).flatten()[:context]
        kv.flatten(0, 1)[slots] = rows[:context]
    model = workload.model
    scale, columns = model.attributes()["scale"], model.value_head_size or model.head_size

    def run() -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], columns)
        torch.ops._C.mla_decode_kvcache(out, query, kv, scale, own_tables, lengths)
        return out

    return run


def _numbers(workload: Workload, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The K and V of some blocks in the workload's dtype, [positions, 2 x kv heads, head size]."""
    if workload.cache_dtype is None:
        return cache[blocks].flatten(0, 1)
    bits = cache.view(torch.uint8)[blocks].flatten(0, 1)  # PyTorch cannot index 8-bit floats
    return (bits.view(cache.dtype).float() * SCALE).to(DTYPES[workload.dtype])


def _openvino_model(workload: Workload, compute: str) -> Any:
    """The operator alone. The plugin sets the cache's shape and dtype when it compiles."""
    import openvino as ov  # noqa: PLC0415
    from openvino import opset13 as opset  # noqa: PLC0415
    from openvino.op import _PagedAttentionExtension  # noqa: PLC0415

    model, longest = workload.model, max(context for _, context in workload.sequences)
    dtype, f32, i32, u8 = getattr(ov.Type, compute), ov.Type.f32, ov.Type.i32, ov.Type.u8
    kv_width = model.num_kv_heads * model.head_size

    def parameter(kind: Any, *shape: int) -> Any:
        return opset.parameter(ov.PartialShape(list(shape)), kind)

    def number(value: float, kind: Any = i32) -> Any:
        return opset.constant(value, dtype=kind)

    def none(kind: Any = i32) -> Any:
        return opset.constant([], dtype=kind)

    parameters = [
        parameter(dtype, -1, model.num_heads * model.head_size),
        *(parameter(dtype, -1, kv_width) for _ in ("key", "value")),
        *(parameter(ov.Type.dynamic, -1, -1, -1, -1) for _ in ("key cache", "value cache")),
        *(parameter(i32, -1) for _ in ("past lengths", "starts", "blocks", "starts of blocks")),
    ]
    constants = [
        number(model.attributes()["scale"], f32),
        number(model.sliding_window or 0),
        none(f32),  # ALiBi
        number(longest),
        none(),  # scores
        *(none(), none(), none(f32)),  # rotation of cached keys
        *(none(f32), number(0), number(0)),  # sparsity
        none(f32),  # sinks
        *(number(0), none(), none(), none()),  # eviction
        none(),  # types of tokens
        *(none(u8), none()),  # bias
    ]
    node = _PagedAttentionExtension([node.output(0) for node in (*parameters, *constants)])
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = model.num_kv_heads
    about["k_head_size"] = about["v_head_size"] = model.head_size
    return ov.Model([node.output(0)], parameters)


@lru_cache(maxsize=1)
def _compiled_openvino(workload: Workload, compute: str, precision: str) -> Any:
    import openvino as ov  # noqa: PLC0415

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": compute,
        "KV_CACHE_PRECISION": precision if workload.cache_dtype is None else "u8",
    }
    return ov.Core().compile_model(_openvino_model(workload, compute), "CPU", config)


@takes_8_bits
def openvino(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """OpenVINO's CPU operator, in its own layout: [blocks, kv heads, block size, head size].

    It also stores K and V of the query tokens. Few processors have float16 arithmetic; without it,
    only the cache is float16, and query and output are float32. The contestant for int8 is its u8,
    which has a scale and a zero point for each group of numbers.
    """
    import openvino as ov  # noqa: PLC0415

    model = workload.model
    if model.soft_cap:
        raise DoesNotApply("a cap")
    if workload.cache_dtype not in (None, "int8"):
        raise DoesNotApply(f"a cache of {workload.cache_dtype}")
    query, cache, _, tables, starts, _ = operands
    precision, capability = {
        "float32": ("f32", "FP32"), "float16": ("f16", "FP16"), "bfloat16": ("bf16", "BF16"),
    }[workload.dtype]  # fmt: skip
    native = capability in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if workload.dtype == "bfloat16" and not native:
        raise DoesNotApply("bfloat16 on this processor")
    compute, dtype = (precision, query.dtype) if native else ("f32", torch.float32)
    compiled = _compiled_openvino(workload, compute, precision)
    request = compiled.create_infer_request()

    def shared(tensor: torch.Tensor) -> Any:
        if tensor.dtype != torch.bfloat16:
            return ov.Tensor(tensor.numpy(), shared_memory=True)
        return ov.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), ov.Type.bf16)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def prepare(arrays: list[torch.Tensor]) -> torch.Tensor:
        for i, array in enumerate(arrays):
            request.set_input_tensor(i, shared(array))
        out = torch.empty_like(arrays[0])
        request.set_output_tensor(0, shared(out))
        return out

    shapes = [compiled.input(i).partial_shape for i in (3, 4)]
    block_size = shapes[1][2].get_length()  # u8 keys have their scales in rows of their own
    first = [0]
    for _, context in workload.sequences:
        first.append(first[-1] + -(-context // block_size))
    key, value = (
        torch.zeros(
            (first[-1], *(size.get_length() for size in list(shape)[1:])),
            dtype=cache.dtype if workload.cache_dtype is None else torch.uint8,
        )
        for shape in shapes
    )
    fresh = []
    for s, (q_len, context) in enumerate(workload.sequences):
        blocks = tables[s, : -(-context // workload.block_size)].long()
        rows = _numbers(workload, cache, blocks)[:context]
        fresh.append(rows[context - q_len :].to(dtype))
        rows = rows[: context - q_len]
        own = slice(first[s], first[s + 1])
        if workload.cache_dtype is None:
            past = torch.zeros(
                (own.stop - own.start) * block_size, *rows.shape[1:], dtype=rows.dtype
            )
            past[: len(rows)] = rows
            past = past.unflatten(0, (-1, block_size)).transpose(1, 2)
            key[own], value[own] = past[:, 0::2], past[:, 1::2]
        else:  # only the operator knows how it stores them
            rows = rows.to(dtype)
            arrays = [
                torch.zeros(len(rows), query[0].numel(), dtype=dtype),
                *(rows[:, n::2].flatten(1).contiguous() for n in (0, 1)),
                *(key[own], value[own]),
                integers(0),
                integers(0, len(rows)),
                torch.arange(own.stop - own.start).int(),
                integers(0, own.stop - own.start),
            ]
            written = prepare(arrays)  # OpenVINO does not keep it alive
            request.infer(share_outputs=True)
            del written
    new = torch.cat(fresh)
    arrays = [
        query.to(dtype).flatten(1),
        *(new[:, n::2].flatten(1).contiguous() for n in (0, 1)),
        *(key, value),
        integers(*(context - q_len for q_len, context in workload.sequences)),
        starts[: len(first)],
        torch.arange(first[-1]).int(),
        integers(*first),
    ]
    result = prepare(arrays).unflatten(1, (model.num_heads, model.head_size))

    def run(_: Any = arrays) -> torch.Tensor:  # OpenVINO does not keep the arrays alive
        request.infer(share_outputs=True)
        return result

    return run


def vllm_update(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, num_slots: int
) -> Contestant | None:
    """Writes keys and values into slots of vLLM's own layout; None if vLLM is not installed."""
    try:
        _load_vllm()
    except ModuleNotFoundError:
        return None
    block_size, (num_kv_heads, head_size) = 32, key.shape[1:]
    kv = torch.zeros(
        num_slots // block_size, num_kv_heads, 2 * block_size, head_size, dtype=key.dtype
    )
    caches = kv.chunk(2, dim=2)
    return lambda: torch.ops._C.cpu_attn_reshape_and_cache(key, value, *caches, slots, "vec")


PEERS: dict[str, Maker] = {
    "vLLM": vllm,
    "OpenVINO": openvino,
    "torch SDPA, grouped (contiguous)": torch_sdpa_grouped,
    "torch SDPA (contiguous)": torch_sdpa,
    "torch flex attention (contiguous)": torch_flex,
    "ejKernel, XLA": ejkernel,
    "jax.numpy": jax_numpy,
}
