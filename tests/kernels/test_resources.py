"""The compiler's report on the CUDA kernels, and the CUDA calls of the host code."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.arrays import CACHE_DTYPES
from shared_ffi import _native
from tests.support import native
from tests.support.native import ROOT
from tools.sass import cycles
from tools.sass.cycles import MachineCode

CSRC = ROOT / "shared_ffi/csrc"
SMALLEST_SHARED_BYTES = 99 * 1024  # the limit of a thread block on sm_86, sm_89 and sm_120
LARGE_SHARED_BYTES = 227 * 1024  # on sm_90
LARGE_MULTIPROCESSOR = 228  # KiB: the second number of a decode kernel's template
GRADIENTS = ("TensorCoreKeyGradients", "TensorCoreQueryGradients")
HOPPER_GRADIENTS = ("HopperKeyGradients", "HopperQueryGradients")
L2_HIT = 300  # cycles of a load
# Bytes that a kernel may store and load, by the cache and the head size. PrefillAttention's
# lie outside the turns of a long query's plain tiles.
SPILLS = {
    ("PrefillAttention", "bfloat16", 64): 8,  # of the producer, between two items
    # Calls with any features: where rows begin, and a tree mask's bits.
    ("PrefillAttention", "bfloat16", 256): 80,
    # Predicates: of a bias, and of the producer between two items.
    ("PrefillAttention", "float8_e4m3fn", 128): 72,
    ("PrefillAttention", "float8_e5m2", 128): 72,
    ("PrefillAttention", "int8", 128): 72,
    # It spills since leaves are added up, and should not.
    ("TensorCorePrefill", "int8", 128): 256,
}
WIDE_SHARED_BYTES = 163 * 1024  # on sm_80, the smallest that the kernel for wide heads runs on


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the build that --native names, or else of the last one with CUDA kernels."""
    if module := request.config.getoption("--native"):
        return Path(module).parent
    tables = sorted(ROOT.glob("build/*/resources.json"), key=lambda path: path.stat().st_mtime)
    if not tables:
        pytest.skip("no build folder with a resource table: pip install --editable leaves one")
    return tables[-1].parent


@pytest.fixture(scope="module")
def kernels(folder: Path) -> list[dict[str, Any]]:
    """The build's table of kernels (cmake/resources.py)."""
    entries: list[dict[str, Any]] = json.loads((folder / "resources.json").read_text())
    return entries


def test_every_kernel_is_in_the_table(folder: Path, kernels: list[dict[str, Any]]) -> None:
    """For every GPU that the build was for. A build for one that is not there has fewer."""
    settings = (folder / "generated/cuda_build.h").read_text()
    (built_for,) = re.findall(r"#define XLA_GPU_ARCHITECTURES (.*)", settings)
    targets = set(re.findall(r"\d+a?", built_for))
    sizes = [sizes_of(settings, "HEAD_SIZES"), sizes_of(settings, "HEAD_SIZES_OF_8_BITS")]
    (types,) = re.findall(r"#define XLA_GPU_TENSOR_CORE_TYPES (.*)", settings)
    storages = {"float16" if name == "Half" else "bfloat16" for name in types.split(", ")}
    if len(targets) > 1:
        assert sizes == [{64, 80, 96, 112, 128, 192, 256, 512, 576}, {64, 128, 256}]
    kernels_of = {
        "TensorCoreAttention": (*sizes, targets),
        "TensorCorePrefill": (*({x for x in of_cache if x <= 128} for of_cache in sizes), targets),
        "DecodeAttention": (sizes[0] & {128, 256}, sizes[1] & {128}, targets),
        "PrefillAttention": (
            sizes[0] & {64, 128, 192, 256},
            sizes[1] & {64, 128},
            targets & {"90a"},
        ),
    }
    expected = set()
    # Code for 8.9, where it is faster than that for 8.0.
    if targets == {"80", "90a", "100", "120"}:
        cache = "float8_e4m3fn"
        for storage, size in itertools.product(storages, sizes[1]):
            expected.add(("TensorCoreAttention", storage, cache, size, "89"))
            if size <= 128:
                expected.add(("TensorCorePrefill", storage, cache, size, "89"))
        expected |= {("DecodeAttention", storage, cache, 128, "89") for storage in storages}
    for kernel, (sizes_16_bit, sizes_8_bit, kernel_targets) in kernels_of.items():
        for storage, target in itertools.product(storages, kernel_targets):
            expected |= {(kernel, storage, storage, size, target) for size in sizes_16_bit}
            caches = [*itertools.product(CACHE_DTYPES, sizes_8_bit)]
            if kernel == "TensorCoreAttention":
                caches += itertools.product(("uint8", "codes"), sizes_8_bit - {64})
            expected |= {(kernel, storage, cache, size, target) for cache, size in caches}
    for of_gradients, of_sizes, of_targets in (
        (GRADIENTS, {64, 128, 256}, targets),
        (HOPPER_GRADIENTS, {64, 128}, targets & {"90a"}),
    ):
        of_heads = sizes[0] & of_sizes
        expected |= {*itertools.product(of_gradients, storages, [""], of_heads, of_targets)}
    assert expected == {
        tuple(entry[column] for column in ("kernel", "storage", "cache", "size", "target"))
        for entry in kernels
        if entry["kernel"] in (*kernels_of, *GRADIENTS, *HOPPER_GRADIENTS)
    }
    others = {(entry["kernel"], entry["target"]) for entry in kernels} - {
        (kernel, target) for kernel, *_, target in expected
    }
    names = (
        *("CudaCoreAttention", "Combine", "ZeroArrivals", "Update", "Add"),
        *(
            "CudaCoreGradients",
            "CopyLengths",
            "CopyTokens",
            "MakeTables",
            "PrepareRows",
            "SumOverTokens",
        ),
    )
    assert others == {*itertools.product(names, targets)}
    # Each decode kernel twice for Hopper.
    decode = [entry for entry in kernels if entry["kernel"] == "DecodeAttention"]
    for large, of in ((False, targets), (True, targets & {"90a"})):
        assert of == {
            entry["target"]
            for entry in decode
            if (entry["variant"] == LARGE_MULTIPROCESSOR) == large and entry["target"] != "89"
        }


