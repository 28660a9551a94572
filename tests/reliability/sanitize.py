"""Builds the CPU handlers with sanitizers and tries calls under them: `python -m tests.reliability.sanitize`.

AddressSanitizer and UndefinedBehaviorSanitizer share a build; ThreadSanitizer has another. A
finding ends the process that makes it, and so fails the command. The frameworks and Python are not
instrumented: what they alone do is not checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import native

MODULE = "tests.reliability.sanitize"
FORMER_FAILURES = Path(__file__).parent / "fuzz/former_failures.json"

# What ThreadSanitizer may report without being right, each with its reason.
SUPPRESSIONS = """
# glibc frees the thread-local storage of a thread that has ended when it reuses its stack for
# another. It orders the two by a futex in code that is not instrumented.
race:_dl_deallocate_tls
"""
SUPPRESSIONS_FILE = native.ROOT / "build/sanitize/suppressions"


@dataclass(frozen=True)
class Sanitizer:
    flags: str  # for -fsanitize
    library: str
    environment: dict[str, str]


SANITIZERS = {
    # Python and the frameworks keep memory until the process ends: soak.py looks for leaks.
    "address": Sanitizer("address,undefined", "asan", {"ASAN_OPTIONS": "detect_leaks=0"}),
    # GCC 12's library takes a thread's block of memory 16 bytes above a page for one with a header of
    # glibc 2.19, and clears as many bytes as the memory before it happens to say: switched off.
    "thread": Sanitizer(
        "thread",
        "tsan",
        {
            "TSAN_OPTIONS": "halt_on_error=1:intercept_tls_get_addr=0:"
            f"suppressions={SUPPRESSIONS_FILE}"
        },
    ),
}


def build(name: str, instruction_sets: list[str], optimize: str = "") -> Path:
    """Builds the handlers with a sanitizer. Returns the path of the module. `optimize`: an option of
    the compiler instead of that in CMakeLists.txt."""
    folder = native.ROOT / "build/sanitize" / "-".join([name, *instruction_sets])
    folder.mkdir(parents=True, exist_ok=True)
    if name == "thread":
        SUPPRESSIONS_FILE.write_text(SUPPRESSIONS)
    options = [f"-DXLA_GPU_SANITIZE={SANITIZERS[name].flags}", "-DXLA_GPU_CUDA=OFF"]
    options.append("-DCMAKE_UNITY_BUILD=ON")  # in half the time
    options.append(f"-DXLA_GPU_OPTIMIZE={optimize}")
    if instruction_sets:
        options.append(f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(instruction_sets)}")
    native.configure(native.ROOT, folder, *options)
    return native.build(folder)


def environment(name: str) -> dict[str, str]:
    """The variables of a process that loads a build with a sanitizer."""
    sanitizer = SANITIZERS[name]
    # The C++ library must come before Python loads a module, for the sanitizer to find it.
    libraries = [f"lib{sanitizer.library}.so", "libstdc++.so.6"]
    found = [native.run("gcc", f"-print-file-name={x}").stdout.strip() for x in libraries]
    return {"LD_PRELOAD": " ".join(found), "JAX_PLATFORMS": "cpu"} | sanitizer.environment


def commands(module: Path, seconds: float, seed: int, tests: bool) -> list[list[str]]:
    """What runs under a sanitizer: the handlers with threads of their own, the eager backend with
    OpenMP's, the trials that once failed, many threads that call at once, and the tests of the
    kernels."""
    fuzz = ["-m", "tests.reliability.fuzz", "--native", str(module), "--seed", str(seed)]
    stress = ["-m", "tests.reliability.stress", "--native", str(module)]
    found = [
        [*fuzz, "--seconds", str(seconds), "--backend"],
        [*fuzz, "--seconds", str(seconds), "--backend", "eager"],
        [*fuzz, "--repeat", str(FORMER_FAILURES), "--backend"],
        [*stress, "--seconds", str(seconds), "--scenario", "eager_threads"],
    ]
    if tests:
        options = ["-q", "-n", "0", "--all", "--native", str(module)]
        found.append(["-m", "pytest", *options, "tests/kernels/test_cpu_kernel.py"])
    return found


def main() -> int:
    """Returns 1 if a sanitizer finds something."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--sanitizer", nargs="*", default=[*SANITIZERS], choices=SANITIZERS)
    parser.add_argument("--seconds", type=float, default=60, help="for each of three parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instruction-set", nargs="*", default=[], help="all if none is named")
    parser.add_argument("--no-tests", action="store_true", help="leave out the kernels' tests")
    options = parser.parse_args()
    failed = 0
    for name in options.sanitizer:
        module = build(name, options.instruction_set)
        for command in commands(module, options.seconds, options.seed, not options.no_tests):
            print(f"\n{name}: {' '.join(command[1:])}", flush=True)
            variables = os.environ | environment(name)
            status = subprocess.run([sys.executable, *command], cwd=native.ROOT, env=variables)
            failed |= status.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
