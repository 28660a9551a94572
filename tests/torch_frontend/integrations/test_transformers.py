"""Small random models of each family give the tokens of transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.generation.continuous_batching.cache_allocators import (  # noqa: E402
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from tests.support.model_families import (  # noqa: E402
    FAMILIES,
    IMAGE,
    IMAGE_FAMILIES,
    IMAGE_TOKENS,
    image_model_of,
    model_of,
)
from torch_frontend.integrations.transformers import NAME  # noqa: E402

PROMPT_LENGTHS = (1, 12, 13, 14, 40)
NEW_TOKENS = 16


Model = tuple[Any, list[list[int]]]


@pytest.fixture(params=sorted({*FAMILIES} - {"bloom"}), scope="module")  # bloom: ALiBi
def model(request: pytest.FixtureRequest) -> Model:
    """A model of each family with our attention, and the tokens that it must give."""
    model = model_of(request.param)
    wanted = [generated(model, torch.tensor([prompt]))[0] for prompt in prompts()]
    assert all(len(set(tokens)) > NEW_TOKENS // 3 for tokens in wanted), "too easy"
    model.set_attn_implementation(NAME)
    return model, wanted


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, 97, (n,), generator=draw).tolist() for n in PROMPT_LENGTHS]


def generated(model: Any, tokens: torch.Tensor, **options: Any) -> list[list[int]]:
    options = {"attention_mask": torch.ones_like(tokens)} | options
    output = model.generate(tokens, do_sample=False, max_new_tokens=NEW_TOKENS, **options)
    return output[:, tokens.shape[1] :].tolist()


def batched(model: Any, **options: Any) -> list[list[int]]:
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        **{"num_blocks": 64, "page_size": 8, "max_batch_tokens": 64} | options
    )
    results = model.generate_batch(
        prompts(), generation_config=config, continuous_batching_config=batching
    )
    return [results[key].generated_tokens for key in sorted(results, key=number)]


def number(request: str) -> int:
    return int(request.rpartition("_")[2])


def test_generate_batch(model: Model) -> None:
    assert batched(model[0]) == model[1]


def test_generate_batch_with_chunked_prefill(model: Model) -> None:
    assert batched(model[0], max_batch_tokens=16, num_blocks=32) == model[1]


def test_generate(model: Model) -> None:
    tokens = torch.tensor([prompts()[-1]])
    assert generated(model[0], tokens) == model[1][-1:]
    assert generated(model[0], tokens, cache_implementation="static") == model[1][-1:]


def test_generate_pads_on_the_left(model: Model) -> None:
    longest = max(PROMPT_LENGTHS)
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts()])
    assert generated(model[0], padded, attention_mask=(padded > 0).long()) == model[1]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_images(family: str) -> None:
    """Two images in a text. The tokens are those of eager attention, and others than without the
    types that make the tokens of an image attend to each other."""
    model = image_model_of(family)
    draw = torch.Generator().manual_seed(2)
    text = torch.randint(2, 90, (3, 7), generator=draw)
    image = torch.full((IMAGE_TOKENS,), IMAGE)
    if family != "gemma3":  # the tokens' types are all that attention sees of an image
        image = torch.randint(2, 90, image.shape, generator=draw)
    tokens = torch.cat([text[0], image, text[1], image, text[2]])[None]
    is_image = torch.zeros_like(tokens)
    is_image[:, 7:23] = is_image[:, 30:46] = 1
    options: dict[str, Any] = {}
    if family == "gemma3":
        options["pixel_values"] = torch.randn(2, 3, 64, 64, generator=draw)
    name = "mm_token_type_ids" if family == "gemma4" else "token_type_ids"
    types = is_image
    if family == "paligemma2":  # the first image and the text before it are a prefix, of type 0
        types = torch.ones_like(tokens)
        types[:, :23] = 0

    def outcome(types: torch.Tensor, num_padding: int = 0, **more: Any) -> Any:
        padded = torch.nn.functional.pad(tokens, (num_padding, 0))
        types = torch.nn.functional.pad(types, (num_padding, 0))
        mask = (padded > 0).long()
        return generated(model, padded, attention_mask=mask, **{name: types}, **options, **more)

    wanted, without = outcome(types), outcome(types * 0 + (family == "paligemma2"))
    assert wanted != without and len({*wanted[0]}) > NEW_TOKENS // 3, "too easy"
    model.set_attn_implementation({"text_config": NAME})
    assert outcome(types) == wanted
    assert outcome(types, num_padding=5) == wanted
    if family != "paligemma2":  # with eager attention it takes no static cache either
        assert outcome(types, cache_implementation="static") == wanted


def test_refuses_an_image_in_two_parts() -> None:
    model = image_model_of("paligemma2")
    model.set_attn_implementation({"text_config": NAME})
    tokens, types = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="must lie side by side"):
        model(tokens, token_type_ids=types)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_decoding_does_not_copy_the_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def note(self: Any, keys: torch.Tensor, *rest: Any) -> Any:
        copied.append(len(keys))
        return update(self, keys, *rest)

    update = SlidingAttentionCacheAllocator.update
    monkeypatch.setattr(SlidingAttentionCacheAllocator, "update", note)
    monkeypatch.setattr(FullAttentionCacheAllocator, "update", None)
    model = model_of(family)
    model.set_attn_implementation(NAME)
    batched(model, max_batch_tokens=128)
    assert copied == ([] if family == "llama" else [sum(PROMPT_LENGTHS)] * 4)


def tiny() -> Any:
    model = model_of("llama")
    model.set_attn_implementation(NAME)
    return model


def test_refuses_padding_after_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    with pytest.raises(NotImplementedError, match="padding_side='left'"):
        generated(tiny(), tokens, attention_mask=torch.tensor([[1, 1, 0]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "the mask must be causal"),
        ({"is_causal": False}, "the mask must be causal"),
    ],
    ids=["packed", "bidirectional"],
)
def test_refuses_other_masks(options: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        tiny()(torch.tensor([[5, 6, 7, 8]]), use_cache=False, **options)


def test_refuses_to_differentiate() -> None:
    with pytest.raises(NotImplementedError, match="inference only"):
        tiny()(torch.tensor([[5, 6, 7, 8]]))


def test_refuses_to_differentiate_sinks_alone() -> None:
    model = model_of("gpt-oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("sinks" in name)
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="inference only"):
        model(torch.tensor([[5, 6, 7, 8]]))


def test_others_still_work_in_continuous_batching() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.set_attn_implementation("flex_attention")
        batched(model)