def sizes_of(settings: str, name: str) -> set[int]:
    """The head sizes that CMake has written to cuda_build.h."""
    (sizes,) = re.findall(rf"#define XLA_GPU_TENSOR_CORE_{name} (.*)", settings)
    return {int(size) for size in sizes.split(", ")}


def test_no_kernel_spills_registers(kernels: list[dict[str, Any]]) -> None:
    """And no local array lies in memory, but for SPILLS."""

    def allowed(entry: dict[str, Any]) -> int:
        if entry["kernel"] == "CudaCoreAttention":  # the totals of four rows
            return 0 if entry["spill_bytes"] else 96
        return SPILLS.get((entry["kernel"], entry["cache"], entry["size"]), 0)

    spilled = [entry for entry in kernels if entry["spill_bytes"] or entry["stack_bytes"]]
    assert [entry for entry in spilled if entry["spill_bytes"] > allowed(entry)] == []
    assert [entry for entry in spilled if entry["stack_bytes"] > allowed(entry)] == []


def test_ptxas_reports_no_performance_loss(folder: Path) -> None:
    """ptxas prints (C75xx) where it ignores setmaxnreg or serializes products."""
    reports = [path.read_text() for path in folder.rglob("*.ptxas")]
    assert len(reports) > 1
    assert [line for report in reports for line in re.findall(r".*\(C75\d\d\).*", report)] == []


def machine_code(folder: Path, name: str) -> dict[str, MachineCode]:
    """The kernels of an object in a build, by their names and GPUs. The folder may also hold an
    older object, of a source that has moved."""
    objects = sorted(folder.rglob(f"{name}.dir/**/*.o"), key=lambda path: path.stat().st_mtime)
    if not objects:
        pytest.skip("this build has no such kernel")
    try:
        return cycles.machine_code(objects[-1])
    except FileNotFoundError:
        pytest.skip("no cuobjdump, which is in the dependency group test")


@pytest.fixture(scope="module", params=["BFloat16", "Float8E4M3"])
def decode_cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def decode_kernels(folder: Path, decode_cache: str) -> list[MachineCode]:
    """The kernels of Hopper GPUs for calls without rare features: for blocks of any size, and for
    those of whole tiles."""
    kernels = machine_code(folder, f"large_decode_BFloat16_{decode_cache}_128")
    names = sorted(name for name in kernels if "Lb1ELb" in name and name.endswith("90a"))
    return [kernels[name] for name in names]


@pytest.fixture(params=[0, 1], ids=["any", "parts"])
def decode_kernel(request: pytest.FixtureRequest, decode_kernels: list[MachineCode]) -> MachineCode:
    return decode_kernels[request.param]


def test_the_decode_kernel_is_short(decode_cache: str, decode_kernel: MachineCode) -> None:
    """A short call runs most instructions once: their fetch is the bottleneck. It has what adds up
    leaves, groups and parts, too, of which most calls need one. For rows of several sequences it has
    6 KiB, and 8 with a cache of 8 bits."""
    limit = {"BFloat16": 84, "Float8E4M3": 91}[decode_cache]
    assert len(decode_kernel.bits) * 16 <= limit * 1024


def copies_of_tiles(code: MachineCode) -> set[int]:
    """All copies but for the query's: its loop has one, that of a KV tile eight."""
    copies = {*code.find(r"LDGSTS\.E")}
    return {x for x in copies if len(copies & {*(code.shortest_way(x, [x]) or [])}) > 1}


