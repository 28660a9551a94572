"""Programs compiled by AOTInductor. They run with one library of this project and none of its
Python packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elftools.elf.elffile import ELFFile
from torch._functorch.aot_autograd import aot_export_module

import shared_ffi
import torch_frontend
from shared_ffi import paged_attention
from tests.support import native
from tests.support.gpu import EmulatedGpu
from torch_frontend.compilers import aot_inductor

OPS = torch.ops.xla_gpu
LIBRARY = shared_ffi.library_path()
BLOCK_SIZE = 4
TABLES = [[3, 11, 7, 0], [5, 2, 9, 1], [-7, 99, -7, 99]]  # the last row is padding


class Step(torch.nn.Module):
    """A layer with its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.full((12, BLOCK_SIZE, 4, 16), torch.nan))

    def forward(
        self, key: torch.Tensor, slots: torch.Tensor, query: torch.Tensor, *metadata: torch.Tensor
    ) -> torch.Tensor:
        OPS.kv_cache_update(self.cache, key, key * 2, slots)
        return OPS.paged_attention(query, self.cache, *metadata, 0.25, 6)


class Features(torch.nn.Module):
    """A strided float8 cache, whose keys have scales that the update makes, and an int8 cache with
    other features. Caches and scales belong to the caller."""

    def forward(
        self, floats: torch.Tensor, ints: torch.Tensor, made: torch.Tensor, key: torch.Tensor,
        slots: torch.Tensor, query: torch.Tensor, scale: torch.Tensor, sinks: torch.Tensor,
        ranges: torch.Tensor, causal: torch.Tensor, *metadata: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        floats = floats[:, 1]
        OPS.kv_cache_update(floats, key, -key, slots, kv_layout="n2hbd", k_scale_cache=made)
        first = OPS.paged_attention(
            query.transpose(0, 1),
            floats,
            *metadata,
            0.25,
            kv_layout="n2hbd",
            k_scale=made,
            causal=False,
        )
        scales = {"k_scale": scale, "v_scale": scale[:1]}
        keys, values = ints.unbind(0)
        OPS.kv_cache_update(keys, key, -key, slots, value_cache=values, **scales)
        return first, *OPS.paged_attention.lse(
            first,
            keys,
            *metadata,
            0.25,
            2,
            30.0,
            value_cache=values,
            sinks=sinks,
            bidirectional_ranges=ranges,
            causal_seqs=causal,
            **scales,
        )


class Rotated(torch.nn.Module):
    """Layers with a fused projection, whose queries are rotated: the slice itself, a number times
    the slice, and the result of another projection. All but the second normalize."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("table", torch.randn(32, 8, generator=generator))
        self.register_buffer("norms", torch.randn(2, 16, generator=generator))

    def forward(
        self, caches: torch.Tensor, slice_: torch.Tensor, times: torch.Tensor, other: torch.Tensor,
        slots: torch.Tensor, positions: torch.Tensor, *metadata: torch.Tensor
    ) -> list[torch.Tensor]:  # fmt: skip
        outputs = []
        for cache, rows, kind in zip(
            caches.unbind(), (slice_, times, times), ("slice", "times", "own"), strict=True
        ):
            query, key, value = (x.unflatten(1, (-1, 16)) for x in rows.split([96, 32, 32], 1))
            if kind != "slice":
                query = (other * 2).view(len(rows), 6, 16) if kind == "own" else query * 3
            rotary = {"query": query, "positions": positions, "cos_sin_cache": self.table}
            norms = {"q_norm": self.norms[0], "k_norm": self.norms[1], "norm_eps": 1e-6}
            others = norms | {"v_norm": True, "norm_offset": 1} if kind != "times" else {}
            OPS.kv_cache_update(cache, key, value, slots, **rotary, **others)
            outputs.append(OPS.paged_attention(query, cache, *metadata, 0.25))
        return outputs


def tokens_of(lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    """Keys, slots, queries and metadata for sequences (q_len, context_len)."""
    starts = np.cumsum([0, *[q_len for q_len, _ in lengths], 0])
    slots = [
        TABLES[s][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
        for s, (q_len, length) in enumerate(lengths)
        for i in range(length - q_len, length)
    ]
    metadata = ([*[length for _, length in lengths], -5], TABLES, starts.tolist(), [len(lengths)])
    generator = torch.Generator().manual_seed(len(slots))
    key = torch.randn(len(slots), 2, 16, generator=generator)
    query = torch.randn(len(slots), 6, 16, generator=generator)
    integers = [torch.tensor(x, dtype=torch.int32) for x in metadata]
    return (key, torch.tensor(slots), query, *integers)


STEPS = [[(5, 5), (3, 3)], [(1, 6), (1, 4)], [(2, 8), (9, 13)], [(1, 9), (1, 14)]]


def features_arguments(num_blocks: int) -> tuple[torch.Tensor, ...]:
    key, slots, query, *metadata = tokens_of([(3, 3), (6, 6)])
    floats = torch.zeros(num_blocks, 3, 2, 2, BLOCK_SIZE, 16).to(torch.float8_e4m3fn)
    ints = torch.zeros(2, num_blocks, BLOCK_SIZE, 2, 16, dtype=torch.int8)
    query = query.transpose(0, 1).contiguous()
    scale, sinks = torch.tensor([0.02, 0.03]), torch.linspace(-1, 1, 6)
    ranges, causal = torch.tensor([[0, 5]]).repeat(len(key), 1).int(), metadata[0] % 2
    made = torch.zeros(num_blocks, BLOCK_SIZE, 2)
    return (floats, ints, made, key, slots, query, scale, sinks, ranges, causal, *metadata)


def exported(module: torch.nn.Module) -> torch.export.ExportedProgram:
    dynamic, static = torch.export.Dim.DYNAMIC, (None,) * 4
    if isinstance(module, Step):
        arguments = tokens_of(STEPS[0])
        shapes: Any = ({0: dynamic}, {0: dynamic}, {0: dynamic}, static)
    else:
        arguments = features_arguments(12)
        shapes = ({0: dynamic}, {1: dynamic}, {0: dynamic}, *[None] * 7, static)
    return torch.export.export(module, arguments, dynamic_shapes=shapes)


def compiled(module: torch.nn.Module, folder: Path) -> Path:
    path = folder / f"{type(module).__name__}.pt2"
    assert torch_frontend.aoti_compile_and_package(exported(module), package_path=path) == str(path)
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(Step(), tmp_path_factory.mktemp("step"))


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(Features(), tmp_path_factory.mktemp("features"))


def run_alone(script: str, *arguments: object, **environment: str) -> Any:
    """Runs a script in a process that cannot import this project, JAX or torch_xla."""
    prelude = """
        import sys
        for name in ("shared_ffi", "torch_frontend", "jax_frontend", "jax", "torch_xla"):
            sys.modules[name] = None
        import torch
    """
    return subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(prelude) + textwrap.dedent(script)]
        + [str(x) for x in arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment,
    )


RUN = """
    package, calls, outcomes = sys.argv[1:]
    program = torch._inductor.aoti_load_package(package)
    torch.save([(program(*call), call) for call in torch.load(calls)], outcomes)
"""


def outcomes_of(package: Path, calls: list[tuple[torch.Tensor, ...]], folder: Path) -> Any:
    """Makes the calls in turn. Returns the result and the arguments after each call."""
    torch.save(calls, folder / "calls.pt")
    outcome = run_alone(RUN, package, folder / "calls.pt", folder / "outcomes.pt")
    assert outcome.returncode == 0, outcome.stderr
    return torch.load(folder / "outcomes.pt")


def assert_equal(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_steps_of_any_length_share_a_cache(step: Path, tmp_path: Path) -> None:
    eager, calls = Step(), [tokens_of(lengths) for lengths in STEPS]
    outcomes = outcomes_of(step, calls, tmp_path)
    for call, (result, _) in zip(calls, outcomes, strict=True):
        assert not result.isnan().any()
        assert_equal([result], [eager(*call)])


def test_rotated_queries(tmp_path: Path) -> None:
    _, slots, _, *metadata = tokens_of([(5, 5), (3, 3)])
    generator = torch.Generator().manual_seed(0)
    rows, other = (torch.randn(8, 16 * n, generator=generator) for n in (10, 6))

    def arguments() -> tuple[torch.Tensor, ...]:
        caches = torch.zeros(3, 12, BLOCK_SIZE, 4, 16)
        return (caches, rows.clone(), rows.clone(), other, slots, torch.arange(8), *metadata)

    package, module = tmp_path / "rotated.pt2", Rotated()
    program = torch.export.export(module, arguments())
    torch_frontend.aoti_compile_and_package(program, package_path=package)
    ((results, after),) = outcomes_of(package, [arguments()], tmp_path)
    eager = arguments()
    assert_equal(results, module(*eager))
    assert_equal(after, eager)
    assert not torch.equal(after[1], rows), "the slice of the caller's array is not rotated"
    assert torch.equal(after[2], rows), "an array is written whose slice is not the query"


@pytest.mark.parametrize("num_blocks", [12, 17])
def test_features(features: Path, tmp_path: Path, num_blocks: int) -> None:
    arguments = features_arguments(num_blocks)
    ((results, after),) = outcomes_of(features, [arguments], tmp_path)
    assert_equal(results, Features()(*arguments))
    assert_equal(after, arguments)
    assert after[0].float().any() and after[1].any()


def code_of(package: Path) -> str:
    with zipfile.ZipFile(package) as file:
        (name,) = [name for name in file.namelist() if name.endswith("wrapper.cpp")]
        return file.read(name).decode()


def test_caches_are_not_copied(step: Path, features: Path) -> None:
    for package in (step, features):
        allocations = re.findall(r"aoti_torch_empty_strided\((\d.*)\)", code_of(package))
        assert allocations and all("dtype_float32" in x for x in allocations)
    code = code_of(step)
    assert ", 6L, 16L}" in code, "shapes are written in another way: the next line proves nothing"
    assert "{12L, 4L, 4L, 16L}" not in code, "a buffer of the cache's size is made"


def test_no_call_goes_through_the_dispatcher(step: Path, features: Path) -> None:
    for package in (step, features):
        code = code_of(package)
        assert "aoti_torch_cpu__xla_gpu_call(" in code
        assert "aoti_torch_proxy_executor_call_function(" not in code


def test_faulty_tables_are_named(step: Path, tmp_path: Path) -> None:
    arguments = [*tokens_of(STEPS[0])]
    arguments[4] = arguments[4].clone()
    arguments[4][1, 0] = 99
    torch.save(arguments, tmp_path / "call.pt")
    script = """
        import ctypes
        package, call, library = sys.argv[1:]
        last_error = ctypes.CDLL(library).xla_gpu_last_error
        last_error.restype = ctypes.c_char_p
        program = torch._inductor.aoti_load_package(package)
        assert last_error() == b""
        try:
            program(*torch.load(call))
        except RuntimeError:
            print(last_error().decode())
    """
    message = (
        "paged_attention: block_tables[1, 0] must be from 0 to num_blocks - 1=11; got 99."
        " The sequence needs a block there, or a shorter length"
    )
    outcome = run_alone(script, step, tmp_path / "call.pt", LIBRARY)
    assert outcome.stdout == f"{message}\n", outcome.stderr
    assert f"Error: {message}" in outcome.stderr


# Calls the C function of a compiled update: what it throws ends the process.
UPDATE = """
    import ctypes
    library, keys, values, written = sys.argv[1:]
    memory = torch.zeros(8, 4, 1, 8)  # blocks of K or V
    keys, values, written = eval(keys), eval(values), eval(written)
    handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    slots = torch.tensor([5, 2] if keys.numel() else [-1, -1])
    layout = dict(num_blocks=len(keys), block_size=4, num_kv_heads=1, block_stride=32)
    layout |= dict(position_stride=8, head_stride=8, value_offset=0, value_cache=4)
    def array(kind, values):
        return (kind * len(values))(*values), ctypes.c_int64(len(values))
    def tensors(*tensors):
        return array(ctypes.c_void_p, [address(handle(x), None) for x in tensors])
    ctypes.CDLL(library).aoti_torch_cpu__xla_gpu_call(
        *tensors(written, values), *tensors(keys, *torch.ones(2, 2, 1, 8), slots, values),
        *array(ctypes.c_int64, [0, 4]), *array(ctypes.c_int64, []), b"xla_gpu_kv_cache_update",
        *array(ctypes.c_char_p, [x.encode() for x in layout]),
        *array(ctypes.c_int64, [*layout.values()]), *array(ctypes.c_char_p, []),
        *array(ctypes.c_double, []), None)
    print(memory.flatten(1).any(1).int().tolist())
"""
COPIED = "the compiled program copied the cache; it must be updated in place"
SHARED = "xla_gpu_kv_cache_update: operand 0 must not share memory with operand 4: it is written in"


@pytest.mark.parametrize(
    ("keys", "values", "written", "expected"),
    [
        ("memory[1:3]", "memory[5:7]", "memory[:4]", [0, 1, 1, 0, 0, 1, 1, 0]),
        ("memory[1:3]", "memory[3:5]", "memory[:4]", [0, 1, 1, 1, 1, 0, 0, 0]),
        ("memory[4:6]", "memory[6:]", "memory[:4]", COPIED),  # directly behind it
        ("memory[:2]", "memory[6:]", "memory[2:4]", COPIED),
        ("memory[4:4]", "memory[4:4]", "memory[:4]", [0] * 8),
        ("memory[4:4]", "memory[4:4]", "memory[4:4]", [0] * 8),
        ("memory[1:3]", "memory[2:4]", "memory", SHARED),
    ],
)
def test_what_an_update_writes_to(keys: str, values: str, written: str, expected: Any) -> None:
    outcome = run_alone(UPDATE, LIBRARY, keys, values, written)
    if isinstance(expected, str):
        assert f"what():  {expected}" in outcome.stderr
    else:
        assert outcome.stdout == f"{expected}\n", outcome.stderr


def test_library_loads_from_any_path(step: Path, tmp_path: Path) -> None:
    """A machine needs nothing but the package and a copy of the library."""
    copy = shutil.copy(LIBRARY, tmp_path)
    script = """
        package, call, library = sys.argv[1:]
        torch.ops.load_library(library)
        torch._inductor.aoti_load_package(package)(*torch.load(call))
        with open("/proc/self/maps") as maps:
            print({line.split()[-1] for line in maps if "libxla_paged_attention" in line})
    """
    torch.save(tokens_of(STEPS[0]), tmp_path / "call.pt")
    outcome = run_alone(script, step, tmp_path / "call.pt", copy)
    assert outcome.stdout == f"{ {str(copy)} }\n", outcome.stderr


def test_uses_as_many_threads_as_torch(step: Path, tmp_path: Path) -> None:
    key, slots, query, *metadata = tokens_of(STEPS[0])
    repeats = 500  # enough rows for several threads
    repeated = (key.repeat(repeats, 1, 1), slots.repeat(repeats), query.repeat(repeats, 1, 1))
    torch.save((*repeated, *metadata), tmp_path / "call.pt")
    script = """
        import os
        package, call = sys.argv[1:]
        program = torch._inductor.aoti_load_package(package)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            before = len(os.listdir("/proc/self/task"))
            program(*torch.load(call))
            print(len(os.listdir("/proc/self/task")) - before)
    """
    outcome = run_alone(script, step, tmp_path / "call.pt")
    assert outcome.stdout.split() == ["0", "2"], outcome.stderr


def test_the_library_needs_neither_python_nor_torch() -> None:
    with LIBRARY.open("rb") as file:
        elf = ELFFile(file)
        wanted = list(elf.get_section_by_name(".dynsym").iter_symbols())
        undefined = [x.name for x in wanted if x["st_shndx"] == "SHN_UNDEF"]
        needed = [x.needed for x in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    assert not [x for x in undefined if x.startswith(("Py", "_Py", "aoti_", "torch", "_ZN2at"))]
    assert not [x for x in needed if "python" in x or "torch" in x or "c10" in x]
    assert {"aoti_torch_cpu__xla_gpu_call", "aoti_torch_cuda__xla_gpu_call"} <= {
        x.name for x in wanted if x["st_shndx"] != "SHN_UNDEF"
    }


MAIN = """
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int, char** argv) {
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> arguments;
  const at::IValue call = torch::jit::pickle_load(bytes);
  for (const at::IValue& value : call.toListRef()) arguments.push_back(value.toTensor());
  const at::Tensor expected = arguments.back();
  arguments.pop_back();
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const at::Tensor result = package.run(arguments).at(0);
  std::cout << result.equal(expected) << (dlsym(RTLD_DEFAULT, "Py_Initialize") == nullptr);
}
"""


def test_a_process_without_python(step: Path, tmp_path: Path) -> None:
    arguments = tokens_of(STEPS[0])
    torch.save([*arguments, Step()(*arguments)], tmp_path / "call.pt")
    (tmp_path / "main.cc").write_text(MAIN)
    folder = Path(torch.__file__).parent
    built = native.run(
        *("g++", "-std=c++20", tmp_path / "main.cc", "-o", tmp_path / "main"),
        *("-isystem", folder / "include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"),
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
    )
    assert built.returncode == 0, built.stdout
    outcome = native.run(tmp_path / "main", step, tmp_path / "call.pt")
    assert outcome.stdout == "11"


def test_a_functional_program_is_refused() -> None:
    program = exported(Step()).run_decompositions()
    with pytest.raises(
        ValueError,
        match="^aoti_compile_and_package: exported_program must be as torch.export.export returned",
    ):
        torch_frontend.aoti_compile_and_package(program)


def test_floats_of_4_bits_are_refused() -> None:
    update = OPS.kv_cache_update
    key, slots = torch.zeros(1, 2, 16), torch.zeros(1, dtype=torch.int32)

    class Update(torch.nn.Module):
        def forward(self, cache: torch.Tensor) -> None:
            update(cache, key, key, slots)

    cache = torch.zeros(4, 2, 4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    program = torch.export.export(Update(), (cache,))
    message = (
        "aoti_compile_and_package: exported_program must have dtypes that Inductor has in C++; got "
        "float4_e2m1fn_x2. Export with cache.view(torch.uint8), and codes='e2m1'"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        torch_frontend.aoti_compile_and_package(program)


class CudaAttention(torch.nn.Module):
    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor]:
        return (OPS.paged_attention(*arguments, 0.25, 6),)


def for_cuda(arguments: tuple[torch.Tensor, ...], shapes: Any) -> torch.fx.GraphModule:
    """The graph that Inductor gets for CUDA tensors; its sizes are symbols."""
    program = torch.export.export(CudaAttention(), arguments, dynamic_shapes=(shapes,))
    nodes = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    with nodes[0].fake_mode:
        on_cuda = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in nodes]
    with aot_inductor.handler_calls(), torch.no_grad():
        graph, _ = aot_export_module(program.module(), on_cuda, trace_joint=False)
    return graph


class OnEmulatedGpu(torch.fx.Interpreter):
    """Runs the graph of for_cuda. The operator without a Python kernel runs on the emulated GPU."""

    def __init__(self, graph: torch.fx.GraphModule, native_module: Any) -> None:
        super().__init__(graph)
        self.gpu = EmulatedGpu(native_module)
        self.scratch_bytes: list[int] = []

    def call_function(self, target: Any, arguments: Any, keywords: Any) -> Any:
        if target is not torch.ops.higher_order.auto_functionalized_v2:
            return super().call_function(target, arguments, keywords)
        assert arguments == (aot_inductor.HANDLER_CALL,)
        ints = dict(zip(keywords["int_names"], keywords["ints"], strict=True))
        floats = dict(zip(keywords["float_names"], keywords["floats"], strict=True))
        assert keywords["target"] == paged_attention.TARGET
        operands = [x.numpy() for x in keywords["operands"]]
        results = [x.numpy() for x in keywords["_all_bases"]]
        self.gpu.run(paged_attention, operands, results, 0, **ints, **floats)
        self.scratch_bytes.append(results[1].size)
        return None, *keywords["_all_bases"]


def test_scratch_on_cuda_follows_the_shapes(emulated: Any) -> None:
    """The handler refuses a scratch of any other size."""
    cache = torch.randn(12, BLOCK_SIZE, 4, 16)
    calls = []
    for lengths, columns in [(STEPS[0], 4), (STEPS[2], 200), ([(300, 300), (1, 2)], 1000)]:
        sizes = torch.tensor([[*[length for _, length in lengths], 0]], dtype=torch.int32)[0]
        starts = np.cumsum([0, *[q_len for q_len, _ in lengths], 0]).astype(np.int32)
        tables = torch.randint(12, (3, columns), dtype=torch.int32)
        query = torch.randn(int(starts[-1]), 6, 16)
        num_seqs = torch.tensor([2], dtype=torch.int32)
        calls.append((query, cache, sizes, tables, torch.from_numpy(starts), num_seqs))
    dynamic = torch.export.Dim.DYNAMIC
    graph = for_cuda(calls[0], ({0: dynamic}, None, None, {1: dynamic}, None, None))
    interpreter = OnEmulatedGpu(graph, emulated)
    for call in calls:
        (result,) = interpreter.run(*call)
        expected = OPS.paged_attention(*call, 0.25, 6)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert len(set(interpreter.scratch_bytes)) == len(calls)
