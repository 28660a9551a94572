"""Calls on PyTorch's own tensors: a call is checked once for each signature, its rules each time."""

from __future__ import annotations

import gc
import operator
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from harness.compare import assert_same_bits
from shared_ffi import _native, eager
from tests.cases.all import SHORT_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.sound_calls import add, attention, update
from tests.support import backends, calls, scripts
from tests.support.calls import overload_of, split_keywords
from tests.support.models import tensors
from torch_frontend.operator.eager import share_elements

OPS = torch.ops.xla_gpu
DEFAULT = OPS.paged_attention.default
MODES = [torch.inference_mode, torch.no_grad, nullcontext]


def attention_operands() -> list[torch.Tensor]:
    query, cache, *rest = tensors(attention())
    return [torch.randn_like(query), torch.randn_like(cache), *rest]


def keywords_of(case: Any) -> dict[str, Any]:
    arrays, options = split_keywords(case.attributes())
    return options | {name: backends.to_torch(x) for name, x in arrays.items()}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops of the calls that are checked."""
    handler_of, ops = eager.handler_of, list[str]()
    monkeypatch.setattr(
        eager, "handler_of", lambda call, *rest: (ops.append(call.op), handler_of(call, *rest))[1]
    )
    return ops


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.id)
def test_attention(case: Case, mode: Any, checked: list[str]) -> None:
    overload, keywords = overload_of("paged_attention", keywords_of(case))
    operands = [*map(backends.to_torch, case.inputs())]
    with mode():
        first = overload(*operands, **keywords)
        checked.clear()
        again = overload(*operands, **keywords)
        assert not checked
        assert type(again) is type(first)
        assert_same_bits(
            *(backends.to_numpy(x[0] if isinstance(x, tuple) else x) for x in (again, first))
        )
        if isinstance(first, tuple):
            assert_same_bits(backends.to_numpy(again[1]), backends.to_numpy(first[1]))
            return
        for _ in range(2):
            out = torch.full_like(first, torch.nan)
            checked.clear()
            with calls.observed_calls() as made:
                assert OPS.paged_attention.out(*operands, **keywords, out=out) is out
            assert out.data_ptr() in made[-1][1]
            assert_same_bits(backends.to_numpy(out), backends.to_numpy(first))
        assert not checked


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_update(case: Any, mode: Any, checked: list[str]) -> None:
    operands, keywords = [*map(backends.to_torch, case.inputs())], keywords_of(case)
    written = [operands[0], *calls.written(keywords)]
    before = [x.clone() for x in written]
    after = []
    with mode():
        for _ in range(2):
            for x, value in zip(written, before, strict=True):
                x.copy_(value)
            checked.clear()
            versions = [x._version for x in written]
            assert OPS.kv_cache_update(*operands, **keywords) is None
            assert [x._version for x in written] == [x + 1 for x in versions]
            after.append([backends.to_numpy(x) for x in written])
        assert not checked
    for a, b in zip(*after, strict=True):
        assert_same_bits(a, b)


def test_what_a_call_depends_on(checked: list[str]) -> None:
    """Each of these calls differs from the first in one thing, and is not taken for it."""
    query, cache, *rest = attention_operands()
    rows = torch.randn(len(query), 3, *query.shape[1:])
    different: list[tuple[Any, dict[str, Any]]] = [
        ((query, cache, *rest, 0.5), {}),
        ((query, cache, *rest, 0.25), {}),
        ((query, cache, *rest, 0.5, 2), {}),
        ((query, cache, *rest, 0.5, None, 2.0), {}),
        ((query, cache, *rest, 0.5), {"causal": False}),
        ((query, cache, *rest, 0.5), {"kv_layout": "nb(2h)d"}),
        ((query.half(), cache.half(), *rest, 0.5), {}),
        ((rows[:, 1], cache, *rest, 0.5), {}),
        ((query, torch.cat([cache] * 2), *rest, 0.5), {}),
    ]
    with torch.inference_mode():
        found = []
        for _ in range(2):
            checked.clear()
            found.append([OPS.paged_attention(*x, **keywords) for x, keywords in different])
    assert not checked
    for first, again in zip(*found, strict=True):
        assert torch.equal(first, again)
    for other in found[1][1:6]:
        assert not torch.equal(other, found[1][0])


@pytest.mark.parametrize("mode", [*MODES, lambda: torch.device("meta")])
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_results_are_ordinary_tensors(num_tokens: int, mode: Any) -> None:
    query, *rest = attention_operands()
    query = torch.nn.Parameter(query[:num_tokens], requires_grad=False)
    if num_tokens == 0:
        rest[3] = torch.zeros_like(rest[3])
        rest[4] = torch.zeros_like(rest[4])
    with mode():
        like = torch.empty((num_tokens, *query.shape[1:]), device="cpu")
        for _ in range(2):
            result, lse = OPS.paged_attention.lse(query, *rest, 0.5)
            for x in (result, lse):
                assert type(x) is torch.Tensor and x.dtype == like.dtype and x.device == like.device
                assert x.is_inference() == like.is_inference()
                assert not x.requires_grad
            assert result.stride() == like.stride()
            assert result.untyped_storage().nbytes() == like.untyped_storage().nbytes()


def test_tensors_that_are_copied(checked: list[str]) -> None:
    _, *rest = attention_operands()
    query = torch.randn(4, 8, 4).transpose(1, 2)
    expected = OPS.paged_attention(query.contiguous(), *rest, 0.5)
    assert torch.equal(OPS.paged_attention(query, *rest, 0.5), expected)
    checked.clear()
    for _ in range(2):
        assert torch.equal(OPS.paged_attention(query, *rest, 0.5), expected)
    assert not checked


def test_python_runs_once_for_a_signature(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, too. Meanwhile C++ finds the sizes of the scratch once."""
    operands, sizes = attention_operands(), _native.scratch_sizes
    found, frames = list[Any](), list[str]()
    monkeypatch.setattr(_native, "scratch_sizes", lambda **x: found.append(sizes(**x)) or found[-1])
    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, int)  # without CUDA, they are Python's
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", operator.invert, raising=False)

    def record(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            frames.append(frame.f_code.co_qualname)

    def calls() -> None:
        DEFAULT.redispatch(cuda, *operands, 0.5)
        DEFAULT(*operands, 0.5)

    calls()
    assert len(found) == 1
    gc.disable()  # JAX and hypothesis run Python when garbage is collected
    sys.setprofile(record)
    try:
        calls()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert [x for x in frames if not x.startswith("OpOverload.")] == [
        "test_python_runs_once_for_a_signature.<locals>.calls"
    ]


def test_calls_on_cuda_restore_the_device(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, int]]()
    monkeypatch.setattr(
        torch.cuda, "_exchange_device", lambda device: seen.append(("use", device)) or 3
    )
    monkeypatch.setattr(
        torch.cuda, "_maybe_exchange_device", lambda device: seen.append(("restore", device))
    )
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda x: seen.append(("stream", x)) or 0
    )
    a = torch.ones(5)
    for failing in (None, "cudaLaunchKernelEx"):
        if failing is not None:
            monkeypatch.setenv("EMULATED_GPU_FAIL", failing)
        with pytest.raises(RuntimeError, match=failing) if failing else nullcontext():
            torch.ops.xla_gpu.simple_add.default.redispatch(cuda, a, a)
        assert seen == [("use", -1), ("stream", -1), ("restore", 3)]
        seen.clear()


