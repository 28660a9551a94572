"""Barriers and shared memory of the kernels that run most, proven over all schedules by SentryWard, a
static verifier of PTX. Only with --all: a proof takes a minute.

A proof is for one work item with the sizes given here. What the verifier does not know is taken out
of the PTX first (`prepared`), so it is not proven: writes to global memory, and what happens where a
vote finds faulty metadata or infinite values. It takes one way where the data decide. It does not know
`wgmma`, so there is nothing on the prefill kernel for Hopper. The decode items have none of the features
that few calls have, such as a scale for each position; one thread block has them all, so nothing is said
of the merge by the block that comes last.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import mutants, native, selection
from tools.mutants.mutants import Mutant, plant

pytestmark = pytest.mark.skipif(not selection.everything, reason="proofs take minutes: --all")

# The kernel, called with sizes that the compiler knows. Its own code is unchanged: a kernel becomes
# a function.
PROBE = r"""
#include <cuda/ptx>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma push_macro("__global__")
#undef __global__
#undef __launch_bounds__
#define __global__ __device__
#define __launch_bounds__(...)
#include HEADER
#pragma pop_macro("__global__")

namespace xla_gpu::paged_attention {

extern "C" __device__ const int32_t shared_bytes = SHARED_BYTES;

extern "C" __global__ void Probe(void* query, CACHE* cache, const int32_t* context_lens,
                                 const int32_t* block_tables, const int32_t* query_start_loc,
                                 const int32_t* num_seqs, void* output, int32_t* flags,
                                 RowState* states, float* partials) {
  constexpr int kHeads = 4;
  Params p = {};
  p.query = query;
  p.cache = {cache, cache + HEAD_SIZE, 2 * HEAD_SIZE * BLOCK_SIZE, 2 * HEAD_SIZE, 2 * HEAD_SIZE};
  p.context_lens = context_lens;
  p.block_tables = block_tables;
  p.query_start_loc = query_start_loc;
  p.num_seqs = num_seqs;
  p.output = output;
  p.query_stride = kHeads * HEAD_SIZE;
  p.num_tokens = Q_LEN;
  p.num_heads = kHeads;
  p.head_size = p.value_head_size = HEAD_SIZE;
  p.num_blocks = p.max_blocks_per_seq = 64;
  p.block_size = BLOCK_SIZE;
  p.num_kv_heads = p.max_seqs = 1;
  p.group = Divisor(kHeads);
  p.block = Divisor(BLOCK_SIZE);
  p.scale = 0.1f;
  p.is_causal = true;
  p.dtype = DType::kFloat16;
  p.cache_dtype = kIs8Bit<CACHE> ? DType::kFloat8E4M3 : DType::kFloat16;
  KERNEL(p, Scratch{1, 1, 0, flags, flags + 64, flags + 65, 2, states, partials}, NUMBERS);
}

}  // namespace xla_gpu::paged_attention
"""
PARAMETERS = ["query", "cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"]
PARAMETERS += ["output", "flags", "states", "partials"]


@dataclass(frozen=True)
class Work:
    """A work item: query tokens of 4 heads, over a context."""

    kernel: str
    shared_bytes: str
    target: str
    num_threads: int
    head_size: int
    q_len: int
    context_len: int
    block_size: int = 16
    cache: str = "Half"
    numbers: str = "QueryLengths()"
    header: str = '"paged_attention/cuda/portable/tensor_core.cuh"'

    @property
    def probe(self) -> str:
        names = ("header", "kernel", "shared_bytes", "head_size", "q_len", "block_size", "cache")
        defined = [f"#define {x.upper()} {getattr(self, x)}\n" for x in (*names, "numbers")]
        return "".join(defined) + PROBE


def tensor_core(q_len: int, warp_rows: int) -> Work:
    shared = f"portable::TensorCoreLayout<Half, Half, 64>::SharedBytes({warp_rows})"
    kernel = f"portable::TensorCoreAttention<Half, Half, 64, {warp_rows}, false>"
    return Work(kernel, shared, "80", 128, 64, q_len, context_len=200)


def decode(
    memory: str, q_len: int, *, cache: str = "Half", block_size: int = 16, context_len: int = 220
) -> Work:
    strips = "true" if block_size % 16 == 0 else "false"
    return Work(
        f"decode::DecodeAttention<Half, {cache}, 128, decode::{memory}, true, {strips}>",
        f"sizeof(decode::Shared<Half, {cache}, 128, decode::{memory}>)",
        target="90a",
        num_threads=192,
        head_size=128,
        q_len=q_len,
        context_len=context_len,
        block_size=block_size,
        cache=cache,
        numbers=f"decode::Numbers(p, decode::kItemRows, 16 / sizeof({cache}))",
        header='"paged_attention/cuda/decode/kernel.cuh"',
    )


# The sequences have more KV tiles than the kernels have stages in memory.
WORK = {
    "decode": decode("kLargeMultiprocessor", q_len=1),
    "decode, little memory": decode("kAnyMultiprocessor", q_len=2),
    "decode, any block": decode("kLargeMultiprocessor", q_len=1, block_size=5),
    "decode, 8 bits": decode("kLargeMultiprocessor", q_len=1, cache="Float8E4M3", context_len=420),
    "decode, 8 bits, any block": decode(
        "kLargeMultiprocessor", q_len=1, cache="Float8E4M3", context_len=420, block_size=7
    ),
    "portable, few rows": tensor_core(q_len=1, warp_rows=1),
    "portable, many rows": tensor_core(q_len=16, warp_rows=4),
}

# Barriers and waits, with the work that must be refused without them.
MUTANTS = [
    ("portable, few rows", "gpu::WaitCopies<kAhead - 1>(); «__syncthreads();»"),
    ("portable, few rows", "«is_bad_ = __syncthreads_or(is_bad_);»"),
    ("portable, few rows", "StoreSums(); «__syncthreads();»"),
    (
        "decode",
        "«shared_.tiles_barriers.WaitFilled(stage);» XLA_GPU_STAMP(First, kFirstTile",
    ),
    ("decode", "«if (strip == 0) shared_.tiles_barriers.WaitFreed(stage);» C* to"),
    (
        "decode",
        "«gpu::SyncThreads(kConsumersBarrier, kThreads);» float weights[kBlocks][4];",
    ),
    ("decode", "«__syncthreads();» if (warp < kWarps)"),
    (
        "decode, any block",
        "next_stage_ = stage.Next(); «shared_.tiles_barriers.WaitFreed(stage);» C* to",
    ),
    ("decode, 8 bits", "«shared_.work_barriers.WaitFilled(stage);» const Work"),
    ("decode, 8 bits, any block", "«shared_.work_barriers.WaitFreed(stage);» Work& work"),
]
# The last two: a thread reads what another one has written, in no order that is proven, or branches
# on it.
REFUSALS = (
    "not_wellsynced",
    "potential_race",
    "shared_constant_dependency_unproven",
    "shared_control_operand",
)


@pytest.fixture(scope="module")
def verify() -> Any:
    """SentryWard's function."""
    reason = "no sentryward, which is in the dependency group test"
    return pytest.importorskip("sentryward", reason=reason).verify


