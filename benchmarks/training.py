"""``make bench OF=training``: attention with its derivative on the CPU beside the frameworks' own.

Each contestant's gradients are checked against float64 first. Then all take turns: forward, and
forward and backward together. The memory of one forward and backward is measured in a process of
its own: by how much its largest resident size grows. The table is that of docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import jax_frontend
import torch_frontend
from benchmarks import contest
from benchmarks.contest import DoesNotApply, OwnProcessors, medians, to_jax
from benchmarks.kept import by_row
from shared_ffi import _native
from tools import machine

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
SCALE = HEAD_SIZE**-0.5
ERRORS = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest errors of gradients, as shares of the largest; outputs and weights are rounded."""
MOST_OF_JAX_NN = 2048
"""Tokens of a sequence. ``jax.nn`` holds tokens x tokens numbers of each head, several times."""

OURS, OURS_IN_JAX, SDPA, JAX_NN = "PyTorch", "JAX", "SDPA", "jax.nn"
UNSHARED = "PyTorch, a prompt for each answer"
PARTS = {"forward": False, "both": True}
"""What is timed, and whether it has the backward."""
Call = Callable[[], list[Any]]


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length. With a prompt, they are its answers."""

    count: int
    length: int
    dtype: str
    prompt: int = 0

    @property
    def name(self) -> str:
        """For the table."""
        answers = f", of a prompt of {self.prompt:,}" if self.prompt else ""
        return f"{self.count} of {self.length:,}{answers}"

    def tensors(self, *, repeats_prompt: bool = False) -> list[torch.Tensor]:
        """Query, key, value and the derivative of the output, ``[tokens, heads, head_size]``."""
        draw = torch.Generator().manual_seed(0)
        num_tokens = self.prompt + self.count * self.length
        found = [
            torch.randn(num_tokens, heads, HEAD_SIZE, generator=draw)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        found[3][: self.prompt] = 0  # a loss is one of answers
        if repeats_prompt:
            prompts = [x[: self.prompt].expand(self.count, -1, -1, -1) for x in found]
            answers = [x[self.prompt :].unflatten(0, (self.count, -1)) for x in found]
            found = [torch.cat(x, 1).flatten(0, 1) for x in zip(prompts, answers, strict=True)]
        return [x.to(getattr(torch, self.dtype)) for x in found]

    def metadata(self, *, repeats_prompt: bool = False) -> dict[str, torch.Tensor]:
        """The arguments of integers."""
        lengths, prefixes = [self.length] * self.count, None
        if self.prompt and repeats_prompt:
            lengths = [self.prompt + self.length] * self.count
        elif self.prompt:
            lengths, prefixes = [self.prompt, *lengths], [-1, *[0] * self.count]
        integers = {"query_start_loc": np.cumsum([0, *lengths]), "num_seqs": [len(lengths)]}
        if prefixes is not None:
            integers["prefix_seqs"] = prefixes
        return {name: torch.tensor(x, dtype=torch.int32) for name, x in integers.items()}


def batches() -> Iterator[Batch]:
    """All that is measured."""
    for dtype in ("float32", "bfloat16"):
        yield Batch(1, 1024, dtype)
        yield Batch(8, 128, dtype)
        yield Batch(1, 8192, dtype)
        yield Batch(8, 256, dtype, prompt=1024)


def _in_torch(
    attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], *, backward: bool
) -> Call:
    *leaves, dout = tensors
    leaves = [x.requires_grad_(backward) for x in leaves]

    def run() -> list[Any]:
        output = attend(*leaves)
        return [*torch.autograd.grad(output, leaves, dout)] if backward else [output]

    return run


def _in_jax(attend: Callable[..., Any], tensors: list[Any], *, backward: bool) -> Call:
    *leaves, dout = [to_jax(x) for x in tensors]

    def gradients(*arrays: Any) -> Any:
        _, pullback = jax.vjp(attend, *arrays[:-1])
        return pullback(arrays[-1])

    function = jax.jit(gradients if backward else lambda *arrays: (attend(*arrays[:-1]),))
    return lambda: [*jax.block_until_ready(function(*leaves, dout))]


def ours(batch: Batch, *, backward: bool, repeats_prompt: bool = False) -> Call:
    """``varlen_attention`` in eager PyTorch."""
    metadata: dict[str, Any] = batch.metadata(repeats_prompt=repeats_prompt)
    attend = partial(torch_frontend.varlen_attention, **metadata, scale=SCALE)
    tensors = batch.tensors(repeats_prompt=repeats_prompt)
    return _in_torch(attend, tensors, backward=backward)


def ours_in_jax(batch: Batch, *, backward: bool) -> Call:
    """``varlen_attention`` in JAX."""
    metadata = {name: to_jax(x) for name, x in batch.metadata().items()}
    attend = partial(jax_frontend.varlen_attention, **metadata, scale=SCALE)
    return _in_jax(attend, batch.tensors(), backward=backward)


def sdpa(batch: Batch, *, backward: bool, dtype: torch.dtype | None = None) -> Call:
    """PyTorch's own attention, with the batch as a dimension. Answers repeat their prompt."""

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.unflatten(0, (batch.count, -1)).transpose(1, 2) for x in inputs)
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)

    tensors = [x.to(dtype or x.dtype) for x in batch.tensors(repeats_prompt=batch.prompt > 0)]
    return _in_torch(attend, tensors, backward=backward)