def refused() -> Iterator[Any]:
    """A change of a call, the exception and its message."""

    def requires_grad(call: dict[str, Any]) -> None:
        call["query"] = call["query"].clone().requires_grad_()

    def out_requires_grad(call: dict[str, Any]) -> None:
        call["out"].requires_grad_()

    def overlapping(call: dict[str, Any]) -> None:
        call["out"] = call["query"]

    def block(call: dict[str, Any]) -> None:
        call["block_tables"] = torch.full_like(call["block_tables"], 10**6)

    def inference(call: dict[str, Any]) -> None:
        with torch.inference_mode():
            call["out"] = call["out"].clone()

    def missing(call: dict[str, Any]) -> None:
        call["block_tables"] = None

    yield pytest.param(requires_grad, NotImplementedError, "requires grad", id="requires-grad")
    yield pytest.param(out_requires_grad, NotImplementedError, "requires grad", id="out")
    yield pytest.param(overlapping, ValueError, "memory of query", id="overlap")
    yield pytest.param(block, ValueError, r"block_tables\[", id="values")
    yield pytest.param(inference, RuntimeError, "inference tensor", id="inference-tensor")
    yield pytest.param(missing, TypeError, "block_tables must be an array", id="missing")


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("change", "kind", "message"), [*refused()])
def test_errors(
    change: Callable[[dict[str, Any]], None], kind: type, message: str, known: bool
) -> None:
    names = ["query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"]
    call = dict(zip(names, attention_operands(), strict=True)) | {"scale": 0.5}
    call["out"] = torch.empty_like(call["query"])
    call["scale"] += 0.125 * known
    if known:
        OPS.paged_attention(**call)
    change(call)
    with pytest.raises(kind, match=f"^paged_attention: .*{message}"):
        OPS.paged_attention(**call)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_tangents(known: bool) -> None:
    query, *rest = attention_operands()
    if known:
        OPS.paged_attention(query, *rest, 0.5)
    with forward_ad.dual_level(), torch.no_grad():
        assert OPS.paged_attention(query, *rest, 0.5).shape == query.shape
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match=r"^paged_attention: .*tangent"):
            OPS.paged_attention(dual, *rest, 0.5)


