"""What libxla_paged_attention.so offers to other code."""

from __future__ import annotations

import re

from shared_ffi import library_path
from tests.support import native


def test_no_more_of_ours_is_exported_than_docs_security_lists() -> None:
    lines = native.run("nm", "-D", "-C", "--defined-only", library_path()).stdout.splitlines()
    symbols = [line.split(" ", 2)[1:] for line in lines]
    ours = [name for kind, name in symbols if kind == "T" and "xla_gpu" in name]
    qualified = {re.split(r"[(\[]", name)[0] for name in ours}
    # A class exports its members, too.
    names = {re.sub(r"::PreparedCall::.*", "::PreparedCall", x).split("::")[-1] for x in qualified}
    of_cuda = {"ChooseCuda", "CudaChoice", "CudaChoices", "CudaPurposes", "KernelLaunches"}
    assert names - of_cuda == {
        "PreparedCall",
        "ChooseCpuInstructionSet",
        "CpuInstructionSet",
        "CpuInstructionSets",
        "FindHandler",
        "Handlers",
        "MetadataFault",
        "aoti_torch_cpu__xla_gpu_call",
        "aoti_torch_cuda__xla_gpu_call",
        "xla_gpu_handler",
        "xla_gpu_last_error",
    }
