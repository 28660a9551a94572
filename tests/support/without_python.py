"""A program without Python that calls the library, as a server in C++ does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import native

# The call lacks its operands, which is its error unless another one comes before.
PROGRAM = """
#include <cstdio>
#include "eager/runtime.h"
#include "ffi/handlers.h"
#include "paged_attention/cpu/instruction_set.h"
int main(int, char** arguments) {
  const xla_gpu::EagerCall call(xla_gpu_handler(arguments[1], "xla_gpu_paged_attention"), {}, {}, {});
  std::puts(call.Run({1, nullptr}).message.c_str());
  std::puts(xla_gpu::paged_attention::CpuInstructionSet().c_str());
}
"""


def compile_program(library: Path, folder: Path) -> Path:
    """Compiles the program into a folder. Its argument is a platform. It prints the error of a call
    of paged_attention, and the CPU's instruction set."""
    program, source = folder / "program", folder / "main.cc"
    source.write_text(PROGRAM)
    outcome = native.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", source, "-o", program),
        *("-I", native.ROOT / "shared_ffi/csrc", "-isystem", native.ffi_headers()),
        *(library, f"-Wl,-rpath,{library.parent}"),
    )
    assert outcome.returncode == 0, outcome.stdout
    return program


def run(program: Path, platform: str, **environment: str) -> str:
    """Runs it with these environment variables alone. Returns what it prints."""
    return subprocess.run(
        [program, platform], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