def test_a_tile_of_the_decode_kernel_takes_few_instructions(
    decode_cache: str, decode_kernel: MachineCode
) -> None:
    """A tile has 4 KiB of K, and as many of V, whose warps copy 512 bytes at once. A consumer
    multiplies K of 16 positions, and V of 64 for a quarter of the columns, with 32 products of tensor
    cores. At 3.05 TB/s, 64 positions are due every 4,976 cycles. Neither reads a scale that all
    positions have."""
    code = decode_kernel
    ways = [code.shortest_way(x, [x]) or [] for x in copies_of_tiles(code)]
    apart = {*code.find("ENDCOLLECTIVE")}  # for a warp whose lanes are not together
    ways = [way for way in ways if not apart & {*way}]
    assert {len({*way} & {*code.find(r"LDGSTS\.E")}) for way in ways} == {8}
    # With 8 bits, ptxas moves the copies' policy to uniform registers for each tile.
    assert max(map(len, ways)) <= {"BFloat16": 105, "Float8E4M3": 126}[decode_cache]
    products = code.find("HMMA")
    turn = way_through(code, products[0], [products[-1], products[0]])
    assert len(products) == len({*turn} & {*products}) == 32
    limit, most_cycles = {"BFloat16": (380, 1400), "Float8E4M3": (450, 1500)}[decode_cache]
    assert len(turn) <= limit
    assert cycles.cycles_of_way(code, turn, L2_HIT) <= most_cycles
    loads = code.find(r"\bLDG\.|\bLDL|\bSTL")
    assert [load for load in loads if any(load in way for way in [turn, *ways])] == []


def way_through(code: MachineCode, begin: int, places: list[int]) -> list[int]:
    """The shortest way from an instruction through others, in this order, without the first."""
    way = [begin]
    for place in places:
        part = code.shortest_way(way[-1], [place])
        assert part is not None, code.instructions[place]
        way += part
    return way[1:]


def way_along(code: MachineCode, *marks: str) -> list[int]:
    """The shortest way from a kernel's begin along instructions that match these, in this order."""
    way = [0]
    for mark in marks:
        part = code.shortest_way(way[-1], code.find(mark))
        assert part is not None, mark
        way += part
    return way


def test_the_first_copy_comes_soon(decode_kernel: MachineCode) -> None:
    """On the shortest way of the warp that schedules: it loads the lengths, meets the others, scans
    the lengths and slots, finds its first split with a quotient, hands it over, asks for its block ids,
    hands over that there is no other split, and copies. The others have made all barriers in shared
    memory then, without a loop over the lanes (whose exit tests whether any is left). In the model,
    with the lengths and ids in the L2 cache. 70 instructions ask whether other sequences read the
    split's positions, too, and whose rows it has."""
    code = decode_kernel
    meeting = code.find("BAR.SYNC")[0]
    barriers = code.find("SYNCS.EXCH")
    assert len(barriers) > 16
    assert [i for i in code.find("BRA.U.ANY") if i < meeting] == []
    making = way_along(code, "SYNCS.EXCH", "BAR.SYNC")
    assert {*barriers} < {*making}
    marks = ["LDG.E.STRONG", "BAR.SYNC", *["SHFL.UP"] * 10, "MUFU.RCP"]
    marks += ["SYNCS.ARRIVE", r"LDG\.E R", "SYNCS.ARRIVE", r"LDGSTS\.E"]
    way = way_along(code, *marks)
    assert len(way) <= 525
    met = cycles.cycles_of_way(code, making, L2_HIT)
    assert cycles.cycles_of_way(code, way, L2_HIT, {meeting: met}) <= 2450


def test_a_merge_of_a_group_is_short(decode_kernel: MachineCode) -> None:
    """From where the last thread block to arrive asks for the 18 leaves of a row's first group until
    the row is written. 12 of them are on their way before the first is added. In the model, with all
    of it in the L2 cache."""
    code = decode_kernel
    arrival = code.find("CCTL.IVALL")[0]
    sums = [i for i in code.find(r"LDG\.E\.128") if i > arrival]
    factors = [i for i in code.find(r"LDS\.128") if i > sums[0]][:18]
    assert len(sums) == len(factors) == 18
    assert len([i for i in sums if i < factors[0]]) == 12
    way = way_through(code, arrival, sorted([*sums, *factors]))
    written = code.shortest_way(way[-1], [i for i in code.find("STG") if i > factors[-1]])
    assert written is not None
    assert cycles.cycles_of_way(code, way + written, L2_HIT) <= 2400


@pytest.mark.parametrize("kernel", ["prefill", "tensor_core"])
def test_totals_come_many_at_a_time(folder: Path, kernel: str) -> None:
    """A thread adds what its leaves sum up to, which is in the L2 cache, to those of the next. It
    waits once for several loads: one by one, 17 would take longer than a KV tile's products."""
    kernels = machine_code(folder, f"{kernel}_BFloat16_BFloat16_128")
    for code in [code for name, code in kernels.items() if name.endswith("90a")]:
        loads = code.find(r"LDG\.E\.128\.STRONG")
        runs = [[*run] for _, run in itertools.groupby(loads, partial(_base, code))]
        long_runs = [run for run in runs if len(run) >= 16]
        assert len(long_runs) >= 2
        assert [run for run in long_runs if _waits_between(code, run) * 3 > len(run)] == []


def _base(code: MachineCode, load: int) -> str:
    (register,) = re.findall(r"\[(R\d+)\.64", code.instructions[load])
    return str(register)


