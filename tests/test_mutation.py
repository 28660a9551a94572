"""The suite must fail when a kernel is wrong: each fault is planted, built, and tested."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from shared_ffi import _native
from tests import native

KERNEL, ATTENTION = "paged_attention/cpu_kernel.cc", "paged_attention/cpu.cc"
UPDATE = "kv_cache_update/cpu.cc"

CPU_FAULTS = {
    "none": (ATTENTION, "", ""),
    "ignores-the-block-table": (KERNEL, "Offset(table[logical],", "Offset((table[0] * 0 + logical) % p_.num_blocks,"),
    "drops-the-last-position": (
        ATTENTION,
        "p.WindowEnd(position + num_tokens - 1, context_len), nullptr}",
        "p.WindowEnd(position + num_tokens - 1, context_len - (context_len > p.block_size)), nullptr}",
    ),
    "window-one-too-long": (
        "paged_attention/params.h",
        "position - sliding_window + 1;",
        "position - sliding_window;",
    ),
    "window-one-too-short": (
        "paged_attention/params.h",
        "position - sliding_window + 1;",
        "position - sliding_window + (sliding_window > 1 ? 2 : 1);",
    ),
    "sees-the-next-token": (
        KERNEL,
        "num_rows - 1], context_len_) - stretch.position;",
        "num_rows - 1], context_len_) + 1 - stretch.position;",
    ),
    "sums-otherwise-when-packed": (KERNEL, "int64_t w = LaneOfLeaf(n);", "int64_t w = n;"),
    "mixes-up-query-heads": (
        KERNEL,
        "return (piece_.first_head + row / rows_per_head_) * group_ + row % group_;",
        "return row % group_ * p_.num_kv_heads + piece_.first_head + row / rows_per_head_;",
    ),
    "forgets-to-rescale": (
        KERNEL,
        "Load<Lanes>(sums + r * stride + d + i * kLanes) * shrink[r]",
        "Load<Lanes>(sums + r * stride + d + i * kLanes) * (shrink[r] < 0 ? 0.0f : 1.0f)",
    ),
    "forgets-to-rescale-between-tiles-at-once": (KERNEL, "is_one &= factors[r] == 1.0f;", "is_one &= true;"),
    "forgets-the-soft-cap": (KERNEL, "if (soft_cap > 0) {", "if (soft_cap > 1e30f) {"),
    "leaves-padding-rows": (
        ATTENTION,
        "std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);",
        "(void)end;",
    ),
    "multiplies-unattended-values-by-zero": (
        KERNEL,
        "p_.WindowEnd(piece_.position, context_len_) < end ||",
        "end < 0 ||",
    ),
    "merges-one-split-too-few": (
        KERNEL,
        "split < piece_.NumSplits(); ++split",
        "split < piece_.NumSplits() - 1; ++split",
    ),
    "depends-on-the-number-of-threads": (
        ATTENTION,
        "piece.end = std::min(whole.end, first + step);",
        "piece.end = std::min(whole.end, first + step - 1);",
    ),
    "alibi-of-later-positions-has-the-wrong-sign": (KERNEL, "Max(after, -after)", "-after"),
    "takes-another-head's-sink": (KERNEL, "p_.sinks[HeadOfRow(row)]", "p_.sinks[row % group_]"),
    "log-sum-exp-in-base-2": (KERNEL, "log2_of_sum * kLn2", "log2_of_sum"),
    "rows-without-keys-are-nan": (KERNEL, "attends ? total_weight_[row] : 1.0f", "total_weight_[row]"),
    "leaves-the-log-sum-exp-of-padding": (
        ATTENTION,
        "std::fill(p.lse + end * p.num_heads, p.lse + p.num_tokens * p.num_heads, kNothing);",
        "",
    ),
    "swaps-key-and-value": (UPDATE, "copy(k, key + head", "copy(k, value + head"),
    "quantizes-with-another-slot's-scale": (UPDATE, "p.v_scale.At(block, in_block,", "p.v_scale.At(block, 0,"),
    "forgets-the-scale-of-keys": (KERNEL, "scale *= p_.k_scale.At(0, 0", "scale *= 0 * p_.k_scale.At(0, 0"),
    "takes-the-scale-of-the-first-head": (KERNEL, "p_.v_scale.At(0, 0, kv_head)", "p_.v_scale.At(0, 0, 0)"),
    "spreads-nan-of-unused-scales": (KERNEL, "weights == 0 ? weights : weights *", "weights *"),
    "misreads-the-nan-of-float8": ("simd.h", "magnitude == 0x7f ? nan", "magnitude == 0x80 ? nan"),
    "does-not-hold-float8-at-its-largest": ("storage.h", "rounded < kLargest ? rounded", "rounded < 255 ? rounded"),
    "rounds-float8-up-on-ties": ("storage.h", "- 1 + (magnitude >> kShift & 1)", "- 1 + 1"),
    "knows-the-default-layout-only": (KERNEL, "(p.cache.head_stride *", "(2 * p.head_size *"),
    "writes-padding": (
        UPDATE,
        "const int64_t slot = p.Slot(token);",
        "const int64_t slot = p.Slot(token) < 0 ? 0 : p.Slot(token);",
    ),
}  # fmt: skip

TENSOR, CORE = "paged_attention/tensor_core.cuh", "paged_attention/cuda_core.cuh"
ROWS, FINISH = "paged_attention/rows.cuh", "paged_attention/finish.cuh"
SOFTMAX, HOPPER = "paged_attention/softmax.cuh", "paged_attention/hopper.cuh"

CUDA_FAULTS = {
    "none": (TENSOR, "", ""),
    "ignores-the-block-table": (
        ROWS,
        "p.block_tables[item.sequence * p.max_blocks_per_seq + logical];",
        "p.block_tables[item.sequence * p.max_blocks_per_seq] * 0 + logical % p.num_blocks;",
    ),
    "reads-any-block": (ROWS, "if (block < 0 || block >= p.num_blocks) {", "if (block < -7) {"),
    "no-barrier-before-a-tile-is-read": (
        TENSOR,
        "gpu::SyncBlock();  // the tile is here, and everyone has left the one before",
        "",
    ),
    "does-not-wait-for-copies": (TENSOR, "gpu::WaitCopies<kStages - 2>();\n      gpu::Sync", "gpu::Sync"),
    "no-barrier-before-the-sums": (TENSOR, "is_bad_ = gpu::AnyInBlock(is_bad_);", ""),
    "no-barrier-after-the-sums": (TENSOR, "StoreSums();\n    gpu::SyncBlock();", "StoreSums();"),
    "no-barrier-before-the-sums-take-the-queries-place": (
        CORE,
        "is_bad = gpu::AnyInBlock(is_bad);  // all have read the queries, whose place the sums take",
        "",
    ),
    "forgets-to-rescale": (TENSOR, "Softmax::Shrink(shrinks, sums_);", ""),
    "sees-the-next-token": (ROWS, "p.WindowEnd(position, item.context_len)));", "p.WindowEnd(position, item.context_len) + 1));"),
    "keeps-unattended-nan": (TENSOR, "!std::is_integral_v<C> && common", "tile < 0 && common"),
    "merges-one-split-too-few": (
        FINISH,
        "for (int64_t split = 0; split < num_splits; ++split) {\n        value",
        "for (int64_t split = 0; split < num_splits - 1; ++split) {\n        value",
    ),
    "splits-overlap": (
        "paged_attention/schedule.cuh",
        "Larger(split_begin, p_.WindowBegin(",
        "Larger(split_begin - (split > 0), p_.WindowBegin(",
    ),
    "splits-depend-on-the-batch": (
        "paged_attention/scratch.h",
        "Larger(kMinSplit, tiles * kTileAlignment);",
        "Larger(kMinSplit, tiles * kTileAlignment) + p.max_seqs % 2 * kTileAlignment;",
    ),
    "leaves-padding-rows": (FINISH, "FillRow<T>(p, token, is_lost", "if (is_lost) FillRow<T>(p, token, is_lost"),
    "a-sink-in-each-split": (ROWS, "item.num_splits == 1 ? SinkOf", "item.num_splits > 0 ? SinkOf"),
    "alibi-of-later-positions-has-the-wrong-sign": (ROWS, "fabsf(", "("),
    "alibi-of-another-row": (SOFTMAX, "{p_, item_, row_ + 8}};", "{p_, item_, row_}};"),
    "log-sum-exp-without-the-largest": (ROWS, "(row.max + log2f(row.sum)) * kLn2", "log2f(row.sum) * kLn2"),
    "rows-without-keys-are-nan": (ROWS, "range.begin < range.end ? sum : 1.0f", "sum"),
    "a-split-row-without-keys-is-nan": (FINISH, "(attends ? sum : 1.0f)", "sum"),
    "swaps-key-and-value": ("kv_cache_update/cuda.cu", "keys[place] = key[i];", "keys[place] = value[i];"),
    "knows-the-default-layout-only": (
        "kv_cache_update/cuda.cu",
        "= p.cache.head_stride * size",
        "= 2 * p.head_size * size",
    ),
    "forgets-the-scale-of-values": (CORE, "weights[r] *= place.v_scale;", "weights[r] *= 1;"),
    "takes-another-position's-scale": (ROWS, "p.k_scale.At(block, offset,", "p.k_scale.At(block, 0,"),
    "a-tile-early": (TENSOR, "gpu::WaitCopies<kStages - 2>();", "gpu::WaitCopies<kStages - 1>();"),
    "takes-another-tile's-scale": (TENSOR, "weights[n][e] * slots[j].v_scale", "weights[n][e] * slots[0].v_scale"),
    "spreads-nan-of-unused-scales": (TENSOR, "attends ? weights[n][e] * slots[j]", "true ? weights[n][e] * slots[j]"),
    "mixes-up-columns-of-8-bits": (TENSOR, "of_block * 2 + n % 2", "of_block + n % 2 * 8"),
    "query-does-not-lie-as-keys-do": (TENSOR, "{pair[0], pair[2]}", "{pair[0], pair[1]}"),
    "drops-values-that-are-nan-of-8-bits": (TENSOR, "return gpu::ToFloat(value) * slot.v_scale;", "return 0;"),
    "more-queries-than-promised": ("paged_attention/schedule.cuh", "q_len > p.max_query_len) return false", "q_len < 0) return false"),
    "places-of-two-sequences-overlap": ("paged_attention/scratch.h", "s * PlacesOfSequence(p) + i", "s * PlacesOfSequence(p) / 2 + i"),
    "quantizes-with-the-first-head's-scale": ("kv_cache_update/cuda.cu", "p.v_scale.At(block, in_block, head)", "p.v_scale.At(block, in_block, 0)"),
    "takes-v-for-k": (TENSOR, "KeyOf<C>(p_, from", "ValueOf<C>(p_, from"),
    "hopper-does-not-wait-for-keys": (HOPPER, "shared_.keys_ring.WaitFilled(turn);", ""),
    "hopper-does-not-wait-for-values": (HOPPER, "shared_.values_ring.WaitFilled(turn);", ""),
    "hopper-overwrites-keys": (HOPPER, "shared_.keys_ring.WaitFreed(turn_);", ""),
    "hopper-overwrites-values": (HOPPER, "shared_.values_ring.WaitFreed(turn_);", ""),
    "hopper-overwrites-an-item": (HOPPER, "shared_.items_ring.WaitFreed(turn);", ""),
    "hopper-never-frees-keys": (HOPPER, "shared_.keys_ring.Free(next);", ""),
    "hopper-frees-values-early": (
        HOPPER,
        "gpu::WaitProducts<0>(sums_);\n        gpu::KeepRegisters(weights);\n        shared_.values_ring.Free(*turn);",
        "shared_.values_ring.Free(*turn);\n        gpu::WaitProducts<0>(sums_);",
    ),
    "hopper-does-not-wait-for-logits": (HOPPER, "gpu::WaitProducts<1>(logits);", ""),
    "hopper-does-not-wait-for-sums": (HOPPER, "gpu::WaitProducts<0>(sums_);\n        gpu::Keep", "gpu::Keep"),
    "hopper-changes-weights-in-use": (
        HOPPER,
        "Weigh(tile + 1, logits, shrinks);",
        "Weigh(tile + 1, logits, shrinks);\n        Pack(logits, weights);",
    ),
    "hopper-starts-sums-without-a-fence": (HOPPER, "gpu::FenceProducts(sums_);", ""),
    "hopper-keys-behind-the-async-proxy": (HOPPER, "gpu::FenceAsyncProxy();\n    gpu::FenceProducts", "gpu::FenceProducts"),
    "hopper-values-behind-the-async-proxy": (HOPPER, "gpu::FenceAsyncProxy();\n    if (common_", "if (common_"),
    "hopper-query-before-it-is-there": (HOPPER, "gpu::WaitCopies<0>();\n    gpu::FenceAsyncProxy", "gpu::FenceAsyncProxy"),
    "hopper-query-of-the-next-item": (HOPPER, "gpu::SyncThreads(barrier_, kThreads);  // everyone has left the item before", ""),
    "hopper-another-swizzle": (HOPPER, "chunk % 8 ^ row % 8", "chunk % 8 ^ row % 4"),
    "hopper-another-block-of-columns": (HOPPER, "block_bytes >> 4 << 16", "block_bytes >> 5 << 16"),
    "hopper-another-group-of-rows": (HOPPER, "group_bytes >> 4 << 32", "group_bytes >> 3 << 32"),
    "hopper-sees-zeros-past-the-end": (HOPPER, "!common_.Contains(begin, end)", "!common_.Contains(begin, min(end, item_.end))"),
    "hopper-keeps-unattended-nan": (HOPPER, "if (common_.RowsDiffer(item_,", "if (tile < 0 && common_.RowsDiffer(item_,"),
    "hopper-non-finite-values-in-use": (HOPPER, "gpu::SyncThreads(kBothConsumers, kBoth);\n    for", "for"),
    "hopper-forgets-to-rescale": (HOPPER, "Softmax::Shrink(shrinks, sums_);", ""),
    "hopper-forgets-the-sink": (HOPPER, "gpu::Exp2(sink - shift) + weight", "weight"),
    "hopper-loses-bad-blocks": (HOPPER, "place.token] = is_bad;", "place.token] = false;"),
    "a-kernel-takes-short-and-long": ("paged_attention/schedule.cuh", "(q_len > MaxSplitTokens(p)) ==", "(q_len > 1) =="),
    "writes-past-the-end": ("kv_cache_update/cuda.cu", " || slot >= p.NumSlots()) return;\n  const int64_t size", ") return;\n  const int64_t size"),
}  # fmt: skip

# The one with units of its own, where the machine has it, and the one that every machine has.
INSTRUCTION_SETS = [
    name for name in _native.cpu_instruction_sets() if name in ("avx512_bf16", "baseline")
]

SUITES = {
    "cpu": (CPU_FAULTS, "-DXLA_GPU_CUDA=OFF", "tests/test_kernel.py", "--native"),
    "cuda": (CUDA_FAULTS, "-DXLA_GPU_CUDA=EMULATED", "tests/test_cuda_kernel.py", "--emulated"),
}


@pytest.mark.parametrize("suite", SUITES)
def test_the_faults_fit_the_sources(suite: str) -> None:
    """At once, and not after the builds below."""
    for fault, (name, right, wrong) in SUITES[suite][0].items():
        source = (native.ROOT / "shared_ffi/csrc" / name).read_text()
        assert fault == "none" or (source.count(right) == 1 and right != wrong), fault


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each suite, a copy of the sources beside a configured build of them."""
    folders = {}
    for suite, (_, cuda, *_) in SUITES.items():
        folders[suite] = folder = tmp_path_factory.mktemp(suite)
        for part in ("shared_ffi/csrc", "cmake", "tests/simt"):
            shutil.copytree(native.ROOT / part, folder / "source" / part)
        shutil.copy(native.ROOT / "CMakeLists.txt", folder / "source")
        native.configure(
            folder / "source",
            folder / "build",
            "-DCMAKE_CXX_FLAGS=-fno-strict-aliasing -Wno-unused",
            # Enough for every case, and fewer to build. At 128 the kernel for Hopper has more than one
            # block of columns.
            "-DXLA_GPU_HEAD_SIZES=128;256",
            "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=64",
            f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(INSTRUCTION_SETS)}",
            cuda,
        )
    return folders


@pytest.mark.parametrize(
    ("suite", "fault"),
    [(suite, fault) for suite, (faults, *_) in SUITES.items() for fault in faults],
)
def test_a_fault_fails_the_suite(suite: str, fault: str, builds: dict[str, Path]) -> None:
    faults, _, tests, option = SUITES[suite]
    name, right, wrong = faults[fault]
    source = builds[suite] / "source/shared_ffi/csrc" / name
    sound = source.read_text()
    try:
        source.write_text(sound.replace(right, wrong) if right else sound)
        module = native.build(builds[suite] / "build")
        tested = native.run(
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0"),
            *(native.ROOT / tests, option, module, "--rootdir", native.ROOT),
            *("-c", native.ROOT / "pyproject.toml"),
        )
    finally:
        source.write_text(sound)
    verdict = tested.stdout.strip().splitlines()[-1]
    if fault == "none":
        assert tested.returncode == 0, tested.stdout
    else:
        assert tested.returncode == 1, tested.stdout
        assert "1 failed" in verdict, tested.stdout
