"""Calls of varlen_attention, and their outputs and gradients in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from harness.arrays import DTYPES
from tests.cases.case import FEATURES

LENGTHS = (5, 0, 1, 130, 127, 64, 1, 128, 16)
"""0, 1 and a chunk of the derivative, less and more by one."""

DIFFERENTIABLE = ("query", "key", "value", "sinks", "alibi_slopes")


class VarlenInputs(NamedTuple):
    """The array arguments of varlen_attention that each call has, in their order."""

    query: Any
    key: Any
    value: Any
    query_start_loc: Any
    num_seqs: Any


@dataclass(frozen=True)
class VarlenCase:
    id: str
    lengths: tuple[int, ...] = LENGTHS
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    value_head_size: int | None = None
    dtype: str = "float32"
    arrays: tuple[str, ...] = ()  # features that are arrays
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    padding: int = 3  # tokens and sequences
    prefix_seqs: tuple[int, ...] = ()  # where `arrays` has them; any at first

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def __call__(self) -> dict[str, Any]:
        """The arguments. What belongs to padding is NaN, or points anywhere."""
        random = np.random.default_rng(0)
        columns = self.value_head_size or self.head_size
        dtype = DTYPES[self.dtype]

        def tokens(heads: int, size: int) -> np.ndarray:
            array = random.normal(size=(self.num_tokens + self.padding, heads, size)).astype(dtype)
            array[self.num_tokens :] = np.nan
            return array

        starts = np.cumsum((0, *self.lengths, *[-9] * self.padding))
        arguments: dict[str, Any] = {
            "query": tokens(self.num_heads, self.head_size),
            "key": tokens(self.num_kv_heads, self.head_size),
            "value": tokens(self.num_kv_heads, columns),
            "query_start_loc": starts.astype(np.int32),
            "num_seqs": np.array([len(self.lengths)], np.int32),
            "scale": self.head_size**-0.5,
        }
        count = self.num_tokens + self.padding
        first = random.integers(-2, 120, (count, 1))
        features = {
            "sinks": random.normal(size=self.num_heads).astype(np.float32),
            "alibi_slopes": random.uniform(0.01, 0.3, self.num_heads).astype(np.float32),
            "bidirectional_ranges": np.concatenate(
                [first, first + random.integers(-3, 40, (count, 1))], 1
            ).astype(np.int32),
            "causal": np.arange(len(starts) - 1, dtype=np.int32) % 2,
            "prefix_seqs": self._prefix_seqs(),
        }
        return arguments | {name: features[name] for name in self.arrays} | dict(self.options)

    def _prefix_seqs(self) -> np.ndarray:
        """Some sequences continue another one, which may continue another."""
        random, count = np.random.default_rng(2), len(self.lengths)
        own = self.prefix_seqs or [max(-1, int(random.integers(-2, s))) for s in range(count)]
        return np.array([*own, *[99] * self.padding], np.int32)

    def inputs(self) -> VarlenInputs:
        """The arrays that each call has."""
        arguments = self()
        return VarlenInputs(*[arguments[name] for name in VarlenInputs._fields])

    def attributes(self) -> dict[str, Any]:
        """The other arguments."""
        return {name: x for name, x in self().items() if name not in VarlenInputs._fields}

    def weights(self) -> np.ndarray:
        """What the derivative of the loss by the output is."""
        shape = (self.num_tokens + self.padding, self.num_heads)
        shape = (*shape, self.value_head_size or self.head_size)
        return np.random.default_rng(1).normal(size=shape).astype(DTYPES[self.dtype])


def _cases() -> Iterator[VarlenCase]:
    for dtype in ("float32", "bfloat16"):
        for head_size in (32, 64, 128, 256):
            yield VarlenCase(f"head-size-{head_size}-{dtype}", head_size=head_size, dtype=dtype)
        yield VarlenCase(f"value-{dtype}", head_size=96, value_head_size=64, dtype=dtype)
    yield VarlenCase("float16", dtype="float16")
    for heads, kv_heads in ((1, 1), (4, 4), (6, 1), (7, 7), (15, 3)):
        yield VarlenCase(f"heads-{heads}-of-{kv_heads}", num_heads=heads, num_kv_heads=kv_heads)
    yield VarlenCase("no-padding", padding=0)
    yield VarlenCase("no-sequences", lengths=())
    options: dict[str, dict[str, Any]] = {
        "window-1": {"sliding_window": 1},
        "window-40": {"sliding_window": 40},
        "soft-cap": {"soft_cap": 2.0},
        "not-causal": {"causal": False},
        "both-windows": {"causal": False, "sliding_window": 50, "window_right": 7},
        "right": {"causal": False, "window_right": 129},
        "wide-windows": {"causal": False, "sliding_window": 2**40, "window_right": 2**40},
        "longest": {"max_query_len": 130},
        "negative-scale": {"scale": -0.3},
    }
    for name, given in options.items():
        yield VarlenCase(name, options=given)
    yield VarlenCase("sinks", arrays=("sinks",))
    yield VarlenCase("alibi", arrays=("alibi_slopes",))
    yield VarlenCase("ranges", arrays=("bidirectional_ranges",))
    yield VarlenCase(
        "ranges-window", arrays=("bidirectional_ranges",), options={"sliding_window": 3}
    )
    answers = (70, 33, 1, 64, 0, 90, 20)  # of two prompts, and a second turn
    yield VarlenCase(
        "answers",
        answers,
        num_heads=7,
        num_kv_heads=1,
        head_size=64,
        arrays=("prefix_seqs",),
        prefix_seqs=(-1, 0, 0, 0, 0, -1, 3),
    )
    yield VarlenCase(
        "prefixes-window",
        arrays=("prefix_seqs", "bidirectional_ranges"),
        options={"sliding_window": 40, "causal": False, "window_right": 3},
    )
    yield VarlenCase("by-sequence", arrays=("causal",), options={"window_right": 20})
    for dtype in ("float32", "bfloat16"):
        yield VarlenCase(
            f"everything-{dtype}",
            head_size=48,
            value_head_size=40,
            dtype=dtype,
            arrays=FEATURES["varlen_attention"],
            options={"soft_cap": 3.0, "sliding_window": 60, "window_right": 20},
        )
        yield VarlenCase(f"prefixes-{dtype}", dtype=dtype, arrays=("prefix_seqs",))


CASES = [*_cases()]


def oracle(arguments: dict[str, Any], weights: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """The output of a call, and the gradients of its sum times the weights, by PyTorch's autograd
    over dense attention in float64."""
    import torch  # noqa: PLC0415

    given = dict(arguments)
    count = int(given["num_seqs"].item())
    starts = given["query_start_loc"][: count + 1].tolist()
    leaves = {
        name: torch.from_numpy(given[name].astype(np.float64)).requires_grad_()
        for name in DIFFERENTIABLE
        if name in given
    }
    query, key, value = (leaves[name] for name in DIFFERENTIABLE[:3])
    group = query.shape[1] // key.shape[1]
    scale = float(np.float32(given["scale"]))
    outputs = []
    contexts: list[list[int]] = []
    for s, (start, end) in enumerate(pairwise(starts)):
        own = slice(start, end)
        prefix = -1 if "prefix_seqs" not in given else int(given["prefix_seqs"][s])
        contexts.append([*(contexts[prefix] if prefix >= 0 else []), *range(start, end)])
        context_len = len(contexts[-1])
        k, v = (x[contexts[-1]].repeat_interleave(group, 1) for x in (key, value))
        positions = torch.arange(context_len)
        ahead = positions - positions[context_len - (end - start) :, None]
        causal = given.get("causal", True)
        is_causal = causal if isinstance(causal, bool) else bool(causal[s])
        right = 0 if is_causal else given.get("window_right", context_len)
        attends = (ahead <= right) & (-ahead < given.get("sliding_window", context_len + 1))
        if "bidirectional_ranges" in given:
            first, last = torch.from_numpy(given["bidirectional_ranges"][own]).T[..., None]
            attends |= (positions >= first) & (positions < last)
        logits = scale * torch.einsum("ihd,jhd->hij", query[own], k)
        if "soft_cap" in given:
            logits = given["soft_cap"] * torch.tanh(logits / given["soft_cap"])
        if "alibi_slopes" in leaves:
            logits = logits - leaves["alibi_slopes"][:, None, None] * ahead.abs()
        logits = logits.masked_fill(~attends, -torch.inf)
        if "sinks" in leaves:
            sinks = leaves["sinks"][:, None, None].expand(-1, end - start, 1)
            logits = torch.cat([logits, sinks], -1)
        shares = logits.softmax(-1)[..., :context_len]
        outputs.append(torch.einsum("hij,jhd->ihd", shares, v))
    output = torch.zeros(weights.shape, dtype=torch.float64)
    if outputs:
        output = torch.cat([*outputs, output[starts[-1] :]])
    loss = (output * torch.from_numpy(weights.astype(np.float64)))[: starts[-1]].sum()
    for name, leaf in leaves.items():  # padding counts for nothing
        loss = loss + 0 * (leaf[: starts[-1]] if name in DIFFERENTIABLE[:3] else leaf).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()])
    return output.detach().numpy(), dict(zip(leaves, (x.numpy() for x in gradients), strict=True))
