"""torch.compile with sizes and options that change from call to call, as in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.cases.sound_calls import attention
from tests.support.models import tensors

OPS = torch.ops.xla_gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """PyTorch's own settings: importing torch_xla turns automatic dynamic shapes off."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, specialize_float=False):
        yield


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", ["max_query_len", "sliding_window", "window_right"])
def test_an_option_that_changes_makes_two_graphs(name: str) -> None:
    operands = tensors(attention())
    options = {"causal": False} if name == "window_right" else {}
    counter = CompileCounterWithBackend("inductor")

    def step(value: int) -> torch.Tensor:
        return OPS.paged_attention(*operands, 0.5, **options, **{name: value})

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for value in range(4, 20):
        assert torch.equal(compiled(value), step(value))
    assert counter.frame_count == 2


@pytest.mark.parametrize("value", [0, -1])
def test_an_option_out_of_range_is_refused(value: int) -> None:
    operands = tensors(attention())
    compiled = torch.compile(
        lambda value: OPS.paged_attention(*operands, 0.5, sliding_window=value), fullgraph=True
    )
    for right in (4, 5):
        compiled(right)
    with pytest.raises(Exception, match="sliding_window must be at least 1"):
        compiled(value)


def test_an_option_from_a_tensor() -> None:
    """The longest query of a batch, which is known when the program runs."""
    *operands, starts, num_seqs = tensors(attention())

    def step(starts: torch.Tensor) -> torch.Tensor:
        longest = (starts[1:] - starts[:-1]).max().item()
        return OPS.paged_attention(*operands, starts, num_seqs, 0.5, max_query_len=longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert torch.equal(torch.compile(step, fullgraph=True)(starts), step(starts))


def unbacked_attention() -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """A compiled call, and operands whose first sizes PyTorch must not look at."""
    cache, num_seqs = torch.randn(16, 16, 4, 64), int32([2])
    operands = [torch.randn(2, 8, 64), int32([45, 4]), int32([[7, 2, 9], [1, 0, 0]])]
    operands.append(int32([0, 1, 2]))
    for operand in operands:
        torch._dynamo.decorators.mark_unbacked(operand, 0)

    def step(query: torch.Tensor, *metadata: torch.Tensor) -> torch.Tensor:
        return OPS.paged_attention(query, cache, *metadata, num_seqs, 0.125)

    return step, operands


def test_sizes_that_are_unbacked() -> None:
    step, operands = unbacked_attention()
    assert torch.equal(torch.compile(step, fullgraph=True)(*operands), step(*operands))


def test_unbacked_sizes_are_checked_when_the_program_runs() -> None:
    step, operands = unbacked_attention()
    compiled = torch.compile(step, fullgraph=True)
    compiled(*operands)
    operands[3] = int32([0, 1, 2, 2])
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        compiled(*operands)


def test_a_decode_loop_makes_two_graphs() -> None:
    """Batch, longest query and page table change in every step; the cache is not copied."""
    counter = CompileCounterWithBackend("inductor")
    cache = torch.zeros(32, 4, 4, 16)

    def step(query: torch.Tensor, slots: torch.Tensor, *rest: Any) -> torch.Tensor:
        *metadata, longest = rest
        key, value = query[:, :2], query[:, 2:4]
        OPS.kv_cache_update(cache, key, value, slots)
        return OPS.paged_attention(query, cache, *metadata, 0.25, max_query_len=longest)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    address = cache.data_ptr()
    for batch, longest, columns in ((3, 5, 7), (4, 6, 8), (5, 7, 9), (6, 8, 10)):
        query = torch.randn(batch, 4, 16)
        slots = torch.arange(batch) * 4
        tables = torch.arange(batch, dtype=torch.int32)[:, None].repeat(1, columns)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        metadata = (torch.ones(batch, dtype=torch.int32), tables, starts, int32([batch]))
        result = compiled(query, slots, *metadata, longest)
        # One position is attended to: the value that the update has just written.
        assert torch.allclose(result, query[:, 2:4].repeat_interleave(2, dim=1))
    assert counter.frame_count <= 2
    assert cache.data_ptr() == address
