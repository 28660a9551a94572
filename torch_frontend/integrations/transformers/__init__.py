"""Importing this module makes ``attn_implementation="xla_gpu_paged"`` known to transformers.

``generate_batch`` keeps a paged cache. Layers with full attention write and read it where it lies.
A layer with a sliding window keeps the last ``window`` tokens of a sequence in a ring: position p
has slot ``p % window``. A step in which each sequence decodes one token writes its slot and attends
to all slots, whose order does not matter then. A step that also prefills must read tokens before it
overwrites them: transformers copies the window and the new tokens, and attention reads that copy.

``generate`` keeps the keys of a sequence in one row, which serves as a page, or as one page for
each token if rows begin with padding.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from torch_frontend.integrations._versions import require

require("transformers", "5.23", "5.24")

from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: E402
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # noqa: E402

from torch_frontend.integrations.transformers.attention_function import attention  # noqa: E402
from torch_frontend.integrations.transformers.fused_update import fuse_updates  # noqa: E402
from torch_frontend.integrations.transformers.masks import Mask, mask  # noqa: E402
from torch_frontend.integrations.transformers.shared import NAME, remedy  # noqa: E402

__all__ = ["NAME", "Mask", "attention", "mask"]


def _accept_name() -> None:
    """Makes continuous batching accept our name. transformers has a fixed list of names."""
    upstream: Any = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def switch(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        if model.config._attn_implementation != NAME:
            upstream(self, model, *arguments, **keywords)

    manager: Any = ContinuousBatchingManager
    manager.switch_to_cb_friendly_attn = switch


def _prepare_classes() -> None:
    """Makes a model that has a class for each attention refuse our name in words, and the known
    attention of others leave norms and rotation to the update of a paged cache."""
    upstream: Any = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(upstream)
    def check(self: Any, requested_attention: str | None, *arguments: Any, **keywords: Any) -> Any:
        if requested_attention == NAME:
            for name, classes in vars(sys.modules[type(self).__module__]).items():
                if name.endswith("_ATTENTION_CLASSES") and NAME not in classes:
                    raise NotImplementedError(
                        f"{NAME}: the model must call an attention function; "
                        f"{type(self).__name__} has {name} with {sorted(classes)}; "
                        f"{remedy(self.config)}"
                    )
            fuse_updates(self)
        return upstream(self, requested_attention, *arguments, **keywords)

    model: Any = PreTrainedModel
    model.get_correct_attn_implementation = check


def _keep_pages() -> None:
    """Makes a paged cache leave keys and values to ``attention``, and give itself to it. Since
    transformers 5.24 a layer updates its cache itself and gives attention what the cache returns;
    before, attention got the cache and updated it."""
    upstream: Any = PagedAttentionCache.update

    @functools.wraps(upstream)
    def update(  # transformers gives some arguments by these names
        self: Any,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> Any:
        if self.config._attn_implementation != NAME:
            return upstream(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    cache: Any = PagedAttentionCache
    cache.update = update


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
_accept_name()
_prepare_classes()
_keep_pages()
