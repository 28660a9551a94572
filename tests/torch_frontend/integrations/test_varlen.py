"""torch.nn.attention.varlen on CPU tensors, against scaled_dot_product_attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="it came with PyTorch 2.10")

from torch_frontend.integrations import varlen as integration  # noqa: E402

HEAD_SIZE, PAGE_SIZE = 16, 4
LENGTHS = [(1, 7), (5, 5), (3, 9), (0, 2), (5, 2), (4, 0)]  # of queries and of keys
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2), (3, -1)]
I32 = torch.int32


@pytest.fixture(autouse=True)
def enabled() -> None:
    integration.enable()


class Call:
    """Arguments of a call on random tensors, and its result in float64."""

    def __init__(self, *, paged: bool, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(0)
        q_lens, k_lens = ([*x] for x in zip(*LENGTHS, strict=True))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.lens = torch.tensor(k_lens, dtype=I32)
        self.queries = [random(n, 4, HEAD_SIZE) for n in q_lens]
        self.keys = [random(n, num_kv_heads, HEAD_SIZE) for n in k_lens]
        self.values = [random(n, num_kv_heads, HEAD_SIZE) for n in k_lens]
        starts_q, starts_k = (torch.tensor([0, *x]).cumsum(0).to(I32) for x in (q_lens, k_lens))
        self.keywords: dict[str, Any] = {"enable_gqa": num_kv_heads != 4}
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        if paged:
            tables = torch.randperm(18, generator=generator).to(I32).view(6, 3)
            keys, values = (
                torch.full((18, PAGE_SIZE, num_kv_heads, HEAD_SIZE), torch.nan, dtype=dtype)
                for _ in range(2)
            )
            for i, length in enumerate(k_lens):
                for j in range(length):
                    page, offset = tables[i, j // PAGE_SIZE], j % PAGE_SIZE
                    keys[page, offset] = self.keys[i][j]
                    values[page, offset] = self.values[i][j]
            self.keywords |= {"seqused_k": self.lens, "block_table": tables}
        self.operands = (torch.cat(self.queries), keys, values, starts_q)
        self.operands += (None if paged else starts_k, max(q_lens), max(k_lens))

    def expected(self, window: tuple[int, int]) -> torch.Tensor:
        outputs = []
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            distance = torch.arange(len(key)) - torch.arange(len(query))[:, None]
            distance -= len(key) - len(query)  # the last query is at the last key
            mask = torch.ones_like(distance, dtype=torch.bool)
            left, right = window
            if left >= 0:
                mask &= distance >= -left
            if right >= 0:
                mask &= distance <= right
            output = torch.nn.functional.scaled_dot_product_attention(
                *(x.double().transpose(0, 1)[None] for x in (query, key, value)),
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
            outputs.append(output.masked_fill(~mask.any(1)[:, None, None], 0))
        return torch.cat(outputs)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_varlen_attn(paged: bool, window: tuple[int, int], dtype: torch.dtype) -> None:
    for num_kv_heads in (1, 2, 4):
        call = Call(paged=paged, num_kv_heads=num_kv_heads, dtype=dtype)
        result, lse = varlen.varlen_attn(
            *call.operands,
            window_size=window,
            return_aux=varlen.AuxRequest(lse=True),
            **call.keywords,
        )
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        assert result.dtype == dtype
        assert torch.allclose(
            result.double(), call.expected(window), rtol=tolerance, atol=tolerance
        )
        out = torch.full_like(result, torch.nan)
        returned = varlen.varlen_attn_out(out, *call.operands, window_size=window, **call.keywords)
        assert returned is out
        assert torch.equal(out, result)
        assert lse.shape == (4, len(out))


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_log_sum_exp_and_scale(paged: bool) -> None:
    call = Call(paged=paged, num_kv_heads=4)
    _, lse = varlen.varlen_attn(
        *call.operands, scale=0.3, return_aux=varlen.AuxRequest(lse=True), **call.keywords
    )
    expected = torch.cat([
        torch.einsum("qhd,khd->hqk", query.double() * 0.3, key.double()).logsumexp(-1)
        for query, key in zip(call.queries, call.keys, strict=True)
    ], dim=1)  # fmt: skip
    assert torch.allclose(lse.double(), expected, rtol=2e-6, atol=2e-6)
    assert lse[:, -4:].isneginf().all()  # queries without keys


def test_fewer_keys_than_the_packed_ones() -> None:
    call = Call(paged=False)
    used = torch.tensor([3, 5, 4, 1, 0, 0], dtype=I32)
    call.keys, call.values = (
        [x[:n] for x, n in zip(y, used, strict=True)] for y in (call.keys, call.values)
    )
    result = varlen.varlen_attn(*call.operands, seqused_k=used, **call.keywords)
    assert torch.allclose(result.double(), call.expected((-1, -1)), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_more_keys_than_the_packed_ones(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(paged=False)

    def attend(used: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(*call.operands, seqused_k=used, **call.keywords)

    if compiled:
        attend = torch.compile(attend, fullgraph=True)
    used = torch.tensor([7, 6, 9, 2, 2, 0], dtype=I32)
    message = (
        r"^varlen_attn: seqused_k\[1\] must be at most the 5 keys that cu_seq_k gives .*got 6\. "
    )
    with pytest.raises(ValueError, match=message):
        attend(used)
    with pytest.raises(ValueError, match=r"^varlen_attn: seqused_k must have shape \[num_seqs=6\]"):
        attend(used[:3])
    # On CUDA nobody looks at the values: the table has no block there.
    monkeypatch.setattr(integration, "_check_used", lambda *_: None)
    with pytest.raises(
        ValueError,
        match=r"^paged_attention: block_tables\[1, 5\].*got -1\. The sequence needs a block there",
    ):
        attend(used)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_compiled(paged: bool) -> None:
    call = Call(paged=paged)
    query, *operands = call.operands

    def step(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        varlen.varlen_attn_out(out, query, *operands, window_size=(-1, 0), **call.keywords)
        return varlen.varlen_attn(query, *operands, window_size=(-1, 0), **call.keywords) * 1

    permuted = query.transpose(0, 1).contiguous().transpose(0, 1)
    for x in (query, permuted):
        out = torch.zeros_like(query)
        result = torch.compile(step, fullgraph=True)(x, out)
        assert torch.allclose(result.double(), call.expected((-1, 0)), rtol=2e-6, atol=2e-6)
        assert torch.equal(out, result)


@pytest.mark.parametrize("window", WINDOWS)
def test_derivative(window: tuple[int, int]) -> None:
    call = Call(paged=False)
    inputs = [x.detach().requires_grad_() for x in call.operands[:3]]
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    call.queries, call.keys, call.values = (
        torch.cat(x).double().requires_grad_().split([len(part) for part in x])
        for x in (call.queries, call.keys, call.values)
    )
    leaves = [x[0]._base for x in (call.queries, call.keys, call.values)]
    expected = torch.autograd.grad(call.expected(window), leaves, weights.double())

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(
            *inputs, *call.operands[3:], window_size=window, scale=None, **call.keywords
        )

    for function in (attend, torch.compile(attend, fullgraph=True)):
        gradients = torch.autograd.grad(function(*inputs), inputs, weights)
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert torch.allclose(gradient.double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_refused() -> None:
    call = Call(paged=True)

    def refused(error: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            varlen.varlen_attn(*call.operands, **call.keywords | changes)

    refused(ValueError, "^varlen_attn: num_splits must be None or 1; got 4", num_splits=4)
    refused(TypeError, "^varlen_attn: seqused_k must be an array", seqused_k=None)
    refused(TypeError, "^varlen_attn: cu_seq_k must be an array", block_table=None)
    refused(ValueError, "^varlen_attn: window_size must have 2 numbers", window_size=(1, 2, 3))
    query, *rest = call.operands
    with pytest.raises(ValueError, match="^varlen_attn_out: out must have shape"):
        varlen.varlen_attn_out(query[:, :1], query, *rest, **call.keywords)
    with pytest.raises(ValueError, match="^paged_attention: context_lens"):
        varlen.varlen_attn(*call.operands, **call.keywords | {"seqused_k": call.lens + 99})
    with pytest.raises(ValueError, match=r"^varlen\.enable: device must be 'cpu' or 'cuda'"):
        integration.enable("xla")


def test_cuda_by_choice() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_kernel("torch_attn::_varlen_attn", "CUDA")
    integration.enable("cuda")
    try:
        for name in ("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward"):
            assert has_kernel(f"torch_attn::{name}", "CUDA")
    finally:
        integration._libraries.pop("cuda")._destroy()
