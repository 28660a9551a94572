"""Small random models of each family give the tokens of transformers' eager attention."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.generation.continuous_batching.cache_allocators import (  # noqa: E402
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from tests.support import causal_models  # noqa: E402
from tests.support.model_families import (  # noqa: E402
    FAMILIES,
    IMAGE,
    IMAGE_FAMILIES,
    IMAGE_TOKENS,
    image_model_of,
    model_of,
)
from torch_frontend.integrations import transformers as integration  # noqa: E402
from torch_frontend.integrations.transformers import NAME, attention_function  # noqa: E402

PROMPT_LENGTHS = (1, 12, 13, 14, 40)
NEW_TOKENS = 16


Model = tuple[Any, list[list[int]]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch's threads of several processes wait for each other a hundred times longer than these
    models run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
        (
            {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
            r"attention_mask must be the one .* LlamaAttention gave a Tensor \[1, 1, 4, 4\]",
        ),
        (
            {"seq_idx": torch.zeros(1, 4)},
            r"seq_idx must be None; LlamaAttention gave a tensor \[1, 4\]; use attn_implementation",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q must be None"),
    ],
    ids=["packed", "bidirectional", "own-mask", "unknown-keyword", "packed-lengths"],
)
def test_refuses_other_masks(options: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        tiny()(torch.tensor([[5, 6, 7, 8]]), use_cache=False, **options)


@pytest.mark.parametrize(
    "keyword",
    [
        {"cache_position": torch.arange(4)},
        {"shift_labels": torch.tensor([[6, 7, 8, -100]])},
        {"ignore_index": 7},
        {"num_logits_to_keep": 1},
        {"return_loss": True},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
def test_keywords_that_are_not_for_attention(keyword: dict[str, Any]) -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    models = model_of("llama"), tiny()
    with torch.no_grad():
        wanted, found = (model(tokens, labels=tokens, **keyword) for model in models)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.loss, wanted.loss, atol=1e-4, rtol=1e-4)


def test_images_with_an_attention_of_their_own() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(
        text_config=tiny().config,
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    given = {
        "input_ids": torch.tensor([[5, 6, *[IMAGE] * 4, 7]]),
        "pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2)),
    }
    with torch.no_grad():
        wanted = model(**given).logits
        model.set_attn_implementation(NAME)
        with pytest.raises(NotImplementedError, match="from CLIPAttention; use attn") as refused:
            model(**given)
        _, _, remedy = str(refused.value).partition("a part of one, attn_implementation=")
        model.set_attn_implementation(ast.literal_eval(remedy))
        torch.testing.assert_close(model(**given).logits, wanted, atol=1e-4, rtol=1e-4)
    assert model.config.text_config._attn_implementation == NAME


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


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"output_attentions": True}, "output_attentions must be False; LlamaAttention gave True"),
        ({"dropout": 0.5}, "dropout must be 0; LlamaAttention gave 0.5"),
    ],
    ids=["weights", "dropout"],
)
def test_refuses_values_of_keywords(keyword: dict[str, Any], message: str) -> None:
    layer = tiny().model.layers[0].self_attn
    with pytest.raises(NotImplementedError, match=message):
        integration.attention(layer, *rows(4), None, **keyword)


def rows(length: int) -> list[torch.Tensor]:
    return [torch.zeros(1, 1, length, 16)] * 3


def test_refuses_a_mask_for_other_keys() -> None:
    layer = tiny().model.layers[0].self_attn
    with pytest.raises(NotImplementedError, match=r"for 5 queries and 5 keys .* \[4, 4\]"):
        integration.attention(layer, *rows(5), integration.mask(1, 4, 4))


def test_refuses_two_windows() -> None:
    model = model_of("gpt-oss")
    model.set_attn_implementation(NAME)
    model.model.layers[0].self_attn.sliding_window = 5
    message = "must be the same .* {'layer': 5, 'mask': 13} from GptOssAttention"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        model(torch.tensor([[5, 6, 7, 8]]))


def test_the_mask_has_no_numbers() -> None:
    mask = integration.mask(2, 3, 5, q_offset=2)
    assert mask.shape == (2, 1, 3, 5) and repr(mask).startswith("Mask([2, 1, 3, 5]")
    last = mask[:, :, -2:, :]
    assert isinstance(last, integration.Mask) and last.shape == (2, 1, 2, 5)
    assert isinstance(mask.to("meta"), integration.Mask)
    for use in (
        lambda: mask[:, :, :2],
        lambda: mask[:, :, :, 1:],
        lambda: mask + 1,
        lambda: torch.cat([mask, mask]),
        lambda: mask.to(torch.float32),
        lambda: bool(mask.any()),
    ):
        with pytest.raises(
            NotImplementedError, match="must be read by the attention function only"
        ):
            use()


IN_EVERY_RUN = {
    *("phimoe", "qwen2_moe", "gemma2", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_5_text"),
    *("llama4_text", "doge", "deepseek_v32", "minimax_m3_vl_text", "inkling_text", "falcon"),
}
"""A window of the mask and of the layer, a soft cap, shared keys, sinks, two head sizes, a hybrid,
and each reason to refuse."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.nightly)
        for name in causal_models.NAMES
    ],
)
def test_every_causal_language_model(name: str) -> None:
    """Beyond windows and blocks, the logits are those of eager attention, or there is an error in
    our words; and the page says which."""
    outcome = causal_models.outcome_of(name)
    assert outcome.title != causal_models.WRONG, outcome.detail
    if transformers.__version__.startswith(causal_models.VERSION):
        assert causal_models.listed()[name] == outcome.title, outcome.detail


@pytest.mark.skipif(
    not transformers.__version__.startswith(causal_models.VERSION), reason="the page is of another"
)
def test_the_page_has_every_causal_language_model() -> None:
    assert sorted(causal_models.listed()) == sorted(causal_models.NAMES)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("phimoe", "_window"),
        ("gpt_oss", "_window"),
        ("minimax_m3_vl_text", "_refuse_unknown_keywords"),
        ("inkling_text", "_refuse_unknown_keywords"),
        ("llama4_text", "_refuse_other_masks"),
    ],
)
def test_the_comparison_finds_a_missing_check(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_function, check, lambda *_: None)
    assert causal_models.outcome_of(name).title == causal_models.WRONG
