"""Counts the instructions of the loops of the decode and the Hopper kernel. Predicts which share of
a GPU's issue slots they take at its full read rate, or at the full rate of its tensor cores:
`python -m benchmarks.gpu.slots decode_*.cu.o hopper_*.cu.o`.

A loop is counted along its shortest way, which leaves out the features that a call does not use.
The disassembler is cuobjdump, of a CUDA toolkit or of the packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import heapq
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# An H200: NVIDIA H200 data sheet, and the boost clock that nvidia-smi shows.
READ_BYTES_PER_SECOND = 4.8e12
MULTIPROCESSORS = 132
CLOCKS_PER_SECOND = 1.755e9
SLOTS_PER_CLOCK = 4  # warp instructions that a multiprocessor issues

FLOP_PER_CLOCK = 4096  # of a multiprocessor's tensor cores in 16 bits

DECODE_TILE = 16  # positions of a KV tile of the decode kernel
HOPPER_ROWS, HOPPER_CONSUMERS = 64, 2  # of a warpgroup's product, and warpgroups of a thread block
PRODUCTS = ("HMMA",)
WARPGROUP_PRODUCTS = ("HGMMA",)
COPIES = ("LDGSTS",)
STORES = ("STS",)  # of an 8-bit cache, which the producer of the Hopper kernel widens
CACHES = {"Float8E4M3": "float8_e4m3fn", "Float8E5M2": "float8_e5m2", "Ea": "int8"}
"""8-bit caches by what the mangled types of their kernels end with."""


@dataclass(frozen=True)
class Instruction:
    """A line of a disassembly."""

    address: int
    text: str

    @property
    def operation(self) -> str:
        """The instruction's name without its predicate and suffixes."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0].split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch leads to."""
        found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None

    @property
    def may_go_on(self) -> bool:
        """Whether the next instruction may follow."""
        leaves = self.operation in ("BRA", "EXIT", "RET", "JMP")
        return not leaves or self.text.startswith("@") or "BRA.DIV" in self.text


class Kernel:
    """The disassembly of a kernel."""

    def __init__(self, name: str, listing: str) -> None:
        self.name = name
        found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+?)\s*;", listing)
        self.instructions = [Instruction(int(address, 16), text) for address, text in found]
        self._index = {x.address: i for i, x in enumerate(self.instructions)}

    def count(self, operations: tuple[str, ...], number: int) -> int:
        """Instructions of a turn of the innermost loop that executes this number of some
        operations. If none does straight through, a turn goes round inner loops."""
        loops = [
            (i - self._index[x.target], self._index[x.target], i)
            for i, x in enumerate(self.instructions)
            if x.target is not None and x.target <= x.address and x.target in self._index
        ]
        for may_go_back in (False, True):
            for _, begin, end in sorted(loops):
                if length := self._shortest(begin, end, operations, number, may_go_back):
                    return length
        raise ValueError(f"{self.name} has no loop with {number} of {operations}")

    def _shortest(
        self, begin: int, end: int, operations: tuple[str, ...], number: int, may_go_back: bool
    ) -> int | None:
        """Instructions of the shortest way through a loop that executes this number of some
        operations."""
        if not any(x.operation in operations for x in self.instructions[begin : end + 1]):
            return None
        queue = [(0, begin, 0)]  # instructions, the next one, operations so far
        seen: set[tuple[int, int]] = set()
        while queue:
            length, i, executed = heapq.heappop(queue)
            executed += self.instructions[i].operation in operations
            if executed > number or (i, executed) in seen:
                continue
            seen.add((i, executed))
            if i != end:
                for following in self._after(i):
                    if begin <= following <= end and (may_go_back or following > i):
                        heapq.heappush(queue, (length + 1, following, executed))
            elif executed == number:
                return length + 1
        return None

    def _after(self, i: int) -> Iterator[int]:
        instruction = self.instructions[i]
        if instruction.may_go_on and i + 1 < len(self.instructions):
            yield i + 1
        if instruction.target in self._index:
            yield self._index[instruction.target]