def _waits_between(code: MachineCode, loads: list[int]) -> int:
    """How often a load is waited for before the next one begins."""
    count, boards = 0, set[int]()
    for load, following in itertools.pairwise(loads):
        boards.add(code.scoreboard(load))
        if any(code.waits(i, x) for i in range(load + 1, following + 1) for x in boards):
            count += 1
            boards.clear()
    return count


@pytest.mark.parametrize(("kernel", "ids"), [(0, 2), (1, 1)], ids=["any", "parts"])
def test_block_ids_come_while_tiles_are_copied(
    kernel: int, ids: int, decode_cache: str, decode_kernels: list[MachineCode]
) -> None:
    """No instruction of the loop that copies tiles waits for the block ids that were asked for
    before it. ptxas may move them to other registers at once, and wait for that. The warp of K and
    that of V each have a loop. That of K also has loads for the first tiles of all, which are waited
    for. A lane loads two ids at once, or one where each part of a tile lies in one block."""
    code = decode_kernels[kernel]
    copies = copies_of_tiles(code)
    loads = [
        load
        for load in code.find(r"\bLDG\.E R")
        if any(code.shortest_way(copy, [load]) for copy in copies)
    ]
    ahead = set()
    for load in loads:
        waiting = {i for i in range(len(code.bits)) if code.waits(i, code.scoreboard(load))}
        for copy in copies:
            if code.shortest_way(load, [copy], waiting):
                ahead.add(load)
                assert code.shortest_way(copy, [copy], waiting)
    scales = 2 if decode_cache == "Float8E4M3" else 0  # once for a work item
    assert (len(ahead), len(loads)) == (2 * ids, 4 * ids + scales)


def test_block_ids_come_while_tiles_are_multiplied(folder: Path) -> None:
    """The portable kernel asks for them two tiles ahead. It has one loop: the decode kernel computes
    items of few rows."""
    kernels = machine_code(folder, "tensor_core_BFloat16_BFloat16_128")
    of_64_rows = {name: code for name, code in kernels.items() if "TensorCoreAttention" in name}
    assert {re.findall(r"Li(\d+)E", name)[1] for name in of_64_rows} == {"4"}
    assert min(map(_loads_ahead, of_64_rows.values())) >= 1


def _loads_ahead(code: MachineCode) -> int:
    """How many loads are waited for behind the next product alone."""
    products = {*code.find("HMMA")}
    ahead = 0
    for load in code.find(r"\bLDG\.E"):
        waiting = {i for i in range(len(code.bits)) if code.waits(i, code.scoreboard(load))}
        if not (way := code.shortest_way(load, products, waiting)):
            continue
        # From there to the next product: behind it, or in the next turn of the loop.
        ahead += bool(code.shortest_way(way[-1], [load]))
    return ahead


@dataclass(frozen=True)
class Turn:
    """Instructions that a warp executes for a KV tile, from a wait to the next turn's."""

    code: MachineCode
    way: list[int]

    def count(self, pattern: str) -> int:
        return len([i for i in self.way if re.search(pattern, self.code.instructions[i])])

    def exponentials(self) -> tuple[int, int]:
        """Before the wait for the product with the values, and after it."""
        waits = self.code.find("DEPBAR.LE gsb0, 0x0")
        wait = next(n for n, i in enumerate(self.way) if i in waits)
        parts = (self.way[:wait], self.way[wait:])
        before, after = (Turn(self.code, part).count("MUFU.EX2") for part in parts)
        return before, after


def prefill_kernel(
    folder: Path, cache: str, head_size: int, is_plain: bool | None = None
) -> MachineCode:
    """The one for calls without rare features, or for all others. Caches of 8 bits have that alone."""
    kernels = machine_code(folder, f"prefill_BFloat16_{cache}_{head_size}")
    if is_plain is None:
        is_plain = cache == "BFloat16"
    (code,) = (code for name, code in kernels.items() if f"Lb{is_plain:d}E" in name)
    return code


def test_the_prefill_kernel_for_most_calls_is_short(folder: Path) -> None:
    """A short call runs most instructions once, and fetches them from memory. A quarter are those of
    turns in which references change, which few calls run."""
    code, of_all = (prefill_kernel(folder, "BFloat16", 128, plain) for plain in (True, False))
    assert len(code.bits) * 16 <= 215 * 1024 < len(of_all.bits) * 16


def test_infinite_values_are_looked_for_in_16_positions_at_a_time(folder: Path) -> None:
    """Only where rows differ in what they attend to: most often in 16 or 32 of a tile's positions."""
    code = prefill_kernel(folder, "BFloat16", 128)
    looks = [x for x in code.find("HFMA2") if code.shortest_loop([x])]
    loops = {tuple(code.shortest_way(x, [x]) or []) for x in looks}
    reads = {Turn(code, [*loop]).count(r"LDS\.128") for loop in loops}
    assert reads == {2}


def turns(code: MachineCode) -> list[Turn]:
    return [Turn(code, way) for way in cycles.turns_of(code)]


