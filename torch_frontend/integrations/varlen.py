"""``torch.nn.attention.varlen`` on CPU tensors, for which PyTorch has no kernel; on CUDA tensors by
choice, which has not run on a GPU yet.

    from torch.nn.attention.varlen import varlen_attn, varlen_attn_out
    from torch_frontend.integrations import varlen

    varlen.enable()
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from shared_ffi._native import Untraced
from shared_ffi.spec import dtype_error, excess_error, missing_error, shape_error, value_error
from torch_frontend.operator.arguments import array_spec
from torch_frontend.operator.eager import check_fits
from torch_frontend.paged_attention import LSE
from torch_frontend.varlen_attention import BACKWARD

OP = "varlen_attn"

_ARGUMENTS = "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa"
_ARGUMENTS += " seqused_k block_table num_splits"
_libraries: dict[str, torch.library.Library] = {}


def enable(device: str = "cpu") -> None:
    """Makes ``varlen_attn`` and ``varlen_attn_out`` run on our kernels in this process, with and
    without ``torch.compile``; may be called again.

    They take float32, too, which PyTorch's kernels do not. ``varlen_attn`` has a derivative without
    ``seqused_k`` and ``block_table``, that of ``torch_frontend.varlen_attention``. They refuse
    ``block_table`` without ``seqused_k``, and more than one of ``num_splits``: the results of a
    sequence never depend on its batch. The last query of a sequence stands at its last key, so that
    with fewer keys than queries, causal queries before the first key attend to nothing. A query
    that attends to nothing has an output of 0 and a log-sum-exp of -inf. More ``seqused_k`` than
    the keys that ``cu_seq_k`` gives a sequence are refused on the CPU; on CUDA its queries are NaN.

    Args:
        device: "cpu", or "cuda" to replace PyTorch's kernels, FlashAttention and cuDNN.

    Raises:
        ImportError: this PyTorch has no ``torch.nn.attention.varlen`` with page tables, or one with
            arguments that were not there in 2.15.
    """
    if device not in ("cpu", "cuda"):
        remedy = "Call it once for each"
        raise value_error("varlen.enable", "device", "be 'cpu' or 'cuda'", repr(device), remedy)
    if device in _libraries:
        return
    _check_version()
    key = device.upper()
    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", Untraced(_attend), key)
    library.impl("_varlen_attn_out", Untraced(_attend_to_out), key)
    library.impl("_varlen_attn_backward", Untraced(_differentiate), key)
    _libraries[device] = library


def _check_version() -> None:
    try:
        import_module("torch.nn.attention.varlen")  # defines the operators
    except ImportError:
        names = ""
    else:
        schema = torch.ops.torch_attn._varlen_attn.default._schema
        names = " ".join([x.name for x in schema.arguments])
    if names.removesuffix(" backend") != _ARGUMENTS:
        raise ImportError(
            "torch_frontend.integrations.varlen needs the torch.nn.attention.varlen of PyTorch "
            f"2.13 to 2.15; got {torch.__version__}: pip install 'torch>=2.13,<2.16'"
        )


def _attend(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    output, lse = _attention(query, *arguments)
    if not query.is_contiguous() and output.shape == query.shape:
        # What PyTorch promises to compilers: the order of the query's dimensions.
        output = torch.empty_like(query).copy_(output)
    return output, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _attend_to_out(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    output, lse = _attention(*arguments)
    check_fits("varlen_attn_out", "out", array_spec(output.shape, output.dtype), out)
    out.copy_(output)
    return lse


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp as PyTorch has it: ``[num_heads, num_tokens]``."""
    if num_splits not in (None, 1):
        raise excess_error(OP, "num_splits", "be None or 1", num_splits)
    if block_table is not None:
        kv_layout = "nbhd"
        if seqused_k is None:
            remedy = "With block_table it has the number of keys of each sequence"
            raise missing_error(OP, "seqused_k", remedy)
    else:
        kv_layout = "nhd"  # blocks of one position
        if cu_seq_k is None:
            remedy = "It has the first key of each sequence, then the end"
            raise missing_error(OP, "cu_seq_k", remedy)
        if cu_seq_k.dtype != torch.int32:
            raise dtype_error(OP, "cu_seq_k", "dtype torch.int32", cu_seq_k.dtype)
        own = cu_seq_k.diff()
        positions = torch.arange(max_k, dtype=torch.int32, device=cu_seq_k.device)
        block_table = cu_seq_k[:-1, None] + positions
        if seqused_k is None:
            seqused_k = own
        else:
            _check_used(seqused_k, own)
            # The next keys are another sequence's. On CUDA, no value is looked at: a sequence that
            # uses more than its own keys reads a block that is none, which gives NaN.
            block_table.masked_fill_(positions >= own[:, None], -1)
    if window_size is not None and len(window_size) != 2:
        remedy = "They are left and right; -1 has no limit"
        raise value_error(OP, "window_size", "have 2 numbers", list(window_size), remedy)
    left, right = (-1, -1) if window_size is None else window_size
    if is_causal:
        right = 0
    num_seqs = torch.full((1,), seqused_k.shape[0], dtype=torch.int32, device=query.device)
    output, lse = LSE(
        query,
        key,
        seqused_k,
        block_table,
        cu_seq_q,
        num_seqs,
        query.shape[-1] ** -0.5 if scale is None else scale,
        left + 1 if left >= 0 else None,
        value_cache=value,
        kv_layout=kv_layout,
        # Causal attention, which refuses more queries than keys, gives the same bits for others.
        causal=False,
        window_right=right if right >= 0 else None,
        max_query_len=max_q or None,
    )
    return output, lse.t().contiguous()


