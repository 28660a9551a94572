"""``varlen_attention`` for PyTorch, and its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shared_ffi import varlen_attention as op
from torch_frontend.operator.arguments import checked, specs, split_causal
from torch_frontend.paged_attention import LSE

_ARRAYS = "Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor num_seqs"
_OPTIONS = (
    "float scale, SymInt? sliding_window, float? soft_cap, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? bidirectional_ranges, bool causal, Tensor? causal_seqs, SymInt? window_right, "
    "SymInt? max_query_len"
)
_NAMES = [x.split()[1] for x in _OPTIONS.split(", ")]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bidirectional_ranges: torch.Tensor | None = None,
    causal: bool | torch.Tensor = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
) -> torch.Tensor:
    """Attention of packed sequences to themselves, with a derivative, for training: the function
    ``jax_frontend.varlen_attention``, which explains the arguments.

    The output has the bits of ``paged_attention``, eagerly and in ``torch.compile``. Autograd gives
    the derivative with respect to ``query``, ``key``, ``value``, ``sinks`` and ``alibi_slopes``, in
    float32 and in memory that is linear in the tokens. It reads ``query_start_loc``: on CUDA it
    waits for the device. Two runs give the same gradients on the CPU.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, float16 or bfloat16.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``query``.
        value: ``[num_tokens, num_kv_heads, value_head_size]``, dtype of ``query``.
        query_start_loc: ``[max_seqs + 1]`` int32.
        num_seqs: ``[]`` or ``[1]`` int32.
        scale: factor of ``q . k``.
        sliding_window: how many positions a token attends to, itself included. None: all.
        soft_cap: c turns a logit into ``c * tanh(logit / c)``. None: off.
        sinks: ``[num_heads]`` float32, one more logit for each head.
        alibi_slopes: ``[num_heads]`` float32.
        bidirectional_ranges: ``[num_tokens, 2]`` int32, positions that a token also attends to.
        causal: False lets a token attend to later positions. ``[max_seqs]``: for each sequence.
        window_right: how many of them.
        max_query_len: a promise that no sequence is longer.

    Returns:
        ``[num_tokens, num_heads, value_head_size]``, dtype of ``query``.

    Raises:
        ValueError, TypeError: as in ``paged_attention``, some in its name.
        NotImplementedError: a second derivative is asked for.
    """
    causal, causal_seqs = split_causal(causal)
    output, _ = _CHECKED(
        *(query, key, value, query_start_loc, num_seqs, scale, sliding_window, soft_cap, sinks),
        *(alibi_slopes, bidirectional_ranges, causal, causal_seqs, window_right, max_query_len),
    )
    return output


def _checked_width(tensors: Sequence[torch.Tensor], options: Sequence[Any]) -> int:
    """Checks a call. Returns the most tokens of a sequence, as far as it tells."""
    given = {
        name: specs([x])[0] if isinstance(x, torch.Tensor) else x
        for name, x in zip(_NAMES, options, strict=True)
    }
    if (causal_seqs := given.pop("causal_seqs")) is not None:
        given["causal"] = causal_seqs
    check: Callable[..., int] = op.check
    return check(*specs(tensors), **given)


# Operators, so that compilers keep the calls as they are.
@torch.library.custom_op(
    "xla_gpu::_varlen_attention",
    mutates_args=(),
    schema=f"({_ARRAYS}, {_OPTIONS}) -> (Tensor output, Tensor lse)",
)
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value are a cache with blocks of one position, whose table counts the tokens."""
    width = _checked_width((query, key, value, query_start_loc, num_seqs), options)
    positions = torch.arange(width, dtype=torch.int32, device=query.device)
    with torch.no_grad():
        output, lse = LSE(
            query,
            key,
            query_start_loc.diff(),
            query_start_loc[:-1, None] + positions,
            query_start_loc,
            num_seqs,
            value_cache=value,
            kv_layout=op.KV_LAYOUT,
            **dict(zip(_NAMES, options, strict=True)),
        )
    return output, lse


@_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _checked_width((query, key, value, *others[:2]), others[2:])
    rows = query.shape[:2]
    return query.new_empty((*rows, value.shape[2])), query.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op(
    "xla_gpu::_varlen_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse, {_ARRAYS}, {_OPTIONS}) -> Tensor[]",
)
def _backward(*tensors_and_options: Any) -> list[torch.Tensor]:
    grad, output, lse, query, key, value, starts, num_seqs = tensors_and_options[:8]
    given = dict(zip(_NAMES, tensors_and_options[8:], strict=True))
    causal, causal_seqs, window_right, _ = (given.pop(name) for name in _NAMES[-4:])
    bounds = starts[: int(num_seqs.item()) + 1].tolist()
    flags = [causal] * len(bounds) if causal_seqs is None else causal_seqs.tolist()
    sequences = [
        Tokens(first, end, first, end, 0 if is_causal else window_right)
        for first, end, is_causal in zip(bounds, bounds[1:], flags, strict=False)
    ]
    return gradients(grad, output, lse, query, key, value, sequences, **given)


@_backward.register_fake
def _(*tensors_and_options: Any) -> list[torch.Tensor]:
    *inputs, lse = (tensors_and_options[i] for i in (3, 4, 5, 2))
    per_head = [lse.new_empty(lse.shape[1:]) for _ in range(2)]
    return [*[x.new_empty(x.shape) for x in inputs], *per_head]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *[x for x in inputs if isinstance(x, torch.Tensor)])
    ctx.others = [None if isinstance(x, torch.Tensor) else (x,) for x in inputs]