def kernels_of(path: Path) -> Iterator[Kernel]:
    """The kernels of an object file or library."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        sys.exit(
            "benchmarks.gpu.slots: cuobjdump must be on the PATH; pip install "
            "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm has it"
        )
    listing = subprocess.run([tool, "-sass", path], check=True, capture_output=True, text=True)
    for part in listing.stdout.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        yield Kernel(name.strip(), body)


@dataclass(frozen=True)
class Counts:
    """What a kernel takes for a KV tile."""

    kernel: str  # "Decode" or "Hopper"
    head_size: int
    cache: str | None  # an 8-bit dtype
    tile: int  # positions
    consumer: int  # instructions of a warp
    producer: int
    clocks: float  # of a multiprocessor, at the full rate of its part of the memory, or of products

    @property
    def slots(self) -> int:
        """The instructions of a scheduler. A KV tile is one consumer warp's of the decode kernel.
        In the Hopper kernel, each scheduler has a warp of the producer and of both consumers."""
        return (HOPPER_CONSUMERS if self.kernel == "Hopper" else 1) * self.consumer + self.producer

    @property
    def share(self) -> float:
        """The share of the issue slots that they take at the full rate."""
        schedulers = 1 if self.kernel == "Hopper" else SLOTS_PER_CLOCK
        return self.slots / (self.clocks * schedulers)


def counts_of(kernel: Kernel) -> Counts | None:
    """The counts of a decode or Hopper kernel; None of others."""
    found = re.search(r"(Decode|Hopper)AttentionI(\w*?)Li(\d+)E", kernel.name)
    if found is None:
        return None
    head_size = int(found[3])
    cache = next(
        (name for ending, name in CACHES.items() if re.search(f"{ending}E?$", found[2])), None
    )
    count = _decode_counts if found[1] == "Decode" else _prefill_counts
    return Counts(found[1], head_size, cache, *count(kernel, head_size, 2 if cache is None else 1))


def _prefill_counts(
    kernel: Kernel, head_size: int, bytes_of_element: int
) -> tuple[int, int, int, float]:
    tile = 128 if head_size <= 128 else 64 if head_size <= 192 else 48
    columns = 128 if head_size % 128 == 0 else 64  # of a product with values
    products = head_size // 16 + tile // 16 * head_size // columns
    consumer = kernel.count(WARPGROUP_PRODUCTS, products)
    copies = 2 * tile // 4 * head_size // 8 // 32  # of K and V by a warp, 8 elements for each lane
    producer = kernel.count(COPIES if bytes_of_element == 2 else STORES, copies)
    flop = HOPPER_CONSUMERS * 2 * 2 * HOPPER_ROWS * tile * head_size
    return tile, consumer, producer, flop / FLOP_PER_CLOCK


def _decode_counts(
    kernel: Kernel, head_size: int, bytes_of_element: int
) -> tuple[int, int, int, float]:
    consumer = kernel.count(PRODUCTS, 4 * head_size // 16)
    tile_bytes = DECODE_TILE * 2 * head_size * bytes_of_element
    copies = tile_bytes // 16 // 32  # 16 bytes for each lane
    producer = kernel.count(COPIES, copies)  # of one tile: a turn of the loop copies two, or one
    return (
        DECODE_TILE,
        consumer,
        producer,
        tile_bytes / (READ_BYTES_PER_SECOND / MULTIPROCESSORS / CLOCKS_PER_SECOND),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+", type=Path, metavar="FILE")
    row = "{:>7}{:>10}{:>15}{:>6}{:>10}{:>10}{:>8}{:>7}"
    print(
        row.format(
            "kernel", "head_size", "cache", "tile", "consumer", "producer", "clocks", "share"
        )
    )
    for path in parser.parse_args().objects:
        for x in filter(None, map(counts_of, kernels_of(path))):
            cells = x.kernel, x.head_size, x.cache or "16 bits", x.tile, x.consumer, x.producer
            print(row.format(*cells, f"{x.clocks:.0f}", f"{x.share:.0%}"))


if __name__ == "__main__":
    main()
