"""The CPU handlers on Arm: Zig compiles them for AArch64, and an emulator runs them."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

import shared_ffi
from harness import reference
from harness.compare import assert_close_on_cpu, assert_same_bits
from tests.cases.all import CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.varlen import CASES as VARLEN_CASES
from tests.cases.varlen import oracle
from tests.support import native, varlen_calls
from tests.support.aarch64 import machine
from tests.support.aarch64.program import compile_objects, compile_program, run_program
from tests.support.calls import checked_call, in_place, numbers, results_of
from tests.support.gpu import Cpu

CSRC = native.ROOT / "shared_ffi/csrc"
OF_PYTHON = {*CSRC.glob("python/*.cc"), CSRC / "torch/eager_kernel.cc", CSRC / "torch/rules.cc"}
# The handlers, and a program that calls them.
CALLER = native.ROOT / "tests/support/aarch64/handlers.cc"
SOURCES = [*sorted({*CSRC.rglob("*.cc")} - OF_PYTHON), CALLER]


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """The compiler's options for SOURCES."""
    (tmp_path / "cpu_instruction_sets.h").write_text(
        "#define XLA_GPU_FOR_CPU_INSTRUCTION_SETS(f) f(baseline)\n"
    )
    headers = [f"-I{tmp_path}", "-isystem", native.ffi_headers()]
    return [*headers, "-DXLA_GPU_INSTRUCTION_SET=baseline"]


def test_kernels_compile_for_aarch64(options: list[object], tmp_path: Path) -> None:
    kernels = [*CSRC.glob("*/cpu.cc"), *CSRC.glob("*/cpu/kernel.cc")]
    compile_objects(tmp_path, kernels, *options, "-O0")


def number(x: int) -> bytes:
    return struct.pack("<q", x)


def text(x: str) -> bytes:
    return number(len(x)) + x.encode()


def array(x: np.ndarray, operand: int = -1) -> bytes:
    """An array as handlers.cc reads it. A result in the place of an operand has no data of its
    own."""
    data = x.tobytes() if operand < 0 else b""
    shape = b"".join(map(number, (x.ndim, *x.shape)))
    return text(x.dtype.name) + shape + number(operand) + number(x.nbytes) + data


def encoded(
    target: str,
    attributes: dict[str, Any],
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    places: Mapping[int, int],
) -> bytes:
    """A call. `places`: the operand of each result that is in its place."""
    parts = [text(target), number(len(attributes))]
    for name, value in attributes.items():
        is_float = isinstance(value, float)
        parts += [text(name), number(is_float), struct.pack("<d" if is_float else "<q", value)]
    parts += [number(len(operands)), number(len(results)), *map(array, operands)]
    parts += [array(x, places.get(i, -1)) for i, x in enumerate(results)]
    return b"".join(parts)