def _check_used(seqused_k: torch.Tensor, own: torch.Tensor) -> None:
    if seqused_k.shape != own.shape:
        rule = f"[num_seqs={len(own)}]"
        remedy = "It has a number for each sequence of cu_seq_k"
        raise shape_error(OP, "seqused_k", rule, seqused_k.shape, remedy)
    if seqused_k.device.type != "cpu":
        return
    for i, (used, count) in enumerate(zip(seqused_k.tolist(), own.tolist(), strict=True)):
        if used > count:
            rule = f"be at most the {count} keys that cu_seq_k gives the sequence"
            remedy = "Correct one of the two"
            raise value_error(OP, f"seqused_k[{i}]", rule, used, remedy)


def _differentiate(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    **backend: Any,
) -> tuple[torch.Tensor, ...]:
    left, right = window_size or (-1, -1)
    if is_causal:
        right = 0
    # Each sequence gets as many rows as it has queries, or keys if these are more. Its last query
    # is beside its last key. A row without a query has no weights; one without a key adds nothing.
    longest = torch.maximum(cu_seq_q.diff(), cu_seq_k.diff())
    starts = torch.nn.functional.pad(longest.cumsum(0, dtype=torch.int32), (1, 0))
    places = [
        torch.arange(int(own[-1]), device=own.device)
        + (starts - own)[1:].repeat_interleave(own.diff())
        for own in (cu_seq_q, cu_seq_k)
    ]
    arrays = {"query": query, "output": output, "lse": lse.t(), "dout": grad}
    arrays |= {"key": key, "value": value}
    for name, x in arrays.items():
        rows, fill = places[name in ("key", "value")], -torch.inf if name == "lse" else 0
        arrays[name] = x.new_full((int(starts[-1]), *x.shape[1:]), fill)
        arrays[name][rows] = x[: len(rows)]
    found = BACKWARD(
        **arrays,
        query_start_loc=starts,
        num_seqs=torch.full((1,), len(starts) - 1, dtype=torch.int32, device=query.device),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=left + 1 if left >= 0 else None,
        causal=False,
        window_right=right if right >= 0 else None,
    )
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    for i, (gradient, x) in enumerate(zip(gradients, found, strict=True)):
        rows = places[i > 0]
        gradient[: len(rows)] = x[rows]
    return tuple(gradients)
