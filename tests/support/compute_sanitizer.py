"""Calls every kernel a few times under compute-sanitizer, with as many thread blocks as the GPU
holds and with three: `compute-sanitizer --tool racecheck python -m tests.support.compute_sanitizer`."""

from __future__ import annotations

import torch

import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from shared_ffi import _native
from tests.cases.all import CASES, LONG_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.support.calls import overload_of
from tests.support.gpu import MAX_BLOCKS, keywords_to_cuda, to_cuda

IDS = (
    "mixed",
    "context-2000",
    "head-size-128",
    "later-token-nan-chunked",
    "cap-30.0-mixed",
    "all-long",
    "layout-n2hbd-long",
)
LONG_IDS = (
    "long-head-size-128-gqa3-bf16",
    "long-prompts-window-90-f16",
    "long-later-token-nan-257-bf16",
)
UPDATE_IDS = ("some-padding-int64-bf16", "head-size-1")


def attend(case: Case) -> None:
    """Computes a case and ignores the results."""
    tensors = [to_cuda(x) for x in case.inputs()]
    overload, keywords = overload_of("paged_attention", case.attributes())
    keywords = keywords_to_cuda(keywords)
    for limit in (MAX_BLOCKS[0], 3):
        _native.set_cuda_max_blocks(limit)
        overload(*tensors, **keywords)


def main() -> None:
    """Runs the calls."""
    for case in CASES:
        if case.id.rpartition("-")[0] in IDS:
            attend(case)
    for case in LONG_CASES:
        if case.id in LONG_IDS:
            attend(case)
    for update in UPDATE_CASES:
        if update.id in UPDATE_IDS:
            torch.ops.xla_gpu.kv_cache_update(*(to_cuda(x) for x in update.inputs()))
    a = torch.ones(1000, device="cuda")
    torch.ops.xla_gpu.simple_add(a, a)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
