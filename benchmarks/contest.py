"""Contests of attention: results are checked first, then timed beside other libraries in one run.

Contestants take turns, in another order each round, because some libraries' threads spin long
after their turn and disturb the next contestant. A turn queues several calls, so that on a GPU the
work of host and device overlaps, as it does for a user. The mean over a turn's calls is taken, then
the median over rounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.workloads import SCALE, Workload
from tools import machine

Contestant = Callable[[], Any]
T = TypeVar("T")

# Makes a contestant for a workload and its operands, or raises an exception that says why not.
Maker = Callable[[Workload, list[torch.Tensor]], Contestant]


class DoesNotApply(Exception):
    """The library has no way to compute this workload."""


_TAKE_8_BITS: set[Maker] = set()


def takes_8_bits(make: Maker) -> Maker:
    """Decorator for contestants that support 8-bit caches."""
    _TAKE_8_BITS.add(make)
    return make


_TAKE_LATENT: set[Maker] = set()


def takes_latent(make: Maker) -> Maker:
    """Decorator for contestants that support V as a part of K."""
    _TAKE_LATENT.add(make)
    return make


# How often each contestant of a row takes a turn. Short calls vary more.
ROUNDS, SHORT_ROUNDS, SHORT_BYTES = 7, 21, 1 << 23


def wait_for(result: Any) -> Any:
    """Waits until all queued work is done. Returns the result."""
    for array in result if isinstance(result, list) else [result]:
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def turn(call: Contestant, calls: int, watch: Callable[[], object] | None = None) -> float:
    """The mean time of `calls` calls. `watch` is called while a GPU still computes them."""
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    if watch is not None:
        watch()
    wait_for(result)
    return (time.perf_counter() - start) / calls


class OwnProcessors:
    """Turns in which each computing thread of a contestant has a processor of its own.

    Linux wakes a thread where the waking one runs, and moves it milliseconds later, when a short
    call has ended. Threads that a library has placed itself stay there.
    """

    def __init__(self) -> None:
        self._processors = os.sched_getaffinity(0)
        self._threads: dict[Contestant, list[int]] = {}

    def turn(self, call: Contestant, calls: int) -> float:
        """As the function `turn`. A contestant's first turns show which threads compute."""
        if call not in self._threads:
            once = turn(call, calls)  # compiles, and starts the threads
            times = each_thread(running_time)
            turn(call, max(1, min(50, int(0.02 / once))))
            self._threads[call] = busiest(times)[: len(self._processors)]
            return once
        before = each_thread(os.sched_getaffinity)
        free = [x for x in self._threads[call] if before.get(x) == self._processors]
        try:
            for thread, processor in zip(free, self._processors, strict=False):
                os.sched_setaffinity(thread, {processor})
            return turn(call, calls)
        finally:  # a thread that began meanwhile is where its parent was
            each_thread(lambda x: os.sched_setaffinity(x, before.get(x, self._processors)))


def each_thread(function: Callable[[int], T]) -> dict[int, T]:
    """What a function returns for each thread of this process that has not ended."""
    results = {}
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            results[int(name)] = function(int(name))
    return results


