"""vLLM's attention on these ops: ``vllm serve MODEL --attention-backend XLA_GPU``, or ``CUSTOM``.

vLLM calls `register` in each of its processes, because the package names it as an entry point in
the group ``vllm.general_plugins``. The cache of a layer is vLLM's own tensor, ``[num_blocks,
num_kv_heads, block_size, 2 * head_size]`` with strides of vLLM's choice; for latent attention (MLA)
``[num_blocks, block_size, head_size]``. The ops write and read it where it lies.
"""

from __future__ import annotations

from typing import Any

from torch_frontend.integrations._versions import require

require("vllm", "0.32", "0.33")

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402

from torch_frontend.integrations.vllm.attention import (  # noqa: E402
    XlaGpuAttentionBackend,
    XlaGpuAttentionImpl,
)
from torch_frontend.integrations.vllm.cpu_platform import accept_names_on_cpu  # noqa: E402
from torch_frontend.integrations.vllm.latent import (  # noqa: E402
    XlaGpuLatentBackend,
    XlaGpuLatentBuilder,
    XlaGpuLatentImpl,
)
from torch_frontend.integrations.vllm.metadata import (  # noqa: E402
    XlaGpuMetadata,
    XlaGpuMetadataBuilder,
)
from torch_frontend.integrations.vllm.names import LATENT_NAME, NAMES, description  # noqa: E402

__all__ = [
    "XlaGpuAttentionBackend",
    "XlaGpuAttentionImpl",
    "XlaGpuLatentBackend",
    "XlaGpuLatentBuilder",
    "XlaGpuLatentImpl",
    "XlaGpuMetadata",
    "XlaGpuMetadataBuilder",
    "description",
    "register",
]


def register() -> None:
    """Makes ``XLA_GPU`` and ``CUSTOM`` names of this backend, on CUDA and on the CPU, and
    ``XLA_GPU_MLA`` that of its latent attention, which the CPU knows by all three names."""
    members: Any = AttentionBackendEnum.__members__
    for name in (*NAMES, LATENT_NAME):
        backend = XlaGpuLatentBackend if name == LATENT_NAME else XlaGpuAttentionBackend
        register_backend(members.get(name, name), f"{backend.__module__}.{backend.__qualname__}")
        if name != "CUSTOM":  # vLLM sends the choice to a process that has not called this yet
            members[name].__reduce_ex__ = lambda _, name=name: (_registered, (name,))
    accept_names_on_cpu()


def _registered(name: str) -> Any:
    register()
    return AttentionBackendEnum[name]
