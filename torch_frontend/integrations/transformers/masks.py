"""The mask of a batch: what transformers says by functions, recognized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_overlay,
)

from torch_frontend.integrations.transformers.shared import NAME, remedy


class Mask(torch.Tensor):
    """What `mask` returns: a tensor with the shape of a mask, ``[batch_size, 1, q_length,
    kv_length]``, and without numbers. `attention` reads its attributes. A model may move it to
    another device and take its last queries; whatever else it computes with it is an error."""

    model: str
    """The model's type, for errors."""
    remedy: str
    """What to write instead of our attention, for errors."""
    facts: Facts | None
    """None: the mask says what `attention` cannot do."""
    bounds: torch.Tensor
    """``[batch_size, 2]`` int32: the first key of each row that is not padding, and the number of
    keys in a row."""
    ranges: torch.Tensor | None
    """``[batch_size, q_length, 2]`` int32 if images attend to themselves: the keys of the image of
    each query, from the first number up to but not including the second."""
    tables: dict[Any, Any]
    """What `attention` derived for one layer and uses in the others."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, shape: tuple[int, ...], **attributes: Any) -> Mask:
        """A mask with a shape and the attributes above, ``tables`` excepted."""
        device = attributes["bounds"].device
        created = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        vars(created).update(attributes, tables={})
        return created

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Mask({[*self.shape]}, {self.facts})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        this = next(x for x in leaves if isinstance(x, cls))
        dtype = (kwargs or {}).get("dtype", torch.bool)
        if function is torch.ops.aten._to_copy.default and dtype is torch.bool:
            moved = {
                name: x.to(kwargs["device"]) if isinstance(x, torch.Tensor) else x
                for name, x in vars(this).items()
            }
            return cls.of(this.shape, **moved)
        if function in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
            queries = torch.arange(this.shape[2]).view(1, 1, -1, 1).expand(this.shape)
            left = function(queries, *args[1:])
            first = this.shape[2] - left.shape[2]
            others = [*left.shape[:2], *left.shape[3:]]
            is_end = left.numel() and left[0, 0, :, 0].tolist() == [*range(first, this.shape[2])]
            if is_end and others == [*this.shape[:2], *this.shape[3:]]:
                ranges = None if this.ranges is None else this.ranges[:, first:]
                return cls.of(left.shape, **vars(this) | {"ranges": ranges})
        raise NotImplementedError(
            f"{NAME}: the attention mask must be read by the attention function only; got "
            f"{function} in the code of the model {this.model!r}; {this.remedy}"
        )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Mask:
    """A mask function of transformers.

    Raises:
        NotImplementedError: padding after a token, or images that are mixed.
    """
    end = int(q_offset) + q_length - kv_offset
    device = torch.device(device)
    bounds = torch.zeros(batch_size, 2, dtype=torch.int32, device=device)
    bounds[:, 1] = end
    facts, ranges = Facts.of(mask_function), None
    if facts is not None and attention_mask is not None:
        is_token = attention_mask[:, kv_offset : kv_offset + end].bool()
        if (is_token[:, :-1] & ~is_token[:, 1:]).any():
            raise NotImplementedError(
                f"{NAME}: padding must come first; got some after a token. Set the tokenizer's "
                "padding_side='left'"
            )
        bounds[:, 0] = end - is_token.sum(1)
    if facts is not None and facts.images is not None:
        images = facts.images[:, kv_offset : kv_offset + end].to(device)
        ranges = _image_ranges(images)[:, -q_length:].int()
        if facts.window is not None and facts.window_bounds_images:
            positions = torch.arange(end - q_length, end, device=device)
            ranges[..., 0] = ranges[..., 0].maximum(positions - facts.window + 1)
    return Mask.of(
        (batch_size, 1, q_length, kv_length),
        model=getattr(config, "model_type", "?"),
        remedy=remedy(config),
        facts=facts,
        bounds=bounds,
        ranges=ranges,
    )


def _image_ranges(images: torch.Tensor) -> torch.Tensor:
    """The tokens of the image of each token, ``[batch, length, 2]``; none for text.

    Args:
        images: ``[batch, length]``, the number of each token's image; negative: text.
    """
    length = images.shape[1]
    positions = torch.arange(length, device=images.device)
    begins = torch.ones_like(images, dtype=torch.bool)
    begins[:, 1:] = images[:, 1:] != images[:, :-1]
    ordered = images.sort(1).values
    is_new = torch.ones_like(begins)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    if ((begins & (images >= 0)).sum(1) != (is_new & (ordered >= 0)).sum(1)).any():
        raise NotImplementedError(
            f"{NAME}: the tokens of an image must lie side by side; got others between them. Pack "
            "the images of a prompt one after another"
        )
    first = torch.where(begins, positions, 0).cummax(1).values
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    last = torch.where(ends, positions, length).flip(1).cummin(1).values.flip(1)
    return torch.stack([first, last + 1], 2) * (images >= 0)[..., None]


class Facts(NamedTuple):
    """What a mask of transformers says besides causality."""

    window: int | None = None
    """How many keys a query attends to, its own included."""
    images: torch.Tensor | None = None
    """The number of each token's image, whose tokens attend to each other; negative: text."""
    window_bounds_images: bool = False
    is_packed: bool = False
    """Whether a row has several sequences."""

    @classmethod
    def of(cls, function: Any) -> Facts | None:
        """Recognizes transformers' mask function by its code; None: another one."""
        if function is causal_mask_function:
            return cls()
        code = getattr(function, "__code__", None)
        if code not in (_AND, _OR) or len(parts := _captured(function)) != 2:
            return None
        codes = [getattr(x, "__code__", None) for x in parts]
        if code is _AND and codes == [_PACKED, _REMAPPED]:
            facts = cls.of(_captured(parts[1]))
            return facts and facts._replace(is_packed=True)
        kind = _WINDOW if code is _AND else _IMAGES
        if codes.count(kind) != 1:
            return None
        added = codes.index(kind)
        facts, value = cls.of(parts[1 - added]), _captured(parts[added])
        if facts is None or facts.is_packed:
            return None
        if code is _OR:
            return facts._replace(images=value) if facts.images is None else None
        if facts.window is not None:
            return None
        return facts._replace(window=value, window_bounds_images=facts.images is not None)


def _captured(function: Any) -> Any:
    """The variable that a mask function of transformers has from the function that made it; of
    several the first in the order of their names."""
    return function.__closure__[0].cell_contents


_AND, _OR, _WINDOW, _IMAGES, _PACKED, _REMAPPED = (
    x.__code__  # type: ignore[attr-defined]
    for x in (
        and_masks(causal_mask_function),
        or_masks(causal_mask_function),
        sliding_window_overlay(1),
        blockwise_overlay(torch.empty(0)),
        packed_sequence_mask_function(torch.empty(0)),
        remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)),
    )
)