def _differentiate(ctx: Any, grad: torch.Tensor, grad_lse: Any) -> tuple[Any, ...]:
    output, lse, *tensors = ctx.saved_tensors
    inputs = [tensors.pop(0) if other is None else other[0] for other in ctx.others]
    found = _backward(grad, output, lse, *inputs)
    places = dict(zip((0, 1, 2, 8, 9), found, strict=True))  # of sinks and slopes, too
    return tuple(places.get(i) if x else None for i, x in enumerate(ctx.needs_input_grad))


def _refuse(ctx: Any, *grads: Any) -> None:
    raise op.second_derivative_error()


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
_CHECKED = checked(op.OP, torch.ops.xla_gpu._varlen_attention.default)


class Tokens(NamedTuple):
    """A sequence: where its queries and its keys are among those of the batch."""

    first: int
    end: int
    first_key: int
    end_key: int
    window_right: int | None
    """0: it is causal."""


def gradients(
    grad: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequence[Tokens],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bidirectional_ranges: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradients of query, key, value, sinks and slopes, from the derivative of the output.

    A loop over the sequences, in it one over chunks of their queries, in it one over chunks of the
    keys that these attend to, in float32. Chunks count from the sequence's start: its gradients
    depend on itself alone. PyTorch's own flash backward on the CPU has no windows, rounds the
    weights of bfloat16, and is not faster in float32.

    Args:
        grad: of the output, ``[num_tokens, num_heads, value_head_size]``.
        output: what attention gave.
        lse: its log-sum-exp, ``[num_tokens, num_heads]``.
        query: as in ``varlen_attention``; so are the options.
        key: ``[num_keys, num_kv_heads, head_size]``.
        value: ``[num_keys, num_kv_heads, value_head_size]``.
        sequences: the last query of each stands at its last key.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    dq = torch.zeros_like(query, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    delta = torch.zeros_like(lse)
    dslopes = lse.new_zeros(num_heads)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.clamp(-(2.0**95), 2.0**95).view(num_kv_heads, 1, -1, 1)

    def rows(array: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """``[num_kv_heads, rows of a kv head, n]`` float32, contiguous."""
        part = array[first:end].float().view(end - first, num_kv_heads, -1, array.shape[-1])
        return part.transpose(0, 1).reshape(num_kv_heads, -1, array.shape[-1]).contiguous()

    for first, end, first_key, end_key, window_right in sequences:
        num_keys = end_key - first_key
        offset = num_keys - end  # from a query's row to its position
        # The first queries stand before all keys, where there are more of them.
        right = num_keys + end - first if window_right is None else window_right
        left = num_keys if sliding_window is None else sliding_window - 1
        products = grad[first:end].float() * output[first:end]
        delta[first:end] = products.sum(-1)
        for i in range(first, end, op.CHUNK):
            stop = min(i + op.CHUNK, end)
            q, do, row_lse, row_delta = (
                rows(x, i, stop) for x in (query, grad, lse[..., None], delta[..., None])
            )
            q, dq_rows = q * scale, torch.zeros_like(q)
            lowest, highest = i + offset, stop + offset - 1
            position = torch.arange(lowest, stop + offset, device=query.device)[:, None]
            begin, after = max(0, lowest - left), min(num_keys, highest + right + 1)
            if bidirectional_ranges is not None:
                ranges = bidirectional_ranges[i:stop].clamp(0, num_keys)
                longer = ranges[ranges[:, 0] < ranges[:, 1]].tolist()
                begin = min([begin, *[x for x, _ in longer]])
                after = max([after, *[x for _, x in longer]])
            for j in range(begin, after, op.CHUNK):
                last = min(j + op.CHUNK, after)
                k, v = (rows(x, first_key + j, first_key + last) for x in (key, value))
                shape = (num_kv_heads, stop - i, -1, last - j)
                positions = torch.arange(j, last, device=query.device)
                logits = torch.bmm(q, k.mT)
                if soft_cap is not None:
                    tanh = logits.div_(soft_cap).tanh_()
                    logits = tanh * soft_cap
                if alibi_slopes is not None:
                    distance = (position - positions).abs().float()[:, None]
                    logits.view(shape).sub_(alibi_slopes * distance)
                weights = logits.sub_(row_lse).exp_()
                if j < highest - left or last - 1 > lowest + right:
                    hidden = (positions < position - left) | (positions > position + right)
                    if bidirectional_ranges is not None:
                        hidden &= (positions < ranges[:, :1]) | (positions >= ranges[:, 1:])
                    weights.view(shape).masked_fill_(hidden[:, None], 0)
                dlogits = torch.bmm(do, v.mT).sub_(row_delta).mul_(weights)
                if alibi_slopes is not None:
                    dslopes -= (dlogits.view(shape) * distance).sum((1, 3)).view(-1)
                if soft_cap is not None:
                    dlogits *= 1 - tanh * tanh
                dq_rows.baddbmm_(dlogits, k)
                dk[first_key + j : first_key + last] += torch.bmm(dlogits.mT, q).transpose(0, 1)
                dv[first_key + j : first_key + last] += torch.bmm(weights.mT, do).transpose(0, 1)
            dq_rows = dq_rows.mul_(scale).view(num_kv_heads, stop - i, -1, query.shape[2])
            dq[i:stop] = dq_rows.transpose(0, 1).reshape(stop - i, num_heads, -1)
    dsinks = torch.zeros_like(dslopes)
    if sinks is not None:
        # A row that attends to nothing but the sink has an output of 0, and a delta of 0.
        dsinks -= torch.where(delta == 0, 0, (sinks - lse).exp() * delta).sum(0)
    return [dq, dk.to(query.dtype), dv.to(query.dtype), dsinks, dslopes]