@pytest.mark.parametrize("name", WORK)
def test_all_schedules_have_the_same_result(name: str, verify: Any, tmp_path: Path) -> None:
    outcome = prove(verify, WORK[name], mutants.CSRC, tmp_path)
    assert outcome["result"] == "race_free", outcome["diagnostics"]
    assert outcome["checks"]["synchronization"] == outcome["checks"]["memory"] == "passed"


@pytest.mark.parametrize(("name", "quote"), MUTANTS)
def test_without_a_barrier_there_is_no_proof(
    name: str, quote: str, verify: Any, tmp_path: Path
) -> None:
    sources = {path: path.read_text() for path in mutants.CSRC.rglob("*.*")}
    for path, text in plant(sources, [Mutant("barrier", quote, "")], mutants.CSRC).items():
        target = tmp_path / path.relative_to(mutants.CSRC)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    outcome = prove(verify, WORK[name], tmp_path, tmp_path)
    found = {outcome["result"], *(x["code"] for x in outcome["diagnostics"])}
    assert found & {*REFUSALS}, outcome["diagnostics"]


def prove(verify: Any, work: Work, sources: Path, folder: Path) -> dict[str, Any]:
    """The verifier's answer for sources, of which mutant 0 is in effect."""
    probe, ptx, config = (folder / f"probe.{suffix}" for suffix in ("cu", "ptx", "json"))
    probe.write_text(work.probe)
    outcome = native.run(
        *(native.nvcc(), "-ptx", "-std=c++17", "-fmad=false", f"-arch=compute_{work.target}"),
        *("-o", ptx, f"-I{sources}", "-Dmutant_in_effect=0", probe),
    )
    assert outcome.returncode == 0, outcome.stdout
    text = prepared(ptx.read_text())
    ptx.write_text(text)
    lengths = {
        "context_lens": [work.context_len],
        "block_tables": [*range(3, 3 + -(-work.context_len // work.block_size))],
        "query_start_loc": [0, work.q_len],
        "num_seqs": [1],
    }
    shared_bytes = re.search(r"shared_bytes = (\d+);", text)
    assert shared_bytes
    names = {name: f"Probe_param_{place}" for place, name in enumerate(PARAMETERS)}
    call = {
        "schema": "spverify.kernel-input/v1",
        "entry": "Probe",
        "launch": {
            "grid_dim": [1, 1, 1],
            "block_dim": [work.num_threads, 1, 1],
            "cluster_dim": [1, 1, 1],
            "dynamic_shared_bytes": int(shared_bytes[1]),
        },
        "arguments": [
            {"parameter": names[name], "offset": 0, "type": "u64", "value": (place + 1) << 32}
            for place, name in enumerate(PARAMETERS)
            if name not in lengths
        ],
        "shape_arrays": [
            {"parameter": names[name], "offset": 0, "element_type": "s32", "shapes": [values]}
            for name, values in lengths.items()
        ],
        "assumptions": {"representative_branches": True},
    }
    config.write_text(json.dumps(call))
    answer: dict[str, Any] = verify(ptx, input=config, timeout_seconds=600)
    return answer


def prepared(ptx: str) -> str:
    """PTX in the words that the verifier knows."""
    # A wait for an mbarrier as a loop of its own. In the PTX, the compiler repeats it.
    ptx = re.sub(
        r"(mbarrier\.(?:try|test)_wait\S+)\s+P_OUT, (.*?);.*\n\s*selp\.b32 (%\w+), 1, 0, P_OUT;",
        r"wait: \1 P_OUT, \2; @P_OUT bra end; bra wait; end: mov.u32 \3, 1;",
        ptx,
    )
    # A barrier with a vote, in which nobody says yes.
    ptx = re.sub(
        r"bar\.red\.or\.pred\s+(\S+), (\d+), \S+;", r"bar.sync \2; setp.ne.s32 \1, 0, 0;", ptx
    )
    ptx = re.sub(r"bfi\.b32\s+(.*), (.*), (.*), (\d+), (\d+);", inserted_bits, ptx)
    # A small quotient, which the decode kernel finds with floats: the verifier knows no floats.
    ptx = re.sub(
        r"cvt\.rn\.f32\.s32\s+(%f\d+), (%r\d+);\s+cvt\.rn\.f32\.s32\s+(%f\d+), (%r\d+);"
        r"\s+//.*\s+rcp\.approx\.ftz\.f32 (%f\d+), \3;\s+//.*\s+mul\.rn\.f32\s+(%f\d+), \5, \1;"
        r"\s+cvt\.rzi\.s32\.f32\s+(%r\d+), \6;",
        r"div.s32 \7, \2, \4;",
        ptx,
    )
    return re.sub(r"(@!?%p\d+\s+)?st\.global\S*\s.*;", "", ptx)


def inserted_bits(bfi: re.Match[str]) -> str:
    """What the instruction bfi does, in others."""
    to, bits, others, place, count = bfi.groups()
    mask = (1 << int(count)) - 1 << int(place) & 0xFFFFFFFF
    return (
        f"{{ .reg .b32 in, out; shl.b32 in, {bits}, {place}; and.b32 in, in, {mask}; "
        f"and.b32 out, {others}, {mask ^ 0xFFFFFFFF}; or.b32 {to}, in, out; }}"
    )