@pytest.mark.parametrize(
    ("tile", "instructions", "products"), [(64, 3.24, 3.2), (32, 3.7, 2.6)], ids=["64", "32"]
)
def test_a_plain_turn_of_long_queries_is_short(
    folder: Path, tile: int, instructions: float, products: float
) -> None:
    """A turn of the portable kernel: at most 830 instructions for 64 positions. It is counted without
    what begins a leaf, or follows from a reference that changes, and without the offsets of the next
    positions, which are due in each other turn. Two groups of 16 rows share each
    reading of K and V. With tiles of 32, K, V and the query take 16 readings each for 128 products:
    three products a reading would take 24 registers that hold a part of the query, and the code for
    8.6 has 21 left. ptxas puts a NOP behind most products for 12.0."""
    kernels = machine_code(folder, "tensor_core_BFloat16_BFloat16_128")
    found = 0
    for name, code in kernels.items():
        if "TensorCorePrefill" not in name or f"Li128ELi{tile}E" not in name:
            continue
        ways = [code.shortest_way(wait, [wait]) for wait in code.find(r"DEPBAR\.LE SB0")]
        plain = [Turn(code, way) for way in ways if way is not None]
        plain = [turn for turn in plain if turn.count("HMMA") == 4 * tile]
        if len(code.bits) < 1000:  # it is not for this GPU
            continue
        found += 1
        assert len(plain) == 2  # as seen from the wait for K, and from that for V
        for turn in plain:
            length = len(turn.way) - turn.count("NOP")
            assert length <= 4 * tile * instructions
            assert 4 * tile >= products * turn.count("LDSM")
        begin, end = min(plain[0].way), max(plain[0].way) + 1
        whole = Turn(code, [*range(begin, end)])  # with what is not due in each turn
        assert end - begin <= len(plain[0].way) + 950
        assert whole.count(r"\b(LDG|LDL|STL)\b|I2F|MUFU.RCP") == 0
        assert whole.count("LDGSTS") == tile // 4 + 1
    assert found > 0


def test_portable_kernels_divide_no_column_of_a_row(folder: Path) -> None:
    """They divide the weights of a row's parts. The emulated GPU counts one instruction for a division,
    which takes eight and a branch."""
    for code in machine_code(folder, "tensor_core_BFloat16_BFloat16_128").values():
        assert len(code.find("FCHK")) <= 4


@pytest.mark.parametrize(
    ("cache", "is_plain"), [("BFloat16", True), ("BFloat16", False), ("Float8E4M3", False)]
)
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
def test_weights_are_computed_while_values_are_multiplied(
    folder: Path, head_size: int, cache: str, is_plain: bool
) -> None:
    """The prefill kernel waits for the product with the values in the middle of the exponentials of
    a plain turn, and after those of others: that of a plain one that begins a leaf, if there are
    registers, and any other. ptxas may move the wait up, which changes no result."""
    plain, *others = turns(prefill_kernel(folder, cache, head_size, is_plain))
    half = {64: 32, 128: 32, 192: 16, 256: 16}[head_size]
    assert min(plain.exponentials()) >= half
    assert others
    for other in others:
        assert other.exponentials()[0] >= half


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "any"])
@pytest.mark.parametrize("by", [cycles.THREADS, cycles.BOXES], ids=["threads", "boxes"])
def test_a_plain_turn_is_short(folder: Path, by: str, is_plain: bool) -> None:
    """About 300 instructions are arithmetic: 64 each to find the largest logit, to subtract it, for
    the exponentials and for their sum, and 32 to round. 22 compute the descriptors of 16 products, in
    uniform registers. Each third turn takes a few more: the next place is the first. What threads
    have copied takes a fence, before which ptxas puts 4 loads of nothing. V of the tile before is
    there when K is. What tensor copies bring takes a wait for V, and no fence. Eight ask whether
    references change inside the tile (sm90::Consumer::InBlocks)."""
    code = prefill_kernel(folder, "BFloat16", 128, is_plain)
    fences = 1 if by == cycles.THREADS else 0
    plain = Turn(code, cycles.turns_of(code, without="$^" if fences else "MEMBAR")[0])
    assert len(plain.way) <= 410
    assert plain.count("HGMMA") == 16
    assert [plain.count(name) for name in ("MEMBAR", "FENCE")] == [fences, fences]
    assert plain.count("R2UR") <= 17  # where K and V begin is computed anew: no register keeps it
    assert plain.count("PHASECHK") == 2 - fences
    assert plain.count(r"\b(LDG|LDL|STL)\b|LDS R\d") == 0
    assert plain.count(r"\bLDC\b") <= 1
    # ptxas puts the ways of seldom turns in between.
    assert (max(plain.way) - min(plain.way)) * 16 <= 24 * 1024


