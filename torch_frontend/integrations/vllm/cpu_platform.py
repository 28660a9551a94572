"""vLLM's platform for the CPU, made to obey the choice of a backend."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from torch_frontend.integrations.vllm.names import LATENT_NAME, NAME, NAMES, REMEDY


def accept_names_on_cpu() -> None:
    """Makes vLLM's platform for the CPU obey the choice. It has one backend and takes that, or
    another for latent attention, whose limits it sets."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  (vLLM loads one platform only)

    platform: Any = CpuPlatform
    choose_upstream, configure_upstream = (
        platform.get_attn_backend_cls,
        platform.check_and_update_config,
    )
    if hasattr(choose_upstream, "__wrapped__"):
        return

    @functools.wraps(choose_upstream)
    def choose(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if not _is_ours(selected_backend):
            return choose_upstream.__func__(cls, selected_backend, attn_selector_config, num_heads)
        if attn_selector_config.use_mla:
            selected_backend = AttentionBackendEnum[LATENT_NAME]
        backend, given = selected_backend.get_class(), attn_selector_config._asdict()
        reasons = backend.validate_configuration(device_capability=None, **given)
        if reasons:
            named = [f"{x}={y}" for x, y in given.items() if f"{x} not supported" in reasons]
            got = f"; got {', '.join(named)}" if named else ""
            if "kv_cache_dtype not supported" in reasons:
                got += f"; kv_cache_dtype may be {', '.join(backend.supported_kv_cache_dtypes)}"
            raise ValueError(f"{NAME}: not for this model: {', '.join(reasons)}{got}{REMEDY}")
        return selected_backend.get_path()

    @functools.wraps(configure_upstream)
    def configure(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        attention, model = vllm_config.attention_config, vllm_config.model_config
        backend = (attention.backend_per_kind or {}).get("mla_attention", attention.backend)
        # Blocks of 16, and prompts in one piece, are what vLLM's own latent attention needs.
        block_size = cache.block_size if cache.user_specified_block_size else 128
        chosen = [
            (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
            (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
            (cache, "enable_prefix_caching", cache.enable_prefix_caching),
            (cache, "block_size", block_size),
        ]
        configure_upstream.__func__(cls, vllm_config)
        if model is not None and model.use_mla and _is_ours(backend):
            for config, name, value in chosen:
                setattr(config, name, value)

    platform.get_attn_backend_cls = classmethod(choose)
    platform.check_and_update_config = classmethod(configure)


def _is_ours(backend: Any) -> bool:
    return backend is not None and backend.name in (*NAMES, LATENT_NAME)
