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
  for (char** target = arguments + 2; *target != nullptr; ++target) {
    const xla_gpu::EagerCall call(xla_gpu_handler(arguments[1], *target), {}, {}, {});
    std::puts(call.Run({1, nullptr}).message.c_str());
  }
  std::puts(xla_gpu::paged_attention::CpuInstructionSet().c_str());
}
"""


def compile_program(library: Path, folder: Path) -> Path:
    """Compiles the program into a folder. Its arguments are a platform and targets of custom calls.
    It prints the error of a call of each, and the CPU's instruction set."""
    program, source = folder / "program", folder / "main.cc"
    source.write_text(PROGRAM)
    outcome = native.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", source, "-o", program),
        *("-I", native.ROOT / "shared_ffi/csrc", "-isystem", native.ffi_headers()),
        *(library, f"-Wl,-rpath,{library.parent}"),
    )
    assert outcome.returncode == 0, outcome.stdout
    return program


def errors(program: Path, platform: str, *ops: str, **environment: str) -> list[str]:
    """Runs it with these environment variables alone. Returns the lines that it prints."""
    command = [str(program), platform, *(f"xla_gpu_{op}" for op in ops)]
    outcome = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return outcome.stdout.splitlines()