def test_a_consumer_divides_no_integer_between_items(folder: Path) -> None:
    """Tensor cores wait meanwhile: from the product with the last values of an item, over the rows
    that are written and the ranges of the next rows, to the wait for the next query."""
    code = prefill_kernel(folder, "BFloat16", 128)
    products, waits = code.find("HGMMA"), code.find("DEPBAR.LE gsb0, 0x0")
    last = [i for i in waits if any("tnspB" in code.instructions[n] for n in range(i - 4, i))]
    query = hex(224 * 1024 + 512)  # its barriers lie behind the tiles, and factors of its rows
    ends = {*products, *code.find(rf"SYNCS\.PHASECHK.*\+{query}\]")}
    assert last and len(ends) > len(products)
    rows = code.find(r"STG\.E\.128")
    assert all(any(code.shortest_way(i, [row], ends) for i in last) for row in rows[:8])
    divisions = code.find(r"\bI2F\.U32\.RP")
    assert divisions  # the producer has some, to find work items
    assert not [n for n in divisions if any(code.shortest_way(i, [n], ends) for i in last)]


def test_tensor_cores_wait_briefly_between_items(folder: Path) -> None:
    """From the product with the last values of an item to the first product of the next: a total is
    added, two rows are written, and the ranges of the next two found. In the model of a warp that
    is alone, with the total in the L2 cache."""
    code = prefill_kernel(folder, "BFloat16", 128)
    totals = code.find(r"LDG\.E\.128\.STRONG")
    runs = [[*run] for _, run in itertools.groupby(totals, partial(_base, code))]
    (total,) = (run for run in runs if len(run) == 17)
    begin = max(i for i in code.find("DEPBAR.LE gsb0, 0x0") if i < total[0])
    rows = [i for i in code.find(r"STG\.E\.128 ") if i > total[-1]][:8]
    query = code.find(rf"SYNCS\.PHASECHK.*\+{hex(224 * 1024 + 512)}\]")[0]
    ranges = [i for i in code.find(r"LDS\.128") if i < query]
    assert len(ranges) == 3
    way = way_through(code, begin, [*total, *rows, *ranges, query, code.find("HGMMA")[0]])
    assert cycles.cycles_of_way(code, way, L2_HIT) <= 2800


def test_a_warp_copies_boxes_with_few_instructions(folder: Path) -> None:
    """Each warp copies a quarter of a KV tile: 4 boxes of K and 4 of V. One lane does, and ptxas knows
    it: there is no loop over lanes, whose exit tests whether any is left."""
    code = prefill_kernel(folder, "BFloat16", 128)
    *_, producer = cycles.prefill_warps(code, cycles.turns_of(code)[0], 3, cycles.BOXES)
    boxes = Turn(code, producer.loop)
    assert len(boxes.way) <= 200
    assert boxes.count("UTMALDG.4D") == 8
    assert boxes.count(r"MEMBAR|FENCE|LDGSTS|BRA.U.ANY") == 0


@pytest.mark.parametrize(
    ("cache", "by", "limits"),
    [
        ("BFloat16", cycles.THREADS, (2200, 2400)),
        ("BFloat16", cycles.BOXES, (2150, 2350)),
        ("Float8E4M3", cycles.THREADS, (2420, 2640)),
    ],
    ids=["threads", "boxes", "float8"],
)
def test_a_turn_keeps_the_tensor_cores_busy(
    folder: Path, cache: str, by: str, limits: tuple[int, int]
) -> None:
    """In the model, which says nothing of an actual GPU. The producer and both consumers run. The
    products take 2048 cycles. A cache of 8 bits is widened by the producer, which with the consumers
    keeps the unit for conversions and comparisons busy."""
    code = prefill_kernel(folder, cache, 128)
    turn = cycles.turns_of(code, without="MEMBAR" if by == cycles.BOXES else "$^")[0]
    for ports, limit in zip(cycles.PORTS, limits, strict=True):
        warps = cycles.prefill_warps(code, turn, 3, by)
        assert 2048 <= cycles.cycles(warps, ports) <= limit


@pytest.mark.parametrize(
    ("kernel", "products", "least", "instructions", "limits"),
    [
        ("HopperKeyGradients", 24, 2048, 345, (2250, 2250)),
        ("HopperQueryGradients", 20, 1536, 305, (1650, 1720)),
    ],
)
def test_tensor_cores_are_busy_with_gradients(
    folder: Path,
    kernel: str,
    products: int,
    least: int,
    instructions: int,
    limits: tuple[int, int],
) -> None:
    """While a consumer turns the logits of 64 of its rows and 64 of a tile into weights and gradients,
    the tensor cores have products of the other one: four in 2,048 cycles, or three in 1,536, with
    heads of 128. In the model, with tiles of which all rows attend to all positions."""
    kernels = machine_code(folder, "hopper_gradients_BFloat16_128")
    (code,) = (code for name, code in kernels.items() if kernel in name and "Lb0E" in name)
    found = code.find("HGMMA")
    turn = way_through(code, found[-1], [found[0], found[-1]])
    assert len({*turn} & {*found}) == len(found) == products
    assert len(turn) <= instructions
    assert {*turn} & {*code.find(r"\bLDG|\bLDL|\bSTL")} == set()
    (begin,) = (n for n, i in enumerate(turn) if "BAR.SYNC" in code.instructions[i])
    turn = turn[begin:] + turn[:begin]
    copies = {*code.find(r"LDGSTS\.E")}
    fills = [loop for x in code.find("ARRIVES") if (loop := code.shortest_loop([x]))]
    fill = max(fills, key=lambda loop: len(copies & {*loop}))
    assert len(copies & {*fill}) >= 16
    for ports, limit in zip(cycles.PORTS, limits, strict=True):
        # A place is freed in the turn of the next one.
        warps = [*[cycles.Warp(code, turn) for _ in range(2)], cycles.Warp(code, fill, lag=4 - 1)]
        assert least <= cycles.cycles(warps, ports) <= limit