def random_view(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    for _ in range(rng.randint(1, 4)):
        dim = rng.randrange(x.dim())
        size, kind = x.shape[dim], rng.random()
        if kind < 0.5:
            first, end = sorted(rng.choices(range(size + 1), k=2))
            x = x.narrow(dim, first, end - first)
        elif kind < 0.65:
            steps = slice(rng.randrange(3), None, rng.randint(1, 3))
            x = x[(*[slice(None)] * dim, steps)]
        elif kind < 0.8:
            x = x.transpose(dim, rng.randrange(x.dim()))
        elif kind < 0.9 and size and x.dim() > 1:
            x = x.select(dim, rng.randrange(size))
        elif size and size % 2 == 0:
            x = x.unflatten(dim, (2, -1))
    return x


def numbers_of(x: torch.Tensor) -> set[int]:
    indices = np.ndindex(*x.shape)
    steps = [sum(i * s for i, s in zip(index, x.stride(), strict=True)) for index in indices]
    return {x.storage_offset() + step for step in steps}


def test_two_views_share_elements() -> None:
    """The answer for two views of one tensor is that of counting their elements one by one."""
    rng, found = random.Random(0), Counter[bool]()
    for _ in range(5000):
        x = torch.empty([rng.randint(1, 6) for _ in range(rng.randint(1, 4))])
        a, b = random_view(x, rng), random_view(x, rng)
        share = not numbers_of(a).isdisjoint(numbers_of(b))
        assert share_elements(a, b) == share == share_elements(b, a)
        found[share] += 1
    assert min(found.values()) > 1000


def test_layouts_that_take_too_long_count_as_shared() -> None:
    """4001 * i == 4003 * j + 2 first where i is 4002, so that these share nothing."""
    for size, share in ((900, False), (2000, True)):
        layout, other = (4, (size,), (4001,)), (4, (size,), (4003,))
        assert _native.share_elements(layout, other, 8) is share
    assert not _native.share_elements((1, (2000,), (4002,)), (1, (2000,), (4004,)), 1)  # all even


def test_one_memory_for_two_caches() -> None:
    cache, key, value, slots = tensors(update())
    keys, values = torch.zeros(2, *cache.shape[:2], key.shape[1], cache.shape[3])
    for _ in range(2):
        OPS.kv_cache_update(keys, key, value, slots, kv_layout="nbhd", value_cache=values)
    with pytest.raises(ValueError, match=r"^kv_cache_update: value_cache must not share memory"):
        OPS.kv_cache_update(keys, key, value, slots, kv_layout="nbhd", value_cache=keys)


def test_more_signatures_than_are_kept() -> None:
    ones = torch.ones(5000)
    for n in (*range(1, 4200), 1, 4199):
        assert OPS.simple_add(ones[:n], ones[:n]).sum() == 2 * n


def test_a_kernel_that_was_not_made() -> None:
    kernel = _native.EagerKernel.__new__(_native.EagerKernel)
    with pytest.raises(RuntimeError, match="EagerKernel: __init__ must come before a call"):
        kernel()


def test_a_signature_longer_than_the_memory_of_a_call() -> None:
    """That memory has 2 KB on the stack. The rest is on the heap."""
    operands = tensors(update())
    with pytest.raises(ValueError, match="kv_layout must"):
        OPS.kv_cache_update(*operands, kv_layout="n" * 5000)


def test_a_number_of_another_kind() -> None:
    """True == 1 == 1.0 in Python."""
    a, b, *_ = tensors(add())
    assert torch.equal(OPS.simple_add(a, b), OPS.simple_add(a, b))
    query, *rest = attention_operands()
    one = OPS.paged_attention(query, *rest, 1.0, 1)
    assert torch.equal(OPS.paged_attention(query, *rest, 1, 1), one)
    assert not torch.equal(OPS.paged_attention(query, *rest, 1.0, None), one)


SIZES = """
import torch, torch_frontend

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

int32 = lambda values: torch.tensor(values, dtype=torch.int32)
queries, cache = torch.randn(3000, 8, 64), torch.randn(16, 16, 4, 64)
metadata = int32([1]), int32([[3]]), int32([0, 1]), int32([1])
attend = lambda n: torch.ops.xla_gpu.paged_attention(queries[:n], cache, *metadata, 0.125)
attend(3000)
before = resident_mib()
for n in range(1, 3000):
    attend(n)
print(resident_mib() - before)
"""


def test_calls_that_are_kept_do_not_split_the_heap() -> None:
    """What is kept of a call must not lie between the results of two calls, which are large."""
    (mib,) = scripts.output(SIZES)
    assert int(mib) < 100  # 4,500 where it does


FIRST_CALLS = """
import logging, os, warnings
import torch, torch._dynamo, torch_frontend
from tests.support.models import tensors
from tests.cases.sound_calls import add, attention, training, update

query, cache, *metadata = tensors(attention())
attend, write = (query, cache, *metadata, 0.5), tensors(update())
int8, scales = torch.zeros(4, 2, 4, 8, dtype=torch.int8), torch.zeros(2, 4, 2, 2)
made = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
parts = torch.randn(2, 4, 4, 8)
train = tensors(training())
given = (*train[:3], torch.ones(4, 4, 6), torch.ones(4, 4), torch.ones(4, 4, 6), *train[3:], 0.5)
CALLS = {  # arguments, options, and the number of the argument that may need a gradient
    "paged_attention.default": (attend, {}, 0),
    "paged_attention.lse": (attend, {}, 0),
    "paged_attention.out": (attend, {"out": torch.empty_like(query)}, 0),
    "ragged_paged_attention.default": (attend, {}, 0),
    "kv_cache_update.default": (write, {}, 1),
    "kv_cache_update.with_scales": ((int8, *write[1:]), made, 1),
    "kv_cache_update.full": (write, {"k_norm": torch.ones(8), "norm_eps": 1e-6}, 1),
    "simple_add.default": (tensors(add()), {}, 0),
    "hadamard.default": ((parts,), {}, 0),
    "merge_attention.default": ((parts, parts.sum(-1)), {}, 0),
    "varlen_attention.default": ((*train, 0.5), {}, 0),
    "varlen_attention.lse": ((*train, 0.5), {}, 0),
    "varlen_attention_backward.default": (given, {}, 0),
    "slot_mapping.default": (metadata, {"block_size": 2, "num_tokens": 4}, None),
}
overloads = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith("xla_gpu::")]
public = [x[9:] for x in overloads if "::_" not in x and "functional" not in x]
assert {x if "." in x else f"{x}.default" for x in public} == {*CALLS}, public

class Traced(logging.Handler):
    def emit(self, record):
        _, found, frame = record.getMessage().partition("start tracing ")
        if found:
            print("traces", frame, flush=True)

def as_tuple(results):
    return results if isinstance(results, (tuple, list)) else (results,)

def call(name, needs_grad, is_skipped):
    packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.xla_gpu, packet), overload)
    arguments, options, number = CALLS[name]
    if needs_grad:
        arguments[number].requires_grad_()

    def loop():
        for _ in range(1):
            if is_skipped:
                print(end="")
            results = operator(*arguments, **options)
        return results

    torch._logging.set_logs(dynamo=logging.INFO)
    log = logging.getLogger("torch._dynamo")
    log.handlers[:], log.propagate = [Traced()], False
    try:
        found = as_tuple(torch.compile(loop, backend="eager")())
        again = as_tuple(operator(*arguments, **options))
        print("is", all(x is y is None or torch.equal(x, y) for x, y in zip(found, again)))
    except NotImplementedError as error:
        print("is", error)

warnings.simplefilter("ignore")
for name, (_, _, number) in CALLS.items():
    for needs_grad, is_skipped in [(False, True), (True, True), (True, False)]:
        if needs_grad and number is None:
            continue
        print("call", name, needs_grad, flush=True)
        if os.fork() == 0:
            call(name, needs_grad, is_skipped)
            print(end="", flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
"""


def test_a_first_call_in_a_function_that_is_not_compiled_as_a_whole() -> None:
    """Dynamo gives up a loop around a print(), and a call that fails while it is traced. PyTorch
    then runs the operator eagerly, and Dynamo must stay out of its kernels. Each call is the first
    one of its process."""
    text = "\n".join(scripts.output(FIRST_CALLS))
    calls = re.findall(r"^call (\S+)\.\w+ (\w+)\n((?:traces .*\n)+)is (.*)$", text, re.M)
    assert len(calls) == 14 * 3 - 2
    for op, needs_grad, traced, outcome in calls:
        assert traced.startswith("traces loop ") and "_frontend/" not in traced, traced
        if needs_grad == "True" and not op.startswith(("hadamard", "merge_", "varlen_")):
            op = op.removeprefix("ragged_")
            assert outcome.startswith(f"{op}: inference only, it has no derivative")
        else:
            assert outcome == "True"