def running_time(thread: int) -> int:
    """The nanoseconds that a thread of this process has run."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


def busiest(before: Mapping[int, int]) -> list[int]:
    """The threads that have computed since these running times, the one with most first; each ran
    at least a tenth of its time."""
    ran = {x: time - before.get(x, 0) for x, time in each_thread(running_time).items()}
    order = sorted(ran, key=ran.__getitem__, reverse=True)
    return [thread for thread in order if ran[thread] > ran[order[0]] / 10]


def seconds(
    contestants: Mapping[str, Any],
    rounds: int = ROUNDS,
    budget: float = 0.05,
    rest: float = 0.05,
    take: Callable[[Any, int], float] = turn,
) -> dict[str, list[float]]:
    """The mean time of a call of each contestant, in every round of about `budget` seconds.

    Args:
        rest: seconds of sleep before each turn; a CPU's previous contestant may still spin.
        take: how a contestant takes a turn of some calls; returns the mean time.
    """
    calls, most = {}, {}
    for name, call in contestants.items():
        take(call, 1)  # compiles
        once = take(call, 1)
        calls[name] = max(1, min(1000, int(budget / once)))
        most[name] = rounds if once < 20 * budget else 3
    return take_turns(contestants, rounds, calls, rest, most, take)


def take_turns(
    contestants: Mapping[str, Any],
    rounds: int,
    calls: Mapping[str, int],
    rest: float = 0,
    most: Mapping[str, int] | None = None,
    take: Callable[[Any, int], float] = turn,
) -> dict[str, list[float]]:
    """The mean time of a call of each contestant, in every round.

    Args:
        calls: how many calls each contestant makes in a turn.
        rest: seconds of sleep before each turn.
        most: the number of rounds for contestants that are too slow for all of them.
        take: as for `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    for i in range(rounds):
        for name, call in order.sample(list(contestants.items()), len(contestants)):
            if i >= (most or {}).get(name, rounds):
                continue
            time.sleep(rest)
            times[name].append(take(call, calls[name]))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median time of each contestant."""
    return {name: statistics.median(values) for name, values in times.items()}


def key_and_value(workload: Workload, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The K and the V of positions of the cache, [..., positions, num_kv_heads, size]."""
    columns = workload.model.value_head_size
    if columns is None:
        return rows[..., 0::2, :], rows[..., 1::2, :]
    return rows.unsqueeze(-2), rows[..., None, :columns]


def error_of(result: Any, workload: Workload, operands: list[torch.Tensor]) -> float:
    """The largest error of a sample of rows against float64, divided by what rounding allows."""
    result = (
        torch.utils.dlpack.from_dlpack(result) if not isinstance(result, torch.Tensor) else result
    )
    query, cache, _, tables, starts, _ = operands
    model, worst = workload.model, 0.0
    for s in {0, len(workload.sequences) // 2, len(workload.sequences) - 1}:
        q_len, context = workload.sequences[s]
        blocks = tables[s, : -(-context // workload.block_size)].long()
        # Indexed as bytes, because PyTorch cannot index 8-bit floats.
        bits = cache.view(torch.uint8)[blocks].flatten(0, 1)[:context]
        kv = bits.view(cache.dtype)
        for i in {0, q_len // 2, q_len - 1}:
            position = context - q_len + i
            first = max(0, position - model.sliding_window + 1) if model.sliding_window else 0
            attended = kv[first : position + 1].double()
            if workload.cache_dtype is not None:
                attended *= SCALE
            group = model.num_heads // model.num_kv_heads
            key, value = key_and_value(workload, attended)
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            row = int(starts[s]) + i
            logits = (
                torch.einsum("hd,jhd->hj", query[row].double(), key) * model.attributes()["scale"]
            )
            if model.soft_cap:
                logits = model.soft_cap * torch.tanh(logits / model.soft_cap)
            weights = torch.softmax(logits, -1)
            expected = torch.einsum("hj,jhd->hd", weights, value)
            sizes = torch.einsum("hj,jhd->hd", weights, value.abs())
            rounding = torch.finfo(query.dtype).eps
            allowed = 1e-4 + (expected.abs() + sizes) * rounding
            error = (result[row].double() - expected).abs() / allowed
            worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


MOST_COPIES = 64


def copies_past_the_cache(workload: Workload, device: str) -> int:
    """How many copies of a workload's K and V are twice the last cache of the device."""
    if device == "cuda":
        cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    else:
        cache_bytes = machine.last_cache_bytes()
    return max(1, min(MOST_COPIES, -(-2 * cache_bytes // workload.kv_bytes)))


def in_turn(calls: list[Contestant]) -> Contestant:
    """Makes the next call each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def in_one_go(calls: list[Contestant]) -> Contestant:
    """Makes several calls on a GPU without Python between them: a CUDA graph, or for JAX one
    program. Returns all results. In the program each call waits for the one before it, as the
    layers of a model do."""
    programs = [call for call in calls if isinstance(call, Jitted)]
    if len(programs) == len(calls):

        def function(*arguments: Any) -> list[Any]:
            results: list[Any] = []
            for program, arrays in zip(programs, arguments, strict=True):
                arrays, _ = jax.lax.optimization_barrier((arrays, results[-1:]))
                results.append(program.function(*arrays))
            return results

        import jax  # noqa: PLC0415

        return Jitted(function, *(program.arrays for program in programs))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = [call() for call in calls]

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return results

    replay.calls = calls  # type: ignore[attr-defined]  # the graph reads what they hold
    return replay


@dataclass
class Prepared:
    """Contestants whose results are right, and why the others do not take part."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    calls: int = 1  # of the op, that a call of a contestant makes
    errors: dict[str, float] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)  # digests of the results
    absent: dict[str, str] = field(default_factory=dict)


def prepare(
    workload: Workload,
    device: str,
    makers: Mapping[str, Maker],
    calls: int = 1,
    allowed: float = 1,
) -> Prepared:
    """Makes the contestants of a workload and checks their results.

    A contestant computes copies of the workload one after the other, so that it finds no K and V in
    the caches, like a layer of a model whose other layers have run since. On a GPU all copies are
    computed in one go: a short call would measure Python.

    Args:
        calls: on a GPU, how many calls in one go there are at least.
        allowed: the largest error; infinite for builds that are wrong on purpose.
    """
    on_gpu = device == "cuda"
    operands = [workload.operands(device) for _ in range(copies_past_the_cache(workload, device))]
    copies = operands * -(-calls // len(operands)) if on_gpu else operands
    found = Prepared(calls=len(copies) if on_gpu else 1)
    for name, make in makers.items():
        try:
            if workload.cache_dtype is not None and make not in _TAKE_8_BITS:
                raise DoesNotApply(f"a cache of {workload.cache_dtype}")
            if workload.model.value_head_size is not None and make not in _TAKE_LATENT:
                raise DoesNotApply("V as a part of K")
            made = [make(workload, each) for each in operands]
            wait_for(made[0]())  # warms up
            if on_gpu:
                call = in_one_go(made * (len(copies) // len(operands)))
                result = wait_for(call())[-1]
            else:
                share_compiled(made)
                call, result = in_turn(made), wait_for(made[-1]())
            found.errors[name] = error_of(result, workload, operands[-1])
            found.bits[name] = digest(result)
        except DoesNotApply as reason:
            found.absent[name] = f"does not compute {reason}"
        except Exception as error:  # the table shows it, whatever a library raises
            found.absent[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        else:
            if found.errors[name] <= allowed:
                found.contestants[name] = call
            else:
                found.absent[name] = f"wrong: {found.errors[name]:.3g} times the allowed error"
    return found


def digest(result: Any) -> str:
    """A digest of a result's bits."""
    if not isinstance(result, torch.Tensor):
        result = torch.utils.dlpack.from_dlpack(result)
    content = result.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(content).hexdigest()[:16]


def row_of(
    workload: Workload, makers: Mapping[str, Maker], limits: Mapping[str, Contestant] | None = None
) -> dict[str, Any]:
    """The result of a workload on the CPU: times, errors, and why a contestant did not take part.

    Args:
        limits: what to time in the same rounds as the machine's limits.
    """
    found = prepare(workload, "cpu", makers)
    rounds = SHORT_ROUNDS if workload.kv_bytes <= SHORT_BYTES else ROUNDS
    calls = {**(limits or {}), **found.contestants}
    times = seconds(calls, rounds, take=OwnProcessors().turn)
    return described(workload, times, found)


def described(
    workload: Workload, times: Mapping[str, list[float]], found: Prepared
) -> dict[str, Any]:
    """A workload's row: the median and the range of each contestant's times, and what was found."""
    return {
        "workload": workload.name,
        "kind": workload.kind,
        "model": str(workload.model),
        "dtype": workload.dtype,
        "cache_dtype": workload.cache_dtype or workload.dtype,
        "kv_bytes": workload.kv_bytes,
        "flops": workload.flops,
        "seconds": medians(times),
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "errors": found.errors,
        "absent": found.absent,
    }


@takes_8_bits
@takes_latent
def ours(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """This library, through torch eager."""
    import torch_frontend  # noqa: F401, PLC0415

    attributes = workload.attributes(operands[0].device)
    return lambda: torch.ops.xla_gpu.paged_attention(*operands, **attributes)


@takes_8_bits
@takes_latent
def ours_with_hint(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """This library, with max_query_len=1."""
    import torch_frontend  # noqa: F401, PLC0415

    if workload.kind != "decode":
        raise DoesNotApply("more than a query for each sequence")
    attributes = workload.attributes(operands[0].device) | {"max_query_len": 1}
    return lambda: torch.ops.xla_gpu.paged_attention(*operands, **attributes)


@takes_8_bits
@takes_latent
def ours_with_16_bits(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """For workloads with an 8-bit cache: this library on a cache of the query's dtype, with the
    same numbers."""
    import torch_frontend  # noqa: F401, PLC0415

    if workload.cache_dtype is None:
        raise DoesNotApply("a cache that has no 8 bits")
    query, cache, *others = operands
    wide = (cache.float() * SCALE).to(query.dtype)
    attributes = workload.model.attributes()
    return lambda: torch.ops.xla_gpu.paged_attention(query, wide, *others, **attributes)


@takes_8_bits
@takes_latent
def ours_portable(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """This library with the kernels that run on all GPUs, and with max_query_len=1 for decoding, as
    with XLA_GPU_CUDA_KERNELS=portable."""
    from shared_ffi import _native  # noqa: PLC0415

    if operands[0].device.type != "cuda":
        raise DoesNotApply("on the CPU")
    before = _native.cuda_choice()
    if "prefill" not in _native.cuda_kernels_in_use():
        raise DoesNotApply("where these kernels are in use anyway")
    attend = (ours_with_hint if workload.kind == "decode" else ours)(workload, operands)

    def run() -> Any:
        _native.set_cuda_choice("portable")
        try:
            return attend()
        finally:
            _native.set_cuda_choice(before)

    return run


class Jitted:
    """A jitted JAX function and its arguments. It runs on JAX's own stream, so `wait_for` needs its
    result."""

    def __init__(self, function: Callable[..., Any], *arrays: Any) -> None:
        import jax  # noqa: PLC0415

        self.function, self.arrays = function, arrays
        self.compiled = jax.jit(function)

    def __call__(self) -> Any:
        """Starts the computation."""
        return self.compiled(*self.arrays)


def share_compiled(calls: list[Contestant]) -> None:
    """Lets calls of one function, with arrays of the same shapes, use the first one's program."""
    for call in calls:
        if isinstance(call, Jitted) and isinstance(calls[0], Jitted):
            call.compiled = calls[0].compiled


def to_jax(tensor: torch.Tensor) -> Any:
    """A tensor as a JAX array on the same memory. 8-bit floats are copied, because PyTorch cannot
    exchange them."""
    import jax  # noqa: PLC0415

    if tensor.dtype == torch.float8_e4m3fn:
        array = jax.dlpack.from_dlpack(tensor.contiguous().view(torch.uint8))
        return jax.lax.bitcast_convert_type(array, "float8_e4m3fn")
    return jax.dlpack.from_dlpack(tensor.contiguous())


@takes_8_bits
@takes_latent
def jax_ours(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """This library, through JAX."""
    import jax_frontend  # noqa: PLC0415

    attributes = workload.attributes(operands[0].device)
    for name in ("k_scale", "v_scale"):
        if name in attributes:
            attributes[name] = to_jax(attributes[name])
    attend = partial(jax_frontend.paged_attention, **attributes)
    return Jitted(attend, *map(to_jax, operands))


def gathered(workload: Workload, operands: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [batch, num_kv_heads, context, head_size]; all sequences must be equal."""
    if len(set(workload.sequences)) != 1:
        raise DoesNotApply("sequences of several lengths")
    if workload.model.sliding_window or workload.model.soft_cap:
        raise DoesNotApply("a window or a cap")
    context = workload.sequences[0][1]
    blocks = operands[1][operands[3].long()]
    key, value = key_and_value(workload, blocks.flatten(1, 2)[:, :context])
    return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()


@takes_latent
def torch_sdpa(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """torch.nn.functional.scaled_dot_product_attention over gathered K and V. On the CPU it copies
    them for each head: 13 GB for eight sequences of 2,048 latent rows and 128 heads."""
    if operands[0].device.type == "cpu" and workload.model.num_heads > 64:
        raise DoesNotApply("so many heads within memory")
    key, value = gathered(workload, operands)
    q_len, context = workload.sequences[0]
    if q_len not in (1, context):
        raise DoesNotApply("causal attention of a chunk")
    query = operands[0].unflatten(0, (-1, q_len)).transpose(1, 2)
    scale = workload.model.attributes()["scale"]

    def run() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=q_len > 1, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return run


OURS: dict[str, Maker] = {"torch eager": ours, "JAX": jax_ours}
TO_BEAT_WITH_8_BITS: dict[str, Maker] = {"this library, 16-bit cache": ours_with_16_bits}
OURS_ON_GPUS = OURS | {
    "torch eager, max_query_len": ours_with_hint,
    "torch eager, XLA_GPU_CUDA_KERNELS=portable": ours_portable,
}
