"""Compiles programs for AArch64, and runs them on any processor. Zig contains Clang and the C and C++
libraries. A program must be linked statically, start no threads and open no files."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unicorn import UC_ARCH_ARM64, UC_HOOK_INTR, UC_MODE_ARM, Uc
from unicorn import arm64_const as arm64

from tests.support import native

COMPILER = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"]
FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
INCLUDED = [native.ROOT / "shared_ffi/csrc", native.ROOT / "tests/support/aarch64"]

PAGE = 0x1000
HEAP = 0x40_0000_0000
STACK, STACK_BYTES = 0x7F_0000_0000, 1 << 23
NO_SUCH_CALL, NO_MEMORY = -38, -12
ARGUMENTS = [arm64.UC_ARM64_REG_X0 + i for i in range(6)]


def compile_objects(folder: Path, sources: Iterable[Path], *options: object) -> list[Path]:
    """Compiles sources in a folder, without warnings."""

    def compiled(number: int, source: Path) -> Path:
        to = folder / f"{number}-{source.stem}.o"  # several folders have a kernel.cc
        paths = [f"-I{path}" for path in INCLUDED]
        _run(*COMPILER, *FLAGS, *paths, *options, "-c", source, "-o", to)
        return to

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(compiled, itertools.count(), sources))


def compile_program(folder: Path, sources: Iterable[Path], *options: object) -> Path:
    """Compiles sources in a folder and returns the path of the program."""
    objects, program = compile_objects(folder, sources, *options), folder / "program"
    _run(*COMPILER, *objects, "-o", program)
    return program


def _run(*command: object) -> None:
    outcome = native.run(*command)
    assert outcome.returncode == 0, outcome.stdout


def round_up(size: int, to: int = PAGE) -> int:
    return -(-size // to) * to


def run_program(program: Path, given: bytes) -> bytes:
    """Runs a program with a standard input. Returns its standard output; it must exit with 0."""
    return _Process(program.read_bytes(), given).run()


class _Process:
    def __init__(self, elf: bytes, given: bytes) -> None:
        self._uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._given, self._written, self._errors = memoryview(given), bytearray(), bytearray()
        self._heap_end = HEAP
        self._status: int | str = "stopped"
        self._calls: dict[int, Callable[..., int]] = {
            63: self._read,
            64: self._write,
            66: self._writev,
            93: self._exit,
            94: self._exit,
            96: lambda *_: 1,  # set_tid_address: the thread's number
            130: self._kill,
            135: lambda *_: 0,  # rt_sigprocmask
            215: lambda *_: 0,  # munmap: does nothing
            222: self._mmap,
            226: lambda *_: 0,  # mprotect
        }
        self._entry = self._load(elf)
        self._uc.hook_add(UC_HOOK_INTR, self._call)
        units = self._uc.reg_read(arm64.UC_ARM64_REG_CPACR_EL1)
        self._uc.reg_write(
            arm64.UC_ARM64_REG_CPACR_EL1, units | 3 << 20
        )  # permits vector and floating point instructions

    def run(self) -> bytes:
        self._uc.emu_start(self._entry, until=0)
        if self._status != 0:
            raise RuntimeError(f"the program {self._status}: {self._errors.decode()}")
        return bytes(self._written)

    def _load(self, elf: bytes) -> int:
        """Maps the segments and a stack with its first contents. Returns the entry point."""
        kind, machine, _, entry, table = struct.unpack_from("<HHIQQ", elf, 16)
        size, count = struct.unpack_from("<HH", elf, 54)
        assert (kind, machine) == (2, 183), "not a program for AArch64 with addresses of its own"
        for i in range(count):
            segment = struct.unpack_from("<IIQQQQQ", elf, table + i * size)
            type_, _, offset, address, _, file_bytes, memory_bytes = segment
            if type_ != 1:
                continue
            begin = address // PAGE * PAGE
            self._uc.mem_map(begin, round_up(address + memory_bytes - begin))
            self._uc.mem_write(address, elf[offset : offset + file_bytes])
            if offset == 0:
                headers = address + table
        self._uc.mem_map(STACK, STACK_BYTES)
        pointer = STACK + STACK_BYTES - PAGE
        # No arguments and no environment. The auxiliary vector holds the program headers and 16
        # bytes that Linux makes random.
        auxiliary = [3, headers, 4, size, 5, count, 6, PAGE, 25, pointer + 512, 0, 0]
        self._uc.mem_write(pointer, struct.pack("<15Q", 0, 0, 0, *auxiliary))
        self._uc.reg_write(arm64.UC_ARM64_REG_SP, pointer)
        return entry

    def _call(self, uc: Uc, number: int, _: object) -> None:
        if number != 2:
            raise RuntimeError(f"exception {number} at {uc.reg_read(arm64.UC_ARM64_REG_PC):#x}")
        call = self._calls.get(uc.reg_read(arm64.UC_ARM64_REG_X8), lambda *_: NO_SUCH_CALL)
        uc.reg_write(ARGUMENTS[0], call(*map(uc.reg_read, ARGUMENTS)) & (1 << 64) - 1)

    def _read(self, _: int, address: int, size: int, *__: int) -> int:
        data, self._given = self._given[:size], self._given[size:]
        self._uc.mem_write(address, bytes(data))
        return len(data)

    def _write(self, file: int, address: int, size: int, *_: int) -> int:
        (self._written if file == 1 else self._errors).extend(self._uc.mem_read(address, size))
        return size

    def _writev(self, file: int, vectors: int, count: int, *_: int) -> int:
        pairs = struct.iter_unpack("<QQ", bytes(self._uc.mem_read(vectors, 16 * count)))
        return sum(self._write(file, address, size) for address, size in pairs)

    def _mmap(self, _: int, size: int, __: int, flags: int, *___: int) -> int:
        is_fixed, is_anonymous = flags & 0x10, flags & 0x20
        if is_fixed or not is_anonymous:
            return NO_MEMORY
        begin = self._heap_end
        self._heap_end += round_up(size)
        self._uc.mem_map(begin, round_up(size))
        return begin

    def _exit(self, status: int, *_: int) -> int:
        self._status = status and f"exited with {status}"
        self._uc.emu_stop()
        return 0

    def _kill(self, _: int, signal: int, *__: int) -> int:
        self._status = f"sent itself signal {signal}"
        self._uc.emu_stop()
        return 0
