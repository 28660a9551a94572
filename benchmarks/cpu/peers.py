"""Other libraries' attention on the CPU. What they need that we do not (contiguous K and V, another
layout of the cache, a plan) is made ready beforehand and not timed."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import (
    Contestant,
    DoesNotApply,
    Maker,
    gathered,
    jitted,
    to_jax,
    torch_sdpa,
)
from benchmarks.workloads import Workload


def torch_sdpa_grouped(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """torch SDPA over gathered K and V, query heads of one kv head as if they were query tokens."""
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

    return jitted(attend, *map(to_jax, operands[:4]))


@cache
def _load_vllm() -> None:
    """Its operators alone: they need nothing of the package but the file."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'vllm'")
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    (path,) = Path(spec.origin).parent.glob(f"{name}.*so")
    torch.ops.load_library(path)


def vllm(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """vLLM's CPU attention, in its own layout: [blocks, kv heads, 2 x block size, head size]."""
    _load_vllm()
    ops, model = torch.ops._C, workload.model
    query, cache, lengths, tables, starts, _ = operands
    block_size, isa = 32, "vec"  # what it chooses on x86-64 without AMX
    kv = torch.zeros(
        (
            sum(-(-context // block_size) for _, context in workload.sequences),
            *(model.num_kv_heads, 2 * block_size, model.head_size),
        ),
        dtype=cache.dtype,
    )
    key, value = kv.chunk(2, dim=2)
    own_tables = torch.zeros(len(lengths), int(lengths.max()) // block_size + 1, dtype=torch.int32)
    first = 0
    for s, (_, context) in enumerate(workload.sequences):
        blocks = tables[s, : -(-context // workload.block_size)].long()
        rows = cache[blocks].flatten(0, 1)[:context]
        count = -(-context // block_size)
        own_tables[s, :count] = torch.arange(first, first + count)
        slots = torch.arange(context) + first * block_size
        ops.cpu_attn_reshape_and_cache(
            rows[:, 0::2].contiguous(), rows[:, 1::2].contiguous(), key, value, slots, isa
        )
        first += count
    window = model.sliding_window or -1
    plan = ops.get_scheduler_metadata(
        len(lengths), model.num_heads, model.num_kv_heads, model.head_size, lengths, query.dtype,
        starts, True, window, isa, True, None,
    )  # fmt: skip
    scale, cap = model.attributes()["scale"], model.soft_cap or 0.0

    def run() -> torch.Tensor:
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query, key, value, out, starts, lengths, scale, True, None, window, own_tables, cap,
            plan, None, None,
        )  # fmt: skip
        return out

    return run


def vllm_update(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, num_slots: int
) -> Contestant | None:
    """vLLM's way to write keys and values into slots of its own layout; none if not installed."""
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
    "torch SDPA, grouped (contiguous)": torch_sdpa_grouped,
    "torch SDPA (contiguous)": torch_sdpa,
    "jax.numpy": jax_numpy,
}