def jax_nn(batch: Batch, *, backward: bool) -> Call:
    """JAX's own attention, compiled. Answers repeat their prompt."""
    if batch.prompt + batch.length > MOST_OF_JAX_NN:
        raise DoesNotApply("so many tokens within the memory")

    def attend(*inputs: Any) -> Any:
        rows = (x.reshape(batch.count, -1, *x.shape[1:]) for x in inputs)
        found = jax.nn.dot_product_attention(*rows, scale=SCALE, is_causal=True)
        return found.reshape(-1, *found.shape[2:])

    return _in_jax(attend, batch.tensors(repeats_prompt=batch.prompt > 0), backward=backward)


MAKERS: dict[str, Callable[..., Call]] = {
    OURS: ours,
    OURS_IN_JAX: ours_in_jax,
    SDPA: sdpa,
    JAX_NN: jax_nn,
    UNSHARED: partial(ours, repeats_prompt=True),
}


def check(batch: Batch, gradients: dict[str, list[Any]]) -> dict[str, float]:
    """The largest error of each contestant's gradients, as a share of the largest. Raises
    AssertionError if one is above its tolerance."""
    expected = [x.numpy() for x in sdpa(batch, backward=True, dtype=torch.float64)()]
    errors = {}
    for name, found in gradients.items():
        arrays = [np.asarray(x.float() if isinstance(x, torch.Tensor) else x) for x in found]
        wanted = expected
        if len(arrays[0]) != len(wanted[0]):  # the prompt is there once
            wanted = [_summed_over_prompts(batch, x) for x in wanted]
        errors[name] = max(
            float(np.abs(x.astype(np.float64) - y).max() / np.abs(y).max())
            for x, y in zip(arrays, wanted, strict=True)
        )
        assert errors[name] <= ERRORS[batch.dtype], (batch, name, errors[name])
    return errors


def _summed_over_prompts(batch: Batch, gradient: np.ndarray) -> np.ndarray:
    by_answer = gradient.reshape(batch.count, -1, *gradient.shape[1:])
    prompts, answers = np.split(by_answer, [batch.prompt], 1)
    return np.concatenate([prompts.sum(0), answers.reshape(-1, *gradient.shape[1:])])


def row_of(batch: Batch) -> dict[str, Any]:
    """Errors, times and memory of a batch."""
    row: dict[str, Any] = asdict(batch) | {"seconds": {}}
    chosen = {name: x for name, x in MAKERS.items() if batch.prompt or name != UNSHARED}
    for part, backward in PARTS.items():
        calls = {}
        for name, make in chosen.items():
            try:
                calls[name] = make(batch, backward=backward)
            except DoesNotApply:
                continue
        if backward:
            row["errors"] = check(batch, {name: call() for name, call in calls.items()})
        row["seconds"][part] = medians(contest.seconds(calls, take=OwnProcessors().turn))
    row["peak_bytes"] = {name: peak_bytes(batch, name) for name in (OURS, SDPA)}
    return row


def peak_bytes(batch: Batch, name: str) -> int:
    """By how much a process grows by a forward and a backward."""
    words = [sys.executable, "-m", "benchmarks.training", "--peak", name]
    words += ["--batch", json.dumps(asdict(batch))]
    return int(subprocess.check_output(words, text=True).split()[-1])


def _grow(batch: Batch, name: str) -> int:
    small = Batch(batch.count, 16, batch.dtype, min(batch.prompt, 16))
    MAKERS[name](small, backward=True)()  # threads and code are there
    call = MAKERS[name](batch, backward=True)
    Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(size)


def table(results: dict[str, Any]) -> str:
    """In Markdown: ours divided by another's."""
    heads = ["sequences", "dtype", "SDPA: forward", "and backward", "`jax.nn`: forward"]
    lines = ["| " + " | ".join([*heads, "and backward", "memory, of SDPA's"]) + " |"]
    lines.append("|---" * (len(heads) + 2) + "|")

    def ratio(numbers: dict[str, float], name: str, other: str) -> str:
        return f"{numbers[name] / numbers[other]:.2f}" if numbers.get(other) else "-"

    for row in results["rows"]:
        batch = Batch(**{name: row[name] for name in Batch.__dataclass_fields__})
        cells = [batch.name, batch.dtype]
        for name, other in ((OURS, SDPA), (OURS_IN_JAX, JAX_NN)):
            cells += [ratio(row["seconds"][part], name, other) for part in PARTS]
        cells.append(ratio(row["peak_bytes"], OURS, SDPA))
        lines.append("| " + " | ".join(cells) + " |")
    shared = [
        row["seconds"]["both"][OURS] / row["seconds"]["both"][UNSHARED]
        for row in results["rows"]
        if row["prompt"]
    ]
    if shared:
        ratios = " and ".join(f"{x:.2f}" for x in shared)
        lines += ["", f"Answers that share their prompt take {ratios} of the time of answers with"]
        lines += ["one each, forward and backward."]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the results to this file, as JSON")
    parser.add_argument("--only", default="", help="batches whose name or dtype holds this")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--batch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(_grow(Batch(**json.loads(options.batch)), options.peak))
        return
    results: dict[str, Any] = {
        "machine": machine.cpu() | {"instruction_set": _native.cpu_instruction_set()},
        "versions": machine.versions(("jax", "torch", "numpy")),
        "rows": [],
    }
    for batch in batches():
        if options.only not in f"{batch.name} {batch.dtype}":
            continue
        results["rows"].append(row_of(batch))
        print(batch.name, batch.dtype, flush=True)
        if options.out:
            options.out.write_text(by_row(results))
    print(table(results))


if __name__ == "__main__":
    main()