@pytest.fixture(scope="module")
def block_id_and_copies(folder: Path) -> tuple[MachineCode, int, list[int]]:
    """The prefill producer's load of the next block id, and the copies that do not wait for it."""
    code = prefill_kernel(folder, "BFloat16", 128)
    found = []
    for load in code.find(r"\bLDG\.E R"):
        waiting = {i for i in range(len(code.bits)) if code.waits(i, code.scoreboard(load))}
        copies = [x for x in code.find(r"LDGSTS\.E") if code.shortest_way(load, [x], waiting)]
        if copies:
            found.append((code, load, copies))
    (only,) = found
    return only


def test_a_block_id_comes_while_a_tile_is_copied(
    block_id_and_copies: tuple[MachineCode, int, list[int]],
) -> None:
    """The id of the next tile is asked for when that of this tile has been used. A warp copies 512
    bytes at a time: the query, where it is due, K and V."""
    assert len(block_id_and_copies[2]) == 8 + 16 + 16


def test_a_query_is_copied_with_few_instructions(
    block_id_and_copies: tuple[MachineCode, int, list[int]],
) -> None:
    """Its rows are found without a division. It is copied in two halves."""
    code, load, copies = block_id_and_copies
    first, last = copies[0], copies[7]
    before = code.shortest_way(load, [first])
    half = [code.shortest_way(first, [last]), code.shortest_way(last, [first])]
    assert before is not None and half[0] is not None and half[1] is not None
    assert len(before) + 2 * (len(half[0]) + len(half[1])) <= 300


def test_the_build_shows_the_warnings_of_ptxas() -> None:
    loss = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored"
    usage = "ptxas info    : Used 168 registers"
    script = f'echo "{loss}" >&2; echo "{usage}" >&2'
    outcome = native.run(sys.executable, ROOT / "cmake/resources.py", "sh", "-c", script)
    assert outcome.stdout.splitlines() == [loss]


def test_reports_of_objects_that_are_no_longer_built_do_not_count(tmp_path: Path) -> None:
    """A kernel that was renamed leaves its report in the build folder."""
    report = """ptxas info : Compiling entry function '_ZN7CombineI{type}EvS_' for 'sm_90a'
0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
Used 40 registers"""
    for name in ("now", "before"):
        (tmp_path / f"{name}.cu.o.ptxas").write_text(report.format(type="f"))
    script = "import sys, resources; print(len(resources.kernels(sys.argv[1:])))"
    command = [sys.executable, "-c", script, tmp_path / "now.cu.o"]
    outcome = subprocess.run(
        command, cwd=ROOT / "cmake", capture_output=True, text=True, check=True
    )
    assert outcome.stdout == "1\n"


def test_the_build_is_for_the_gpus_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each generation has its first GPU's code, but for 8.9, which has more instructions."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '8.9\\n8.6\\n9.0\\n12.0\\n7.5\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    native.configure(ROOT, tmp_path / "build", "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline")
    settings = (tmp_path / "build/generated/cuda_build.h").read_text()
    assert '"89-real, 80-real, 90a-real, 120-real"' in settings


def test_launcher_ignores_pythonpath(folder: Path) -> None:
    """pip has a folder on PYTHONPATH while it builds. It is gone when ninja runs again."""
    rules = (folder / "CMakeFiles/rules.ninja").read_text() + (folder / "build.ninja").read_text()
    launchers = re.findall(r"(?:command|LAUNCHER) = (.*)cmake/resources\.py ", rules)
    assert launchers
    assert [command for command in launchers if " -I " not in command] == []


def test_the_compiler_fuses_no_products_by_itself() -> None:
    """Fused products are written as gpu::Fma, so that kernels that share a function agree in
    bits."""
    edges = [
        edge
        for path in ROOT.glob("build/*/build.ninja")
        for edge in path.read_text().split("\n\n")
        if re.search(r"^build \S+\.cu\.o:", edge, re.MULTILINE)
    ]
    if not edges:
        pytest.skip("no build folder with CUDA objects: pip install --editable leaves one")
    assert [edge for edge in edges if not re.search(r" -fmad=false(\s|$)", edge)] == []


