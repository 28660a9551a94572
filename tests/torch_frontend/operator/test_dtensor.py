"""DTensors whose heads are sharded over two processes, against the same calls on whole tensors."""

from __future__ import annotations

import pytest

from tests.support import scripts

SCRIPT = """
import sys

import pytest
import torch
import torch.distributed as dist

rank, address, first = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if first == "torch_frontend":
    import torch_frontend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import init_device_mesh
import torch_frontend

ops = torch.ops.xla_gpu
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("heads",))
torch.manual_seed(0)
query, key, value = torch.randn(3, 8, 16), torch.randn(3, 4, 16), torch.randn(3, 4, 16)
cache, slots = torch.randn(6, 4, 8, 16), torch.tensor([5, 6, 17], dtype=torch.int32)
ints = [[6, 5], [[1, 2], [4, 3]], [0, 2, 3], [2]]
metadata = [torch.tensor(x, dtype=torch.int32) for x in ints]


def on(dim, tensor):
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor.clone(), mesh, [placement])


whole = [on(None, x) for x in metadata]


def same(result, expected, dim):
    assert isinstance(result, DTensor) and result.placements == (Shard(dim),), result
    assert torch.equal(result.full_tensor(), expected)


def attention():
    q, c = on(1, query), on(2, cache)
    expected = ops.paged_attention(query, cache, *metadata, 0.25)
    same(ops.paged_attention(q, c, *whole, 0.25), expected, 1)
    output, lse = ops.paged_attention.lse(q, c, *whole, 0.25)
    same(output, expected, 1)
    same(lse, ops.paged_attention.lse(query, cache, *metadata, 0.25)[1], 1)
    out = on(1, torch.zeros_like(query))
    assert torch_frontend.paged_attention(q, c, *whole, 0.25, out=out) is out
    same(out, expected, 1)
    same(ops.ragged_paged_attention(q, c, *whole, 0.25), expected, 1)


def options():
    keys, values = cache[:, :, ::2].clone(), cache[:, :, 1::2].clone()
    per_head = {"sinks": torch.randn(8), "alibi_slopes": torch.rand(8)}
    expected = ops.paged_attention(
        query, keys, *metadata, 0.25, 3, value_cache=values, **per_head)
    result = ops.paged_attention(on(1, query), on(2, keys), *whole, 0.25, 3,
        value_cache=on(2, values), **{name: on(0, x) for name, x in per_head.items()})
    same(result, expected, 1)
    masks = {"bidirectional_ranges": torch.tensor([[0, 6]] * 3, dtype=torch.int32),
        "causal_seqs": torch.tensor([0, 1], dtype=torch.int32)}
    expected = ops.paged_attention(query, cache, *metadata, 0.25, 2, **masks)
    result = ops.paged_attention(on(1, query), on(2, cache), *whole, 0.25, 2,
        **{name: on(None, x) for name, x in masks.items()})
    same(result, expected, 1)


def one_kv_head():
    expected = ops.paged_attention(query, cache[:, :, :2], *metadata, 0.25)
    one = on(None, cache[:, :, :2])
    same(ops.paged_attention(on(1, query), one, *whole, 0.25), expected, 1)


def update():
    expected = cache.clone()
    ops.kv_cache_update(expected, key, value, slots)
    c = on(2, cache)
    address = c.to_local().data_ptr()
    ops.kv_cache_update(c, on(1, key), on(1, value), on(None, slots))
    same(c, expected, 2)
    assert c.to_local().data_ptr() == address
    keys, values = on(2, cache[:, :, ::2]), on(2, cache[:, :, 1::2])
    ops.kv_cache_update(keys, on(1, key), on(1, value), on(None, slots), value_cache=values)
    same(keys, expected[:, :, ::2], 2)
    same(values, expected[:, :, 1::2], 2)


def four_bits():
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.full((4,), 0.4)}
    keys = torch.zeros(6, 4, 4, 16, dtype=torch.int8)
    values = torch.zeros(6, 4, 4, 8, dtype=torch.uint8)
    k, v, by_head = on(2, keys), on(2, values), {x: on(0 if scales[x].dim() else None, scales[x]) for x in scales}
    ops.kv_cache_update(keys, key, value, slots, value_cache=values, **scales)
    ops.kv_cache_update(k, on(1, key), on(1, value), on(None, slots), value_cache=v, **by_head)
    same(k, keys, 2)
    same(v, values, 2)
    assert values.count_nonzero() > 0
    expected = ops.paged_attention(query, keys, *metadata, 0.25, value_cache=values, **scales)
    result = ops.paged_attention(on(1, query), k, *whole, 0.25, value_cache=v, **by_head)
    same(result, expected, 1)
    made = {x: torch.zeros(6, 4, 4) for x in ("k_scale_cache", "v_scale_cache")}
    by_head = {x: on(2, made[x]) for x in made}
    ops.kv_cache_update(keys, key, value, slots, value_cache=values, **made)
    ops.kv_cache_update(k, on(1, key), on(1, value), on(None, slots), value_cache=v, **by_head)
    same(k, keys, 2)
    same(v, values, 2)
    for x in made:
        same(by_head[x], made[x], 2)
        assert made[x].count_nonzero() > 0


def groups():
    values = torch.zeros(6, 4, 4, 8, dtype=torch.uint8)
    scales = torch.zeros(6, 4, 4, 4).to(torch.float8_e4m3fn)
    keys, ones = values.clone(), scales.clone()
    caches, whole_global = (keys, values, ones, scales), torch.tensor(0.5)

    def part(x):  # gloo sends no float8
        return x.chunk(2, 2)[rank].clone(memory_format=torch.contiguous_format)

    k, v, s, t = (DTensor.from_local(part(x), mesh, [Shard(2)]) for x in caches)
    ops.kv_cache_update(keys, key, value, slots, value_cache=values, k_scale_cache=ones,
        v_scale_cache=scales, k_global=whole_global, codes="e2m1")
    ops.kv_cache_update(k, on(1, key), on(1, value), on(None, slots), value_cache=v,
        k_scale_cache=s, v_scale_cache=t, k_global=on(None, whole_global), codes="e2m1")
    for sharded, x in zip((k, v, s, t), caches):
        assert torch.equal(sharded.to_local().view(torch.uint8), part(x).view(torch.uint8))
        assert x.view(torch.uint8).count_nonzero() > 0
    expected = ops.paged_attention(query, keys, *metadata, 0.25, value_cache=values,
        k_scale=ones, v_scale=scales, k_global=whole_global, codes="e2m1")
    result = ops.paged_attention(on(1, query), k, *whole, 0.25, value_cache=v,
        k_scale=s, v_scale=t, k_global=on(None, whole_global), codes="e2m1")
    same(result, expected, 1)


def rotated_update():
    table, positions = torch.randn(9, 16), torch.tensor([8, 0, 3])
    for heads in (4, 1):
        dims = (2, 1) if heads > 1 else (None, None)
        rows = [cache[:, :, : 2 * heads], key[:, :heads], value[:, :heads], query]
        c, k, v, q = (x.clone() for x in rows)
        ops.kv_cache_update(c, k, v, slots, query=q, positions=positions, cos_sin_cache=table)
        sharded = on(dims[0], rows[0]), on(1, query)
        address = sharded[1].to_local().data_ptr()
        ops.kv_cache_update(sharded[0], on(dims[1], rows[1]), on(dims[1], rows[2]), on(None, slots),
            query=sharded[1], positions=on(None, positions), cos_sin_cache=on(None, table))
        assert torch.equal(sharded[0].full_tensor(), c)
        same(sharded[1], q, 1)
        assert sharded[1].to_local().data_ptr() == address
    weights = {"q_norm": torch.randn(query.shape[2]), "k_norm": torch.randn(query.shape[2])}
    weights["hadamard_signs"] = torch.randn(query.shape[2]).sign()
    options = {"norm_eps": 1e-6, "hadamard": "kv"}
    c, q = cache.clone(), query.clone()
    ops.kv_cache_update(c, key, value, slots, query=q, **weights, **options)
    sharded = on(2, cache), on(1, query)
    whole = {name: on(None, x) for name, x in weights.items()}
    rows = on(1, key), on(1, value), on(None, slots)
    ops.kv_cache_update(sharded[0], *rows, query=sharded[1], **whole, **options)
    same(sharded[0], c, 2)
    same(sharded[1], q, 1)
    together = on(None, torch.randn(key.shape[1:]))
    with pytest.raises(ValueError, match="^kv_cache_update: kv_cache must be replicated"):
        ops.kv_cache_update(sharded[0], *rows, k_norm=together, norm_eps=1e-6)


def others():
    x = torch.randn(2, 3)
    result = ops.simple_add(on(None, x), on(None, x))
    assert result.placements == (Replicate(),) and torch.equal(result.to_local(), x + x)
    parts = [ops.paged_attention.lse(query, cache, *metadata, s, causal=False) for s in (0.25, 0.5)]
    outputs, lses = zip(*parts)
    merged = torch_frontend.merge_attention([on(1, x) for x in outputs], [on(1, x) for x in lses])
    for result, expected in zip(merged, torch_frontend.merge_attention(outputs, lses)):
        assert torch.allclose(result.full_tensor(), expected)


def training():
    starts, count = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    for heads in (4, 1):
        dim = 1 if heads > 1 else None
        plain = [query, key[:, :heads], value[:, :heads], torch.randn(8)]
        plain = [x.clone().requires_grad_() for x in plain]
        leaves = [on(d, x.detach()).requires_grad_() for d, x in zip((1, dim, dim, 0), plain)]

        def attend(q, k, v, sinks, *batch):
            return torch_frontend.varlen_attention(q, k, v, *batch, 0.25, sinks=sinks)

        expected = attend(*plain, starts, count)
        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            result = run(*leaves, on(None, starts), on(None, count))
            same(result.detach(), expected, 1)
            losses = result.square().sum(), expected.square().sum()
            found = torch.autograd.grad(losses[0], leaves)
            for i, x in enumerate(torch.autograd.grad(losses[1], plain, retain_graph=True)):
                if heads == 1 and i in (1, 2):  # a process has a part of the sum
                    assert found[i].placements == (Partial(),)
                    assert torch.allclose(found[i].full_tensor(), x, atol=1e-5)
                else:
                    same(found[i], x, 0 if i == 3 else 1)
    q, k, v = (on(1, x) for x in (query, key, value))
    with pytest.raises(ValueError, match="^varlen_attention: key must be sharded along dim"):
        torch_frontend.varlen_attention(q, on(None, key), v, on(None, starts), on(None, count), 0.5)
    with pytest.raises(TypeError, match="^varlen_attention: query_start_loc must have type DTen"):
        torch_frontend.varlen_attention(q, k, v, starts, count, 0.5)


def compiled():
    def step(c, k, v, slots, q, *metadata):
        ops.kv_cache_update(c, k, v, slots)
        return ops.paged_attention(q, c, *metadata, 0.25)

    expected_cache = cache.clone()
    expected = step(expected_cache, key, value, slots, query, *metadata)
    c = on(2, cache)
    address = c.to_local().data_ptr()
    run = torch.compile(step, fullgraph=True)
    same(run(c, on(1, key), on(1, value), on(None, slots), on(1, query), *whole), expected, 1)
    same(c, expected_cache, 2)
    assert c.to_local().data_ptr() == address


def refused():
    def fails(message, *operands, error=ValueError, op=ops.paged_attention, **options):
        with pytest.raises(error, match=message):
            op(*operands, **options)

    q, c = on(1, query), on(2, cache)
    where = "Redistribute it, or call the op on local tensors"
    fails(rf"^paged_attention: query must be sharded along dimension 1 alone, its heads"
          rf"; got \\[Shard\\(dim=2\\)\\]. {where}", on(2, query), c, *whole, 0.25)
    fails("^paged_attention: query must be sharded along dimension 1, as the other",
          on(None, query), c, *whole, 0.25)
    fails("^paged_attention: kv_cache must be sharded along dimension 2, as the other",
          q, on(None, cache), *whole, 0.25)
    fails("^paged_attention: context_lens must be replicated", q, c, on(0, metadata[0]),
          *whole[1:], 0.25)
    fails("^paged_attention: block_tables must have type DTensor", q, c, whole[0], *metadata[1:],
          0.25, error=TypeError)
    fails("^paged_attention: sinks must have type DTensor", q, c, *whole, 0.25,
          error=TypeError, sinks=torch.ones(8))
    fails("^paged_attention: kv_cache must be replicated", on(None, query), c, *whole, 0.25,
          kv_layout="nb(2h)d")
    partial = DTensor.from_local(query, mesh, [Partial()])
    fails("^paged_attention: query must be sharded or replicated", partial, c, *whole, 0.25)
    three = on(1, torch.randn(3, 3, 16)), on(2, torch.randn(6, 4, 6, 16))
    fails("^paged_attention: query must be sharded over a number of devices that divides 3",
          *three, *whole, 0.25)
    fails("^paged_attention: out must be sharded as the result", q, c, *whole, 0.25,
          out=on(None, torch.zeros_like(query)), op=ops.paged_attention.out)
    fails("^kv_cache_update: kv_cache must be sharded along dimension 2", on(None, cache),
          on(1, key), on(1, value), on(None, slots), op=ops.kv_cache_update)
    fails("^simple_add: a must be replicated", on(0, query), on(0, query), op=ops.simple_add)
    fails("^slot_mapping: context_lens must have type torch.Tensor, as all devices need all of it",
          *whole, op=torch_frontend.slot_mapping, error=TypeError, block_size=4, num_tokens=3)
    other = init_device_mesh("cpu", (2, 1))
    fails("^paged_attention: kv_cache must be on the first DTensor's mesh", q,
          distribute_tensor(cache, other, [Shard(2), Replicate()]), *whole, 0.25)
    fails("^paged_attention: inference only", q.requires_grad_(), c, *whole, 0.25,
          error=NotImplementedError)


modes = [torch.no_grad, torch.inference_mode]
for mode in modes if first == "torch_frontend" else modes[::-1]:
    with mode():
        whole = [on(None, x) for x in metadata]
        for check in (attention, options, one_kv_head, update, rotated_update, four_bits, groups,
                others):
            check()
whole = [on(None, x) for x in metadata]
if first == "torch_frontend":
    compiled()
    training()
    refused()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("first", ["torch_frontend", "torch"])
def test_heads_over_two_processes(first: str) -> None:
    """`first` is imported before the other."""
    address = scripts.free_address()
    commands = [[rank, address, first] for rank in "01"]
    outputs = scripts.run_together(SCRIPT, commands, OMP_NUM_THREADS="1")
    assert all(output.splitlines()[-1] == "done" for output in outputs)
