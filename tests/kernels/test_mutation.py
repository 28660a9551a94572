"""The suite must fail when a kernel is wrong: all faults are planted in one build of the sources, where
an environment variable chooses the one that counts, and the tests are run on each."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from shared_ffi import _native
from tests.support import native

KERNEL, ATTENTION = "paged_attention/cpu_kernel.cc", "paged_attention/cpu.cc"
PARAMS = "paged_attention/params.h"
UPDATE_ON_CPU, UPDATE_ON_CUDA = "kv_cache_update/cpu.cc", "kv_cache_update/cuda.cu"

# Of each: the file, the text that is in it once, with marks around the statements or the expression that
# the fault replaces, and what it puts there.
CPU_FAULTS = {
    "ignores-the-block-table": (KERNEL, "Offset(«table[logical]», offset)", "(table[0] * 0 + logical) % p_.num_blocks"),
    "drops-the-last-position": (
        ATTENTION,
        "p.WindowEnd(position + num_tokens - 1, «context_len»), nullptr}",
        "context_len - (context_len > p.block_size)",
    ),
    "window-one-too-long": (PARAMS, "«position - sliding_window + 1»;", "position - sliding_window"),
    "window-one-too-short": (
        PARAMS,
        "«position - sliding_window + 1»;",
        "position - sliding_window + (sliding_window > 1 ? 2 : 1)",
    ),
    "sees-the-next-token": (
        KERNEL,
        "«p_.WindowEnd(positions_[first + num_rows - 1], context_len_)» - stretch.position;",
        "p_.WindowEnd(positions_[first + num_rows - 1], context_len_) + 1",
    ),
    "sums-otherwise-when-packed": (KERNEL, "int64_t w = «LaneOfLeaf(first)»;", "first"),
    "mixes-up-query-heads": (
        KERNEL,
        "return «(piece_.first_head + row / rows_per_head_) * group_ + row % group_»;",
        "row % group_ * p_.num_kv_heads + piece_.first_head + row / rows_per_head_",
    ),
    "forgets-to-rescale": (
        KERNEL,
        "Load<Lanes>(sums + r * stride + d + i * kLanes) * «shrink[r]»",
        "(shrink[r] < 0 ? 0.0f : 1.0f)",
    ),
    "forgets-to-rescale-between-tiles-at-once": (KERNEL, "is_one &= «factors[r] == 1.0f»;", "true"),
    "forgets-the-soft-cap": (KERNEL, "if («soft_cap > 0») {", "soft_cap > 1e30f"),
    "leaves-padding-rows": (
        ATTENTION,
        "«std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);»",
        "",
    ),
    "multiplies-unattended-values-by-zero": (
        KERNEL,
        "«p_.WindowEnd(piece_.position, context_len_) < end» ||",
        "end < 0",
    ),
    "merges-one-split-too-few": (KERNEL, "split < «piece_.NumSplits()»; ++split", "piece_.NumSplits() - 1"),
    "depends-on-the-number-of-threads": (
        ATTENTION,
        "piece.end = std::min(whole.end, «first + step»);",
        "first + step - 1",
    ),
    "alibi-of-later-positions-has-the-wrong-sign": (KERNEL, "«Max(after, -after)»", "-after"),
    "takes-another-head's-sink": (KERNEL, "p_.sinks[«HeadOfRow(row)»]", "row % group_"),
    "log-sum-exp-in-base-2": (KERNEL, "«log2_of_sum * kLn2»", "log2_of_sum"),
    "rows-without-keys-are-nan": (KERNEL, "«attends ? total_weight_[row] : 1.0f»", "total_weight_[row]"),
    "leaves-the-log-sum-exp-of-padding": (
        ATTENTION,
        "«std::fill(p.lse + end * p.num_heads, p.lse + p.num_tokens * p.num_heads, kNothing);»",
        "",
    ),
    "swaps-key-and-value": (UPDATE_ON_CPU, "copy(k, «key» + head", "value"),
    "quantizes-with-another-slot's-scale": (UPDATE_ON_CPU, "p.v_scale.At(block, «in_block»,", "0"),
    "forgets-the-scale-of-keys": (KERNEL, "«scale *= p_.k_scale.At(0, 0, piece_.first_head + head);»", "scale = 0;"),
    "takes-the-scale-of-the-first-head": (KERNEL, "p_.v_scale.At(0, 0, «kv_head»)", "0"),
    "spreads-nan-of-unused-scales": (
        KERNEL,
        "«weights == 0 ? weights : weights * Load<Lanes>(v_scales + i * kLanes)»",
        "weights * Load<Lanes>(v_scales + i * kLanes)",
    ),
    "misreads-the-nan-of-float8": ("simd.h", "«magnitude == 0x7f» ? nan", "magnitude == 0x80"),
    "does-not-hold-float8-at-its-largest": ("storage.h", "«rounded < kLargest» ? rounded", "rounded < 255"),
    "rounds-float8-up-on-ties": ("storage.h", "- 1 + «(magnitude >> kShift & 1)»", "1"),
    "knows-the-default-layout-only": (KERNEL, "(«p.cache.head_stride» *", "2 * p.head_size"),
    "writes-padding": (UPDATE_ON_CPU, "const int64_t slot = «p.Slot(token)»;", "p.Slot(token) < 0 ? 0 : p.Slot(token)"),
}  # fmt: skip

TENSOR, CORE = "paged_attention/tensor_core.cuh", "paged_attention/cuda_core.cuh"
ROWS, FINISH = "paged_attention/rows.cuh", "paged_attention/finish.cuh"
SOFTMAX, HOPPER = "paged_attention/softmax.cuh", "paged_attention/hopper.cuh"
SCHEDULE, SCRATCH = "paged_attention/schedule.cuh", "paged_attention/scratch.h"

CUDA_FAULTS = {
    "ignores-the-block-table": (
        ROWS,
        "= «p.block_tables[item.sequence * p.max_blocks_per_seq + logical]»;",
        "p.block_tables[item.sequence * p.max_blocks_per_seq] * 0 + logical % p.num_blocks",
    ),
    "reads-any-block": (ROWS, "if («block < 0 || block >= p.num_blocks») {", "block < -7"),
    "no-barrier-before-a-tile-is-read": (
        TENSOR,
        "«gpu::SyncBlock();»  // the tile is here, and everyone has left the one before",
        "",
    ),
    "does-not-wait-for-copies": (TENSOR, "«gpu::WaitCopies<kStages - 2>();»\n      gpu::Sync", ""),
    "a-tile-early": (TENSOR, "«gpu::WaitCopies<kStages - 2>();»\n      gpu::Sync", "gpu::WaitCopies<kStages - 1>();"),
    "no-barrier-before-the-sums": (TENSOR, "«is_bad_ = gpu::AnyInBlock(is_bad_);»", ""),
    "no-barrier-after-the-sums": (TENSOR, "StoreSums();\n    «gpu::SyncBlock();»", ""),
    "no-barrier-before-the-sums-take-the-queries-place": (
        CORE,
        "«is_bad = gpu::AnyInBlock(is_bad);»  // all have read the queries, whose place the sums take",
        "",
    ),
    "forgets-to-rescale": (TENSOR, "«Softmax::Shrink(shrinks, sums_);»", ""),
    "sees-the-next-token": (
        ROWS,
        "Smaller(item.end, «p.WindowEnd(position, item.context_len)»)",
        "p.WindowEnd(position, item.context_len) + 1",
    ),
    "keeps-unattended-nan": (TENSOR, "«!std::is_integral_v<C>» && common", "tile < 0"),
    "merges-one-split-too-few": (FINISH, "split < «num_splits»; ++split) {\n        value", "num_splits - 1"),
    "splits-overlap": (SCHEDULE, "Larger(«split_begin», p_.WindowBegin(", "split_begin - (split > 0)"),
    "splits-depend-on-the-batch": (
        SCRATCH,
        "return «Larger(kMinSplit, tiles * kTileAlignment)»;",
        "Larger(kMinSplit, tiles * kTileAlignment) + p.max_seqs % 2 * kTileAlignment",
    ),
    "leaves-padding-rows": (
        FINISH,
        "«FillRow<T>(p, token, is_lost);»",
        "if (is_lost) FillRow<T>(p, token, is_lost);",
    ),
    "a-sink-in-each-split": (ROWS, "«item.num_splits == 1» ? SinkOf", "item.num_splits > 0"),
    "alibi-of-later-positions-has-the-wrong-sign": (
        ROWS,
        "«fabsf(static_cast<float>(position_ - position))»",
        "static_cast<float>(position_ - position)",
    ),
    "alibi-of-another-row": (SOFTMAX, "{p_, item_, «row_ + 8»}};", "row_"),
    "log-sum-exp-without-the-largest": (ROWS, "«(row.max + log2f(row.sum))» * kLn2", "log2f(row.sum)"),
    "rows-without-keys-are-nan": (ROWS, "«range.begin < range.end ? sum : 1.0f»", "sum"),
    "a-split-row-without-keys-is-nan": (FINISH, "«(attends ? sum : 1.0f)»", "sum"),
    "swaps-key-and-value": (UPDATE_ON_CUDA, "keys[place] = «key»[i];", "value"),
    "knows-the-default-layout-only": (UPDATE_ON_CUDA, "= «p.cache.head_stride» * size", "2 * p.head_size"),
    "forgets-the-scale-of-values": (CORE, "«weights[r] *= place.v_scale;»", ""),
    "takes-another-position's-scale": (ROWS, "p.k_scale.At(block, «offset»,", "0"),
    "takes-another-tile's-scale": (TENSOR, "weights[n][e] * slots[«j»].v_scale", "0"),
    "spreads-nan-of-unused-scales": (TENSOR, "«attends» ? weights[n][e] * slots[j]", "true"),
    "mixes-up-columns-of-8-bits": (TENSOR, "«of_block * 2 + n % 2»", "of_block + n % 2 * 8"),
    "query-does-not-lie-as-keys-do": (TENSOR, "{pair[0], pair[«2»]}", "1"),
    "drops-values-that-are-nan-of-8-bits": (TENSOR, "return «gpu::ToFloat(value) * slot.v_scale»;", "0"),
    "more-queries-than-promised": (SCHEDULE, "«q_len > p.max_query_len») return false", "q_len < 0"),
    "places-of-two-sequences-overlap": (SCRATCH, "«s * PlacesOfSequence(p)» + i", "s * PlacesOfSequence(p) / 2"),
    "quantizes-with-the-first-head's-scale": (UPDATE_ON_CUDA, "p.v_scale.At(block, in_block, «head»)", "0"),
    "takes-v-for-k": (TENSOR, "«KeyOf<C>(p_, from, item_.kv_head)»", "ValueOf<C>(p_, from, item_.kv_head)"),
    "hopper-does-not-wait-for-keys": (HOPPER, "«shared_.keys_ring.WaitFilled(turn);»", ""),
    "hopper-does-not-wait-for-values": (HOPPER, "«shared_.values_ring.WaitFilled(turn);»", ""),
    "hopper-overwrites-keys": (HOPPER, "«shared_.keys_ring.WaitFreed(turn_);»", ""),
    "hopper-overwrites-values": (HOPPER, "«shared_.values_ring.WaitFreed(turn_);»", ""),
    "hopper-overwrites-an-item": (HOPPER, "«shared_.items_ring.WaitFreed(turn);»", ""),
    "hopper-never-frees-keys": (HOPPER, "«shared_.keys_ring.Free(next);»", ""),
    "hopper-frees-values-early": (
        HOPPER,
        "«gpu::WaitProducts<0>(sums_);\n        gpu::KeepRegisters(weights);\n        shared_.values_ring.Free(*turn);»",
        "shared_.values_ring.Free(*turn);\n        gpu::WaitProducts<0>(sums_);",
    ),
    "hopper-does-not-wait-for-logits": (HOPPER, "«gpu::WaitProducts<1>(logits);»", ""),
    "hopper-does-not-wait-for-sums": (HOPPER, "«gpu::WaitProducts<0>(sums_);»\n        gpu::Keep", ""),
    "hopper-changes-weights-in-use": (
        HOPPER,
        "«Weigh(tile + 1, logits, shrinks);»",
        "Weigh(tile + 1, logits, shrinks);\n        Pack(logits, weights);",
    ),
    "hopper-starts-sums-without-a-fence": (HOPPER, "«gpu::FenceProducts(sums_);»", ""),
    "hopper-keys-behind-the-async-proxy": (HOPPER, "«gpu::FenceAsyncProxy();»\n    gpu::FenceProducts", ""),
    "hopper-values-behind-the-async-proxy": (HOPPER, "«gpu::FenceAsyncProxy();»\n    if (common_", ""),
    "hopper-query-before-it-is-there": (HOPPER, "«gpu::WaitCopies<0>();»\n    gpu::FenceAsyncProxy", ""),
    "hopper-query-of-the-next-item": (HOPPER, "«gpu::SyncThreads(barrier_, kThreads);»  // everyone has left the item before", ""),
    "hopper-another-swizzle": (HOPPER, "(«chunk % 8 ^ row % 8»)", "chunk % 8 ^ row % 4"),
    "hopper-another-block-of-columns": (HOPPER, "«block_bytes >> 4 << 16»", "block_bytes >> 5 << 16"),
    "hopper-another-group-of-rows": (HOPPER, "«group_bytes >> 4 << 32»", "group_bytes >> 3 << 32"),
    "hopper-sees-zeros-past-the-end": (HOPPER, "!common_.Contains(begin, «end»)", "min(end, item_.end)"),
    "hopper-keeps-unattended-nan": (HOPPER, "if («common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)»", "false"),
    "hopper-non-finite-values-in-use": (HOPPER, "«gpu::SyncThreads(kBothConsumers, kBoth);»\n    for", ""),
    "hopper-forgets-to-rescale": (HOPPER, "«Softmax::Shrink(shrinks, sums_);»", ""),
    "hopper-forgets-the-sink": (HOPPER, "«gpu::Exp2(sink - shift)» + weight", "0"),
    "hopper-loses-bad-blocks": (HOPPER, "place.token] = «is_bad»;", "false"),
    "a-kernel-takes-short-and-long": (SCHEDULE, "(«q_len > MaxSplitTokens(p)») ==", "q_len > 1"),
    "writes-past-the-end": (UPDATE_ON_CUDA, "«slot >= p.NumSlots()») return;\n  const int64_t size", "false"),
}  # fmt: skip

# A fault is chosen when the module is loaded.
CHOICE = "XLA_GPU_PLANTED_FAULT"
HEADER = f"""#pragma once
#include <cstdlib>
#include <string>
inline const int planted_fault = [] {{
  const char* number = std::getenv("{CHOICE}");
  return number == nullptr ? -1 : std::stoi(number);
}}();
"""
# What is put before and behind what a fault replaces.
STATEMENTS = "if (planted_fault == {}) {{ {} }} else {{ ", " }"
EXPRESSION = "(planted_fault == {} ? ({}) : (", "))"


@dataclass
class Suite:
    faults: dict[str, tuple[str, str, str]]
    tests: str
    option: str
    cuda: str
    instruction_sets: Sequence[str] = ("baseline",)


# The one with units of its own, where the machine has it, and the one that every machine has.
SETS = [name for name in _native.cpu_instruction_sets() if name in ("avx512_bf16", "baseline")]

SUITES = {
    "cpu": Suite(
        CPU_FAULTS, "tests/kernels/test_kernel.py", "--native", cuda="OFF", instruction_sets=SETS
    ),
    "cuda": Suite(CUDA_FAULTS, "tests/kernels/test_cuda_kernel.py", "--emulated", cuda="EMULATED"),
}


def planted(source: str, faults: dict[int, tuple[str, str]]) -> str:
    """The source with each fault of a number beside what it replaces."""
    insertions = []
    for number, (marked, wrong) in faults.items():
        before, right, after = re.split("[«»]", marked)
        assert source.count(before + right + after) == 1, f"{marked!r} is not there once"
        begin = source.index(before + right + after) + len(before)
        end = begin + len(right)
        opening, closing = STATEMENTS if right.endswith(";") else EXPRESSION
        # At one place what ends comes before what begins, and of these the longest first.
        insertions.append((begin, 1, -len(right), opening.format(number, wrong)))
        insertions.append((end, 0, len(right), closing))
    for place, *_, text in sorted(insertions, reverse=True):
        source = source[:place] + text + source[place:]
    return source


def plant(suite: Suite, folder: Path) -> None:
    """Makes a folder laid out as this repository whose sources have all faults of a suite. What is
    there already stays as old as it is."""
    sources = {folder / "planted_fault.h": HEADER}
    paths = [native.ROOT / "CMakeLists.txt"]
    for part in ("shared_ffi/csrc", "cmake", "tests/simt"):
        paths += [path for path in (native.ROOT / part).rglob("*.*") if path.suffix != ".pyc"]
    for path in paths:
        sources[folder / path.relative_to(native.ROOT)] = path.read_text()
    in_file: dict[Path, dict[int, tuple[str, str]]] = {}
    for number, (name, marked, wrong) in enumerate(suite.faults.values()):
        in_file.setdefault(folder / "shared_ffi/csrc" / name, {})[number] = (marked, wrong)
    for path, faults in in_file.items():
        sources[path] = planted(sources[path], faults)
    for path, text in sources.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in folder.rglob("*"):
        if path.is_file() and path not in sources:
            path.unlink()


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_faults_fit_the_sources(suite: Suite, tmp_path: Path) -> None:
    """At once, and not after the builds below."""
    plant(suite, tmp_path)


@functools.cache
def build(name: str) -> Path:
    """The module of a suite's sources with its faults."""
    suite, folder = SUITES[name], native.ROOT / "build/planted" / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        plant(suite, folder / "source")
        native.configure(
            folder / "source",
            folder / "build",
            f"-DCMAKE_CXX_FLAGS=-include {folder}/source/planted_fault.h -Wno-dangling-else",
            # Enough for every case, and fewer to build. At 128 the kernel for Hopper has more than one
            # block of columns.
            "-DXLA_GPU_HEAD_SIZES=128;256",
            "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=64",
            f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(suite.instruction_sets)}",
            f"-DXLA_GPU_CUDA={suite.cuda}",
        )
        return native.build(folder / "build")


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, suite in SUITES.items() for fault in suite.faults]
)
def test_a_fault_fails_the_suite(name: str, fault: str, tmp_path: Path) -> None:
    """In a test that passes without it."""
    suite = SUITES[name]
    # Few tests can fail of those of a simple op, which would be met late among all others.
    op = Path(suite.faults[fault][0]).parent.name
    chosen = () if op in ("", "paged_attention") else ("-k", op)

    def run(number: int, *options: str) -> subprocess.CompletedProcess[str]:
        return native.run(
            *(sys.executable, "-m", "pytest", "-q", "-n0", "--shuffle", *chosen, *options),
            *(native.ROOT / suite.tests, suite.option, build(name), "--rootdir", native.ROOT),
            *("-c", native.ROOT / "pyproject.toml", "-o", f"cache_dir={tmp_path}"),
            environment={CHOICE: str(number)},
        )

    with_fault = run([*suite.faults].index(fault), "--exitfirst")
    assert with_fault.returncode == 1, with_fault.stdout
    assert "1 failed" in with_fault.stdout.strip().splitlines()[-1], with_fault.stdout
    without = run(-1, "--last-failed", "--last-failed-no-failures=none")
    assert without.returncode == 0, without.stdout