def test_a_hopper_block_starts_with_all_registers(kernels: list[dict[str, Any]]) -> None:
    """With fewer, its consumer warps would wait for ever for the registers that sm90/shared.cuh and
    sm90/gradients.cuh give them."""
    names = ("PrefillAttention", *HOPPER_GRADIENTS)
    registers = {e["registers"] for e in kernels if e["kernel"] in names}
    if not registers:
        pytest.skip("this build is for other GPUs")
    assert registers == {65536 // 384 // 8 * 8}


def test_two_blocks_of_the_portable_kernel_share_a_multiprocessor(
    kernels: list[dict[str, Any]],
) -> None:
    """While one block waits, the other one multiplies."""
    found = [
        entry
        for entry in kernels
        if entry["kernel"] == "TensorCoreAttention"
        and entry["size"] in (64, 128)
        and entry["target"] in ("80", "90a", "100")
    ]
    if not found:
        pytest.skip("this build is for other GPUs")
    assert [entry for entry in found if entry["blocks"][entry["target"]] < 2] == []


def prefill_tile(gpu: str) -> int:
    """The positions of a KV tile for which a GPU takes TensorCorePrefill (WithPrefillTile)."""
    return 64 if gpu in ("80", "90a") else 32


def test_two_blocks_of_long_queries_share_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    """On every GPU, also on those with 100 KB of shared memory that run the code for 8.0: one
    multiplies while the other one waits."""
    blocks = {
        (gpu, entry["cache"], entry["storage"], entry["size"]): count
        for entry in kernels
        if entry["kernel"] == "TensorCorePrefill"
        for gpu, count in entry["blocks"].items()
        if entry["variant"] == prefill_tile(gpu)
    }
    assert blocks
    assert {key: count for key, count in blocks.items() if count < 2} == {}


def test_two_blocks_of_the_decode_kernel_share_a_multiprocessor(
    kernels: list[dict[str, Any]],
) -> None:
    """With heads of 128, on GPUs with 164 KiB or more; with an 8-bit cache on Hopper alone. A block
    takes most of 100 KiB."""
    decode = [x for x in kernels if x["kernel"] == "DecodeAttention" and x["size"] == 128]
    if not decode:
        pytest.skip("this build has no such kernel")
    few = []
    for entry in decode:
        has_two = entry["variant"] == LARGE_MULTIPROCESSOR or (
            entry["target"] in ("80", "90a", "100") and entry["cache"] == entry["storage"]
        )
        if entry["blocks"][entry["target"]] < 1 + has_two:
            few.append(entry)
    assert few == []


def test_two_blocks_of_query_gradients_share_a_multiprocessor(
    kernels: list[dict[str, Any]],
) -> None:
    """With heads of up to 128, where there are 164 KiB or more, to the last byte. So large a block
    reads K and V for 128 rows at once."""
    blocks = {
        (entry["target"], entry["storage"], entry["size"]): entry["blocks"][entry["target"]]
        for entry in kernels
        if entry["kernel"] == "TensorCoreQueryGradients"
        and entry["size"] <= 128
        and entry["target"] in ("80", "90a", "100")
    }
    if not blocks:
        pytest.skip("this build is for other GPUs")
    assert {key: count for key, count in blocks.items() if count < 2} == {}


def test_shared_memory_suffices_on_every_gpu(kernels: list[dict[str, Any]]) -> None:
    for entry in kernels:
        is_wide, limit = entry["size"] > 256, SMALLEST_SHARED_BYTES
        is_large = entry["kernel"] in ("PrefillAttention", *HOPPER_GRADIENTS)
        if is_large or entry["variant"] == LARGE_MULTIPROCESSOR:
            limit = LARGE_SHARED_BYTES
        elif is_wide:
            limit = WIDE_SHARED_BYTES
        assert entry["shared_bytes"] <= limit
        blocks = entry["blocks"][entry["target"]]
        assert blocks >= 1 or (is_wide and entry["target"] == "120")


@pytest.mark.parametrize(
    ("op", "launches"),
    {"paged_attention": 2, "kv_cache_update": 1, "simple_add": 1, "varlen_attention": 7}.items(),
)
def test_launches(op: str, launches: int) -> None:
    (path,) = {CSRC / op / "cuda.cu", CSRC / op / "cuda/run.cu"} & set(CSRC.rglob("*.cu"))
    source = path.read_text()
    assert len(re.findall(r"\.Launch(?:Resident)?\(", source)) == launches


@pytest.mark.parametrize(
    "path",
    [path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".cc", ".h")],
    ids=lambda path: str(path.relative_to(CSRC)),
)
def test_the_host_neither_waits_nor_allocates_nor_copies(path: Any) -> None:
    calls = r"cuda\w*Synchronize|cudaMalloc|cudaFree|cudaMemcpy|cudaMemset(?!Async)|cudaEvent|cuMem"
    assert re.findall(calls, path.read_text()) == []


def test_objects_for_different_instruction_sets_share_no_symbols() -> None:
    """The linker may merge functions of the same name, and would then call one that this processor
    cannot run."""
    installed = native.ffi_headers().parent
    objects = list(installed.glob("**/cpu_*.dir/**/cpu/kernel.cc.o"))
    names = {re.findall(r"/cpu_(\w+)\.dir/", str(path))[0] for path in objects}
    assert names >= set(_native.cpu_instruction_sets())
    for path in objects:
        symbols = native.run("nm", path).stdout.splitlines()
        shared = [line for line in symbols if line.split()[-2] in ("W", "V", "u", "T")]
        assert shared == [], path