class Answers:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def take(self, num_bytes: int) -> bytes:
        taken, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return bytes(taken)

    def results(self, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        (length,) = struct.unpack("<q", self.take(8))
        error = self.take(length).decode()
        data = [self.take(x.nbytes) for x in like]
        assert not error, error
        return [np.frombuffer(d, x.dtype).reshape(x.shape) for d, x in zip(data, like, strict=True)]


def with_one_nan(x: Any) -> Any:
    """Arrays whose NaN all have the same bits: NaN that arithmetic makes is positive on Arm, and
    negative on x86."""
    if isinstance(x, tuple):
        return tuple(map(with_one_nan, x))
    return x if x.dtype.kind in "iu" else np.where(x != x, np.array(np.nan, x.dtype), x)


class Arm(Cpu):
    """The kernels in a program for Arm."""

    def __init__(self, program: Path) -> None:
        super().__init__()
        self._program = program

    def run(
        self, op: Any, operands: Sequence[Any], results: Sequence[Any], seed: int, **attributes: Any
    ) -> None:
        call = encoded(op.TARGET, attributes, operands, results, {})
        found = Answers(run_program(self._program, number(1) + call)).results(results)
        for result, x in zip(results, found, strict=True):
            result[...] = x


@pytest.mark.nightly  # Zig compiles its C++ library for minutes
def test_handlers_on_aarch64(options: list[object], tmp_path: Path) -> None:
    """Every case passes with Arm's vectors."""
    given, wanted = [], []
    for case in (*CASES, *UPDATE_CASES):
        inputs, attributes = case.inputs(), case.attributes()
        op = "paged_attention" if isinstance(case, Case) else "kv_cache_update"
        call, operands = checked_call(op, inputs, attributes)
        operands = [np.ascontiguousarray(x) for x in operands]
        results = results_of(call, operands)
        given.append(encoded(call.target, numbers(call), operands, results, in_place(call)))
        wanted.append((op, inputs, attributes, results))

    program = compile_program(tmp_path, SOURCES, *options)
    answers = Answers(run_program(program, number(len(given)) + b"".join(given)))
    for op, inputs, attributes, like in wanted:
        results = answers.results(like)
        result = results[0] if len(results) == 1 else tuple(results)
        if op == "paged_attention":
            assert_close_on_cpu(result, inputs, attributes)
        else:
            expected = reference.kv_cache_update(*inputs, **attributes)
            assert_same_bits(with_one_nan(result), with_one_nan(expected))

    arm = Arm(program)
    for case in VARLEN_CASES:
        arguments, dout = case(), case.weights()
        output, lse = varlen_calls.attend(arm, arguments)
        expected_output, expected = oracle(arguments, dout)
        gradients = varlen_calls.differentiate(arm, arguments, dout, (output, lse))
        found, expected = gradients | {"output": output}, expected | {"output": expected_output}
        varlen_calls.assert_close(found, case.dtype, expected, varlen_calls.TOLERANCES)


# The machine is made first: a build of minutes, and half a gigabyte to download.
@pytest.mark.nightly
def test_the_step_of_the_readme_on_an_emulated_machine() -> None:
    """With JAX's own wheels for Arm."""
    readme = (native.ROOT / "README.md").read_text()
    (step,) = re.findall(r"## JAX\n.*?```python\n(.*?)```", readme, re.S)
    error = "print('largest error:', abs(output - dense).max())"
    script = f"import platform; print(platform.machine())\n{step}\n{error}"
    assert printed(script)[:2] == ["aarch64", "as dense attention: True"]


@pytest.mark.nightly
def test_a_part_of_the_cases_in_jax_on_an_emulated_machine() -> None:
    script = "from tests.support.aarch64 import jax_cases; print('cases:', jax_cases.run())"
    (line,) = printed(script)
    assert int(line.removeprefix("cases: ")) >= 20


def printed(script: str) -> list[str]:
    """By Python on the emulated machine."""
    start = time.monotonic()
    outcome = machine.run(script)
    print(outcome.stdout, f"{time.monotonic() - start:.0f} s")
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()


@pytest.mark.nightly  # compiles for minutes
def test_a_library_with_cuda_kernels_for_arm() -> None:
    """It exports what the one here exports, needs none of CUDA's, and has its handlers on the
    emulated machine."""
    folder = machine.build_cuda(
        "cuda-120",
        "handlers",
        "-DXLA_GPU_ARCHITECTURES=120-real",
        "-DXLA_GPU_TENSOR_CORE_TYPES=BFloat16",
        "-DXLA_GPU_HEAD_SIZES=128",
        "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=128",
        "-DXLA_GPU_CUDA_CORE_COLUMNS=18",
    )
    path = folder / "libxla_paged_attention.so"
    assert exported(path) >= exported(Path(shared_ffi.library_path()))
    with ELFFile.load_from_path(path) as library:
        assert library["e_machine"] == "EM_AARCH64"
        dynamic = library.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    assert needed == {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
    script = f"""import ctypes
handler = ctypes.CDLL({str(path)!r}).xla_gpu_handler
handler.restype = ctypes.c_void_p
print([bool(handler(x, b"xla_gpu_paged_attention")) for x in (b"cpu", b"cuda", b"tpu")])"""
    assert printed(script) == ["[True, True, False]"]


@pytest.mark.nightly
def test_wheels_for_arm_have_code_for_the_gpus_beside_such_processors() -> None:
    """For compute capability 9.0, 10.0 and 12.0, and PTX for others. 12.1 runs the code of 12.0, whose
    name has no letter."""
    unit = "shared_ffi/csrc/CMakeFiles/cuda.dir/simple_add/cuda.cu.o"
    folder = machine.build_cuda("cuda-all", unit, "-DXLA_GPU_ARCHITECTURES=all")
    report = (folder / f"{unit}.ptxas").read_text()
    assert {*re.findall(r"for 'sm_(\w+)'", report)} == {"90a", "100", "120"}
    settings = (folder / "build.ninja").read_text()
    assert {*re.findall(r"code=\[(compute_\w+)", settings)} == {"compute_100"}


def exported(path: Path) -> set[str]:
    """The symbols that a library defines for others."""
    with ELFFile.load_from_path(path) as library:
        symbols = [*library.get_section_by_name(".dynsym").iter_symbols()]
    return {
        symbol.name
        for symbol in symbols
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
    }
