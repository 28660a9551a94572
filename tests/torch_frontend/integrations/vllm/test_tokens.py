"""vLLM serves models on our attention: the tokens are those of transformers' eager attention.

These tests need an environment with vLLM for the CPU: ``.ci/run`` makes it.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ |= {  # before vLLM is imported
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm import LLM, SamplingParams, envs, ir
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import rotary_embedding, utils
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from harness import reference
from harness.prompts import PROMPTS
from shared_ffi import kv_cache_update, paged_attention
from tests.support.calls import observed_calls
from tests.support.model_families import FAMILIES, SIZES, WINDOW, model_of, with_random_weights
from torch_frontend.integrations import vllm as integration
from torch_frontend.integrations.vllm import names
from xla_paged_attention.engine.checkpoint import load, unpacked

OURS = "CUSTOM"
PROMPT_LENGTHS = (1, 12, 13, 14, 40, 100)
NEW_TOKENS = 16


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
"""The rotation of DeepSeek-V2-Lite."""
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What vLLM reads of a router, and transformers does not."""
CHOICE = {"n_routed_experts": 8, "num_experts_per_tok": 2}
"""Which of them is a matter of the last bit, but seldom."""
V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 2,  # of 27
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 6,  # of 64
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": False,
}
"""DeepSeek-V2-Lite, with fewer layers, experts and words."""
# Causal language models that transformers and vLLM both have, and what the sizes do not tell.
MODELS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "deepseek_v2": {"num_key_value_heads": 6, "rope_parameters": YARN},
    "deepseek_v3": {"num_key_value_heads": 6, **SIGMOID},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {},
    "falcon_h1": {},
    "gemma": {},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
        "num_experts": None,
    },
    "glm4": {},
    "glm4_moe_lite": {"num_key_value_heads": 6, "first_k_dense_replace": 1, **SIGMOID},
    "gpt2": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "granitemoeshared": {},
    "hyperclovax": {},
    "ministral3": {},
    "minicpm3": {"num_key_value_heads": 6},
    "mixtral": {},
    "nemotron": {},
    "olmoe": {},
    "opt": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "stablelm": {},
    "llama4_text": {
        "attention_chunk_size": 32,
        "attn_temperature_tuning": False,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": False,
    },
}
OTHER_MODELS = {"cohere", "cohere2", "cohere2_moe", "ernie4_5_moe", "qwen2_moe"}
"""vLLM's own attention, too, gives other tokens than transformers."""
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
REFUSED = ("deepseek_v32",)
FIRST = {"deepseek_v3", "exaone4", "falcon", "gpt_oss", "llama4_text"}
"""One of each kind of attention; the others with --all."""
MODEL_SIZES = SIZES | {
    "hidden_size": 192,
    "head_dim": 32,  # vLLM's own kernel wants a multiple
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "n_layer": 4,
    "n_head": 6,
    "n_embd": 192,
    "n_inner": 64,
    "n_positions": 256,
    "rotary_dim": 8,
    "ffn_dim": 64,
    "word_embed_proj_dim": 192,
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # which of them is a matter of the last bit
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


def small_model(kind: str, **changes: Any) -> Any:
    config = CONFIG_MAPPING[kind]
    fields = vars(config())
    sizes = {name: size for name, size in MODEL_SIZES.items() if name in fields}
    options = config(**sizes | MODELS.get(kind, {}) | changes)
    torch.manual_seed(0)  # for the biases of routers
    model = transformers.AutoModelForCausalLM.from_config(options, attn_implementation="eager")
    return _with_small_embeddings(with_random_weights(model, std=0.3))


def model_for_vllm(family: str, **changes: Any) -> Any:
    if family not in FAMILIES:
        return small_model(family, **changes)
    if not family.startswith(("bloom", "gemma")):
        return model_of(family, **changes)
    model = model_of(family, tie_word_embeddings=True, **changes)  # vLLM knows no other
    return _with_small_embeddings(model)


def _with_small_embeddings(model: Any) -> Any:
    """With large ones that are tied, a model repeats its last token."""
    if model.config.tie_word_embeddings:
        torch.manual_seed(0)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
    return model


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, 97, (n,), generator=draw).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves the model of a family, once."""
    folder = tmp_path_factory.mktemp("models")

    def save(family: str, **changes: Any) -> Path:
        path = folder / f"{family}{changes or ''}"[:99]
        if not path.exists():
            model_for_vllm(family, **changes).save_pretrained(path)
        return path

    return save


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Starts vLLM in this process, without a tokenizer."""
    engines = []

    def start(path: Path, **options: Any) -> Any:
        options = {
            "attention_backend": OURS,
            "dtype": "float32",
            "max_model_len": 256,
            "block_size": 32,
            "enforce_eager": True,
            "seed": 0,
        } | options
        rotary_embedding._ROPE_DICT.clear()  # modules of an engine with another configuration
        if path.name.split("{")[0] in LATENT:
            # vLLM's rotation for the CPU is right for queries whose heads lie side by side.
            options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        engines.append(LLM(str(path), skip_tokenizer_init=True, **options))
        return engines[-1]

    yield start
    while engines:
        engines.pop().llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def tokens_of(engine: Any, texts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    outputs = engine.generate(
        [{"prompt_token_ids": x} for x in texts],
        SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return [[*output.outputs[0].token_ids] for output in outputs]


def expected_tokens(family: str, **changes: Any) -> list[list[int]]:
    model, wanted = model_for_vllm(family, **changes), []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        output = model.generate(
            tokens, do_sample=False, max_new_tokens=NEW_TOKENS, attention_mask=mask
        )
        wanted.append(output[0, len(prompt) :].tolist())
    assert sum(len(set(x)) for x in wanted) > 3 * len(wanted), "too easy"
    return wanted


def attention_layers(engine: Any) -> list[Any]:
    config = engine.llm_engine.vllm_config
    return [*config.compilation_config.static_forward_context.values()]


@pytest.fixture
def calls() -> Iterator[list[tuple[str, list[int]]]]:
    """The handlers that run, with the addresses of what they read and write."""
    with observed_calls() as made:
        yield made


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in FIRST else pytest.mark.nightly) for x in MODELS]
)
def test_models(kind: str, checkpoint: Any, serve: Any, monkeypatch: Any) -> None:
    changes = CHOICE if kind in LATENT else {}
    engine = serve(checkpoint(kind, **changes), max_num_seqs=4)
    impls = {type(x.impl) for x in attention_layers(engine) if hasattr(x, "impl")}
    latent = integration.XlaGpuLatentImpl
    assert impls == {latent if kind in LATENT else integration.XlaGpuAttentionImpl}
    found = tokens_of(engine, prompts())
    if kind in LATENT:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # vLLM's own latent attention has other sizes
        envs.disable_envs_cache()
    if kind in LATENT | OTHER_MODELS:
        vllms = serve(checkpoint(kind, **changes), attention_backend=None)
        impls = {type(x.impl).__name__ for x in attention_layers(vllms) if hasattr(x, "impl")}
        assert impls == {"CPUAttentionBackendImpl"}
        assert found == tokens_of(vllms, prompts())
    assert (found == expected_tokens(kind, **changes)) == (kind not in OTHER_MODELS)


def test_the_page_names_the_models() -> None:
    page = " ".join((Path(__file__).parents[4] / "docs/vllm.md").read_text().split())
    models = page.split("and the `model_type`s")[1].split("vLLM's own tests")[0]
    names = re.findall(r"`(\w+)`", models)
    assert names == [*sorted(MODELS.keys() - OTHER_MODELS), *sorted(OTHER_MODELS), *REFUSED]


@pytest.mark.parametrize("kind", REFUSED)
def test_chosen_positions_are_refused(kind: str, checkpoint: Any, serve: Any) -> None:
    message = f"^xla_gpu: not for this model: sparse not supported{REMEDY}"
    with pytest.raises(ValueError, match=message):
        serve(checkpoint(kind))


def test_the_sizes_of_deepseek_v2_lite(checkpoint: Any, serve: Any) -> None:
    """In the largest name of this backend; vLLM's own would have blocks of 16."""
    engine = serve(checkpoint("deepseek_v2", **V2_LITE), attention_backend="XLA_GPU_MLA")
    assert {x.kv_cache.shape[1:] for x in attention_layers(engine) if hasattr(x, "impl")} == {
        (32, 576)
    }
    assert tokens_of(engine, prompts()) == expected_tokens("deepseek_v2", **V2_LITE)


# MODELS has two of them with sizes that vLLM takes. vLLM has no windows for some layers of Qwen3, and
# on the CPU no experts for phimoe.
NOT_IN_VLLM = {"gemma4", "gpt-oss", "phimoe", "qwen3-window"}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - NOT_IN_VLLM))
def test_families(family: str, checkpoint: Any, serve: Any, calls: Any) -> None:
    engine = serve(checkpoint(family))
    assert {type(x.impl) for x in attention_layers(engine)} == {integration.XlaGpuAttentionImpl}
    assert tokens_of(engine, prompts()) == expected_tokens(family)
    assert calls


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", x) for x in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")]
    + [("deepseek_v3", "BLHNC")],  # the blocks of its layers beside each other
)
def test_layouts(family: str, layout: str, checkpoint: Any, serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    engine = serve(checkpoint(family))
    assert engine.llm_engine.vllm_config.cache_config.kv_cache_layout == layout
    assert tokens_of(engine, prompts()) == expected_tokens(family)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_chunked_prefill_and_prefix_caching(family: str, checkpoint: Any, serve: Any) -> None:
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True}
    engine = serve(checkpoint(family), enable_prefix_caching=True, **limits)
    config = engine.llm_engine.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 16
    assert config.cache_config.enable_prefix_caching
    expected = expected_tokens(family)
    assert tokens_of(engine, prompts()) == expected
    assert tokens_of(engine, prompts()) == expected  # from the cache


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_preemption(family: str, checkpoint: Any, serve: Any) -> None:
    """A pool for two of the six sequences."""
    engine = serve(checkpoint(family), num_gpu_blocks_override=9)
    assert tokens_of(engine, prompts()) == expected_tokens(family)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_torch_compile(family: str, checkpoint: Any, serve: Any) -> None:
    engine = serve(checkpoint(family), enforce_eager=False)
    assert tokens_of(engine, prompts()) == expected_tokens(family)


def test_bfloat16_does_not_depend_on_the_batch(checkpoint: Any, serve: Any) -> None:
    engine = serve(checkpoint("llama"), dtype="bfloat16", enable_prefix_caching=False)
    alone = [tokens_of(engine, [prompt])[0] for prompt in prompts()]
    assert tokens_of(engine, prompts()) == alone
    assert tokens_of(engine, prompts()[::-1]) == alone[::-1]


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("real") / "model")


def test_a_real_model(serve: Any, real_model: Path) -> None:
    """32 prompts and 128 tokens of each answer, as vLLM's own attention and transformers have them.
    Transformers' greedy search gives an answer exactly if each of its tokens is the best one."""
    known = load(real_model, "float32")
    texts = [known.encode(" ".join(PROMPTS[i : i + 1 + i % 8])) for i in range(32)]
    assert len({*map(len, texts)}) > 20
    answers = tokens_of(serve(real_model, max_model_len=512), texts, 128)
    vllms = serve(real_model, max_model_len=512, attention_backend=None)
    assert tokens_of(vllms, texts, 128) == answers
    for text, answer in zip(texts, answers, strict=True):
        assert known.scores(text, answer).best == answer


def test_a_real_model_alone_and_in_a_batch(serve: Any, real_model: Path, monkeypatch: Any) -> None:
    """In bfloat16, with linear layers in float64: PyTorch's depend on the size of the batch."""
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", _linear_in_float64)
    engine = serve(real_model, dtype="bfloat16", max_num_batched_tokens=64)
    draw = torch.Generator().manual_seed(2)
    texts = [torch.randint(100, 40000, (n,), generator=draw).tolist() for n in range(3, 48, 3)]
    alone = [tokens_of(engine, [text])[0] for text in texts]
    assert tokens_of(engine, texts) == alone
    assert tokens_of(engine, texts[::-1]) == alone[::-1]


def _linear_in_float64(layer: Any, remove_weight: bool) -> None:
    weight = layer.weight.detach().double()

    def run(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = torch.nn.functional.linear(
            x.double(), weight, None if bias is None else bias.double()
        )
        return result.to(x.dtype)

    layer.cpu_linear = run


def test_nothing_is_copied(checkpoint: Any, serve: Any, calls: Any, monkeypatch: Any) -> None:
    """The ops get the memory that vLLM has, and a step has two of them for each layer."""
    seen = list[set[int]]()
    forward = integration.XlaGpuAttentionImpl.forward
    update = integration.XlaGpuAttentionImpl.do_kv_cache_update

    def recorded(self: Any, layer: Any, *tensors: Any, **keywords: Any) -> Any:
        query, _, _, kv_cache, metadata, *_ = tensors
        output = keywords["output"]
        if metadata is not None:
            seen.append({x.data_ptr() for x in (query, kv_cache, output)})
        return forward(self, layer, *tensors, **keywords)

    def recorded_update(self: Any, layer: Any, *tensors: torch.Tensor) -> None:
        seen.append({x.data_ptr() for x in tensors})
        update(self, layer, *tensors)

    monkeypatch.setattr(integration.XlaGpuAttentionImpl, "forward", recorded)
    monkeypatch.setattr(integration.XlaGpuAttentionImpl, "do_kv_cache_update", recorded_update)
    engine = serve(checkpoint("llama"))
    calls.clear()
    seen.clear()
    tokens_of(engine, prompts(), new_tokens=4)
    layers = len(attention_layers(engine))
    ops = [kv_cache_update.OP, paged_attention.OP]
    assert [op for op, _ in calls] == ops * (len(calls) // 2)
    assert len(calls) == len(seen) and len(calls) % (2 * layers) == 0
    for given, (op, addresses) in zip(seen, calls, strict=True):
        assert given <= {*addresses}, op


SCALES = {"k": 0.25, "v": 0.5}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_caches_against_float64(dtype: str, checkpoint: Any, serve: Any) -> None:
    """Log-probabilities beside those of a model in float64 whose keys and values are rounded to
    fp8 with the same scales. vLLM's own kernel has the errors of ours or larger ones."""
    changes = {"head_dim": 32}  # vLLM's kernel wants a multiple of 32
    exact = logprobs_in_float64(model_for_vllm("llama", **changes), dtype)
    errors = {}
    for backend in (OURS, None):
        engine = serve(
            checkpoint("llama", **changes), attention_backend=backend, kv_cache_dtype=dtype
        )
        for layer in attention_layers(engine):
            layer._k_scale_float, layer._v_scale_float = SCALES["k"], SCALES["v"]
            layer._k_scale.fill_(SCALES["k"])
            layer._v_scale.fill_(SCALES["v"])
        errors[backend] = (logprobs(engine) - exact).abs()
    unrounded = (logprobs(serve(checkpoint("llama", **changes))) - exact).abs()
    print({str(k): (x.mean().item(), x.max().item()) for k, x in errors.items()})
    assert errors[OURS].mean() < 1.05 * errors[None].mean() + 1e-6
    assert errors[OURS].mean() < 0.1 * unrounded.mean(), "fp8 matters in this test"


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_caches_with_scales_against_float64(dtype: str, checkpoint: Any, serve: Any) -> None:
    """Each row has scales of its own. vLLM has no kernel for the CPU that knows these caches."""
    changes = {"head_dim": 32}
    exact = logprobs_in_float64(model_for_vllm("llama", **changes), dtype)
    errors = {
        name: (logprobs(serve(checkpoint("llama", **changes), kv_cache_dtype=name)) - exact).abs()
        for name in (dtype, "auto")
    }
    assert errors[dtype].mean() < 0.1 * errors["auto"].mean(), "the scales matter in this test"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_latents_against_float64(dtype: str, checkpoint: Any, serve: Any) -> None:
    """vLLM's own latent attention for the CPU has no fp8."""
    changes = {"first_k_dense_replace": 4}  # PyTorch has no experts in float64
    exact = logprobs_in_float64(model_for_vllm("deepseek_v3", **changes), dtype)
    errors = {}
    for name in (dtype, "auto"):
        engine = serve(checkpoint("deepseek_v3", **changes), kv_cache_dtype=name)
        for layer in attention_layers(engine):
            if hasattr(layer, "impl"):
                layer._k_scale.fill_(SCALES["k"])
        errors[name] = (logprobs(engine) - exact).abs().mean()
    assert errors[dtype] < 0.1 * errors["auto"], "fp8 matters in this test"


def logprobs_in_float64(model: Any, dtype: str) -> torch.Tensor:
    """The log-probabilities of the longest prompt's tokens, with K and V as an fp8 cache holds them;
    or with latents and rotated keys, which a cache for latent attention holds."""
    rotated = getattr(model.config, "qk_rope_head_dim", 0)

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        if dtype in names.FP8_DTYPES:
            return (x / scale).float().to(names.FP8_DTYPES[dtype]).to(x.dtype) * scale
        stored = names.DTYPES_WITH_SCALES[dtype]
        info = torch.iinfo if stored is torch.int8 else torch.finfo
        scales = x.abs().amax(-1, keepdim=True) / info(stored).max
        numbers = (x / scales).float()
        numbers = numbers.round() if stored is torch.int8 else numbers.to(stored)
        return numbers.to(x.dtype) * scales

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys = rounded(key, SCALES["k"]).repeat_interleave(groups, 1)
        values = rounded(value, SCALES["v"]).repeat_interleave(groups, 1)
        if rotated:
            keys, values = torch.cat([key[..., :-rotated], keys[..., -rotated:]], -1), value
        logits = query @ keys.mT * module.scaling
        ahead = torch.ones(logits.shape[-2:]).triu(1).bool()
        weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
        return (weights @ values).transpose(1, 2), None

    transformers.AttentionInterface.register("rounded", attend)
    model = model.double()
    model.set_attn_implementation("rounded")
    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.register_forward_hook(lambda *x: rounded(x[2], SCALES["k"]))
    tokens = torch.tensor([prompts()[-1]])
    with torch.no_grad():
        found = model(tokens, use_cache=False).logits.log_softmax(-1)
    return found[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]


def logprobs(engine: Any) -> torch.Tensor:
    """The log-probabilities of the longest prompt's tokens."""
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": prompts()[-1]}
    (output,) = engine.generate([prompt], parameters, use_tqdm=False)
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([given[token].logprob for token, given in pairs])


def test_sinks() -> None:
    """They come in the dtype of the model."""
    sinks = torch.randn(4).bfloat16()
    impl = integration.XlaGpuAttentionImpl(4, 8, 0.5, num_kv_heads=2, sliding_window=3, sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    query, kv_cache = torch.randn(3, 4, 8), torch.randn(2, 2, 16, 16)
    metadata = integration.XlaGpuMetadata(
        num_actual_tokens=2,
        context_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        num_seqs=torch.tensor([1], dtype=torch.int32),
        max_query_len=None,
        causal=True,
    )
    output = torch.full_like(query, torch.nan)
    impl.forward(None, query, query, query, kv_cache, metadata, output=output)
    expected = reference.paged_attention(
        query[:2].numpy(),
        kv_cache.numpy(),
        *(x.numpy() for x in (metadata.context_lens, metadata.block_tables)),
        *(x.numpy() for x in (metadata.query_start_loc, metadata.num_seqs)),
        0.5,
        3,
        kv_layout="nhb(2d)",
        sinks=sinks.float().numpy(),
    )
    torch.testing.assert_close(
        output[:2].double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5
    )
    assert output[2].isnan().all()  # padding


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float16"),
        ("llama", "nvfp4"),
        ("deepseek_v3", "int8_per_token_head"),
        ("deepseek_v3", "fp8_ds_mla"),
        ("deepseek_v3", "float16"),
    ],
)
def test_a_cache_that_is_not_supported(
    family: str, dtype: str, checkpoint: Any, serve: Any
) -> None:
    named = f"not supported; got kv_cache_dtype={dtype}; kv_cache_dtype may be auto, "
    message = f"xla_gpu: .*kv_cache_dtype ({dtype} not supported for|{named}).*{REMEDY}"
    with pytest.raises(Exception, match=message):
        serve(checkpoint(family), kv_cache_dtype=dtype)


LATENT_SIZES: dict[str, Any] = {
    "num_heads": 4,
    "head_size": 24,
    "scale": 0.5,
    "num_kv_heads": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "kv_b_proj": None,
}


@pytest.mark.parametrize("window", [None, 3])
def test_latent_attention(window: int | None) -> None:
    """A batch, with a query in two parts and in one, and padding among the new rows."""
    spec = specs.MLAAttentionSpec(**LATENT_SPEC)
    if window:
        spec = specs.SlidingWindowMLASpec(**LATENT_SPEC, sliding_window=window)
    metadata = a_builder(spec, builder=integration.XlaGpuLatentBuilder).build(0, a_batch())
    assert metadata.num_decodes == 2 and metadata.num_decode_tokens == 5
    impl = integration.XlaGpuLatentImpl(**LATENT_SIZES, sliding_window=window)
    query, kv_cache, rows = torch.randn(5, 4, 24), torch.randn(2, 16, 24), torch.randn(5, 24)
    slots = torch.tensor([20, 21, -1, 7, 8])
    written = kv_cache.clone().view(32, 24)
    written[slots[slots >= 0]] = rows[slots >= 0]
    impl.do_kv_cache_update(
        rows[:, :16], rows[:, None, 16:], kv_cache, slots, "auto", torch.ones(())
    )
    assert torch.equal(kv_cache.view(32, 24), written)
    found, lse = impl.forward_mqa(query, kv_cache, metadata, None)
    parts = impl.forward_mqa((query[..., :16], query[..., 16:]), kv_cache, metadata, None)
    assert torch.equal(found, parts[0]) and lse is None
    expected = reference.paged_attention(
        query.numpy(),
        kv_cache.numpy(),
        *(x.numpy() for x in (metadata.context_lens, metadata.block_tables)),
        *(x.numpy() for x in (metadata.query_start_loc, metadata.num_seqs)),
        0.5,
        window,
        kv_layout="nbd",
        value_head_size=16,
    )
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def test_what_latent_attention_refuses(monkeypatch: Any) -> None:
    for argument in ("indexer", "q_pad_num_heads", "topk_indices_buffer"):
        message = f"^xla_gpu: {argument}=8 is not supported"
        with pytest.raises(NotImplementedError, match=message):
            integration.XlaGpuLatentImpl(**LATENT_SIZES, **{argument: 8})
    with pytest.raises(
        NotImplementedError, match="^xla_gpu: kv_cache_dtype int8_per_token_head is"
    ):
        integration.XlaGpuLatentImpl(**LATENT_SIZES, kv_cache_dtype="int8_per_token_head")
    new = lambda cls, *_, **__: object.__new__(cls)
    monkeypatch.setattr(integration.XlaGpuLatentImpl, "__new__", new)
    for name, message in (("dcp", "decode"), ("pcp", "prefill")):
        sizes = {"dcp_world_size": 1, "pcp_world_size": 1, f"{name}_world_size": 2}
        for attribute, size in sizes.items():
            monkeypatch.setattr(integration.XlaGpuLatentImpl, attribute, size, raising=False)
        with pytest.raises(NotImplementedError, match=f"^xla_gpu: {message} context parallelism"):
            integration.XlaGpuLatentImpl(**LATENT_SIZES)
    backend = integration.XlaGpuLatentBackend
    assert not (backend.supports_dcp() or backend.supports_pcp() or backend.supports_sink())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_normalizes_rotates_and_writes(
    dtype: torch.dtype, is_neox: bool, kv_cache_dtype: str
) -> None:
    """The bits of vLLM's operators and our update. In bfloat16 theirs round each product of a
    rotation, so there the angles are 0. The last token is padding of the batch."""
    impl = integration.XlaGpuAttentionImpl(4, 16, 0.25, 2, kv_cache_dtype=kv_cache_dtype)
    assert impl.fused_qk_norm_rope_kvcache_supported()
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    qkv = torch.randn(6, 8 * 16).to(dtype)
    weights = torch.randn(2, 16).to(dtype)
    positions, slots = torch.tensor([3, 0, 7, 2, 5, 1]), torch.tensor([20, 21, -1, 7, 8])
    angles = torch.randn(8, 4) * (dtype == torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = qkv.view(6, 8, 16).split([4, 2, 2], 1)
    query, key = (
        ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
        for x, weight in zip(heads, weights, strict=False)
    )
    for x in (query, key):
        row = [table[positions] for table in (cos, sin)]
        x[..., :8] = ApplyRotaryEmb.forward_static(x[..., :8].clone(), *row, is_neox)
    bytes_of_row = {"int8_per_token_head": 2 * (16 + 4)}.get(kv_cache_dtype, 2 * 16)
    stored = dtype if kv_cache_dtype == "auto" else torch.uint8
    wanted, found = torch.zeros(2, 2, 2, 16, bytes_of_row, dtype=stored)
    impl.do_kv_cache_update(layer, key, heads[2], wanted, slots)
    q_out, k_out = torch.zeros(6, 4 * 16, dtype=dtype), torch.zeros(6, 2 * 16, dtype=dtype)
    impl.do_qk_norm_rope_kvcache_update(
        *(layer, qkv.clone(), q_out, k_out, positions, *weights, 1e-6),
        *(torch.cat([cos, sin], -1), is_neox, found, slots),
    )
    assert torch.equal(found, wanted) and found.any()
    assert torch.equal(q_out[:5], query[:5].flatten(1))


def test_a_quantized_output_is_refused() -> None:
    impl = object.__new__(integration.XlaGpuAttentionImpl)
    scale = torch.ones(())
    with pytest.raises(NotImplementedError, match="^xla_gpu: quantized outputs"):
        impl.forward(None, *[scale] * 4, None, output=scale, output_scale=scale)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_encoders_are_refused(kind: str) -> None:
    message = f"^xla_gpu: attention type {kind} is not supported"
    with pytest.raises(NotImplementedError, match=message):
        integration.XlaGpuAttentionImpl(4, 16, 0.25, attn_type=kind)


def test_a_batch_with_causal_sequences_and_others() -> None:
    builder = a_builder()
    flags = torch.tensor([True, False])
    metadata = builder.build(0, a_batch(causal=flags))
    impl = integration.XlaGpuAttentionImpl(4, 8, 0.5, num_kv_heads=2)
    query, kv_cache = torch.randn(5, 4, 8), torch.randn(2, 2, 16, 16)
    output = torch.empty_like(query)
    impl.forward(None, query, query, query, kv_cache, metadata, output=output)
    for causal, tokens in ((True, slice(2)), (False, slice(2, 5))):
        expected = torch.empty_like(query)
        metadata = builder.build(0, a_batch(causal=causal))
        impl.forward(None, query, query, query, kv_cache, metadata, output=expected)
        assert torch.equal(output[tokens], expected[tokens])
    first = builder.build(0, a_batch(causal=flags)).causal_seqs
    assert first.data_ptr() == builder.build(0, a_batch(causal=~flags)).causal_seqs.data_ptr()


def test_more_sequences_and_tokens_than_the_limits() -> None:
    """Chunked attention makes several sequences of each. A number of them always has the same memory,
    which CUDA graphs need."""
    builder = a_builder()
    count, limit = 21, 4
    starts = torch.arange(count + 1, dtype=torch.int32)
    many = a_batch(
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts[1:],
        seq_lens_cpu_upper_bound=starts[1:],
        block_table_tensor=torch.zeros(count, 2, dtype=torch.int32),
        causal=starts[1:] % 2 > 0,
        mm_req_doc_ranges={x: [(0, x)] for x in range(count)},
    )
    addresses = set()
    for _ in range(2):
        metadata = builder.build(0, many)
        assert metadata.num_seqs.tolist() == [count] and count > 2 * limit
        assert metadata.causal_seqs.tolist() == [1, 0] * 10 + [1]
        assert metadata.ranges.tolist() == [[0, x] for x in range(1, count + 1)]
        tensors = (metadata.num_seqs, metadata.causal_seqs, metadata.ranges)
        addresses.add(tuple(x.data_ptr() for x in tensors))
        few = builder.build(0, a_batch(causal=torch.tensor([True, False])))
        assert few.num_seqs.tolist() == [2] and few.causal_seqs.tolist() == [1, 0]
    assert len(addresses) == 1


def test_a_default_device_changes_nothing() -> None:
    def attend() -> torch.Tensor:
        impl = integration.XlaGpuAttentionImpl(4, 8, 0.5, 2, alibi_slopes=[0.5, 1.0, 2.0, 4.0])
        images = {0: [(1, 4)]}
        flags = torch.tensor([True, False], device="cpu")
        metadata = builder.build(0, a_batch(causal=flags, mm_req_doc_ranges=images))
        impl.forward(SimpleNamespace(), query, query, query, kv_cache, metadata, output=output)
        return output.clone()

    query, kv_cache = torch.randn(5, 4, 8), torch.randn(2, 2, 16, 16)
    output, builder = torch.empty_like(query), a_builder()
    expected = attend()
    torch.set_default_device("meta")
    try:
        builder = a_builder()
        assert torch.equal(attend(), expected)
    finally:
        torch.set_default_device(None)


REMEDY = "; leave out --attention-backend for vLLM's own attention$"


@pytest.mark.parametrize(
    ("argument", "got"), [("chunk_lookback", 1), ("score_mod", None), ("use_alibi_sqrt", True)]
)
def test_unknown_arguments_of_a_layer_are_refused(argument: str, got: Any) -> None:
    message = f"^xla_gpu: {argument}={got} is not supported{REMEDY}"
    with pytest.raises(NotImplementedError, match=message):
        integration.XlaGpuAttentionImpl(4, 16, 0.25, **{argument: got})
    integration.XlaGpuAttentionImpl(4, 16, 0.25, chunk_lookback=-1)  # none


def test_prefill_context_parallelism_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(integration.XlaGpuAttentionImpl, "pcp_world_size", 2, raising=False)
    new = lambda cls, *_, **__: object.__new__(cls)
    monkeypatch.setattr(integration.XlaGpuAttentionImpl, "__new__", new)
    with pytest.raises(NotImplementedError, match="^xla_gpu: prefill context parallelism"):
        integration.XlaGpuAttentionImpl(4, 16, 0.25)


SPEC: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
LATENT_SPEC: dict[str, Any] = SPEC | {"num_kv_heads": 1, "head_size": 24}
CHUNKED = specs.ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=16)


LAYERS = {
    integration.XlaGpuMetadataBuilder: [
        (specs.RSWASpec(**SPEC, rswa_window=4), "a RSWASpec is not supported"),
        (specs.SinkFullAttentionSpec(**SPEC, sink_len=16), "a SinkFullAttentionSpec is not"),
        (specs.MLAAttentionSpec(**SPEC), "a MLAAttentionSpec is not supported"),
        (specs.CrossAttentionSpec(**SPEC), "a CrossAttentionSpec is not supported"),
        # Chunks are made by a builder that vLLM derives from ours.
        (CHUNKED, "a ChunkedLocalAttentionSpec is not supported"),
        (
            specs.FullAttentionSpec(**SPEC, head_size_v=4),
            "head_size_v must be 8 and tokens_per_state 1; got 4 and 1",
        ),
        (
            specs.FullAttentionSpec(**SPEC, tokens_per_state=2),
            "head_size_v must be 8 and tokens_per_state 1; got 8 and 2",
        ),
    ],
    integration.XlaGpuLatentBuilder: [
        (specs.FullAttentionSpec(**SPEC), "a FullAttentionSpec is not supported"),
        (
            specs.MLAAttentionSpec(**LATENT_SPEC, head_size_v=4),
            "head_size_v must be 0 and tokens_per_state 1; got 4 and 1",
        ),
        (
            specs.MLAAttentionSpec(**LATENT_SPEC, tokens_per_state=4),
            "head_size_v must be 0 and tokens_per_state 1; got 0 and 4",
        ),
    ],
}
"""What a builder refuses, and the message."""


@pytest.mark.parametrize(
    ("builder", "spec", "message"),
    [(builder, *refused) for builder, rows in LAYERS.items() for refused in rows],
)
def test_unknown_layers_are_refused(builder: Any, spec: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^xla_gpu: {message}.*{REMEDY}"):
        a_builder(spec, builder=builder)


def test_masks_of_other_backends_are_refused() -> None:
    for attribute in ("logical_mask_mod", "block_sparsity_hint"):
        layers = {"layer.0": SimpleNamespace(**{attribute: print})}
        with pytest.raises(NotImplementedError, match=f"{attribute} of the layer layer.0 is not"):
            a_builder(layers=layers)
    with pytest.raises(NotImplementedError, match=f"^xla_gpu: rswa_prefix_lens is not.*{REMEDY}"):
        a_builder().build(0, a_batch(rswa_prefix_lens=torch.zeros(2, dtype=torch.int32)))


def test_chunks_are_not_shared_by_processes() -> None:
    class Chunked(integration.XlaGpuMetadataBuilder):
        pass

    message = "^xla_gpu: decode context parallelism with chunked attention"
    with pytest.raises(NotImplementedError, match=message):
        a_builder(CHUNKED, builder=Chunked, shards=2)
    a_builder(CHUNKED, builder=Chunked)
    whole = specs.FullAttentionSpec(**SPEC, dcp_sharded=False)  # a draft model's beside shards
    assert a_builder(whole, shards=2).build(0, a_batch()).shard is None


def test_no_cuda_graph_of_prompts_that_may_have_images() -> None:
    support = integration.XlaGpuMetadataBuilder.get_cudagraph_support
    found = [support(a_config(has_images=x), None) for x in (False, True)]
    assert found == [AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH]
    assert support(a_config(shards=2), None) == AttentionCGSupport.NEVER


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("clamps", [False, True])
def test_image_tokens_attend_to_each_other(clamps: bool, window: int | None) -> None:
    images = {0: [(1, 4)], 1: [(0, 2), (5, 8)]}  # first and last position
    spec = specs.SlidingWindowSpec(**SPEC, sliding_window=window) if window else None
    metadata = a_builder(spec).build(0, a_batch(mm_req_doc_ranges=images))
    impl = integration.XlaGpuAttentionImpl(4, 8, 0.5, num_kv_heads=2, sliding_window=window)
    layer = SimpleNamespace(mm_prefix_clamp_sliding_window=clamps)
    query, kv_cache = torch.randn(5, 4, 8), torch.randn(2, 2, 16, 16)
    output = torch.empty_like(query)
    impl.forward(layer, query, query, query, kv_cache, metadata, output=output)
    ranges = [[1, 5], [0, 0], [5, 9], [5, 9], [5, 9]]  # of the positions 4, 5; 6, 7, 8
    if clamps and window:
        ranges = [[2, 5], [0, 0], [5, 9], [5, 9], [6, 9]]
    expected = reference.paged_attention(
        query.numpy(),
        kv_cache.numpy(),
        *(x.numpy() for x in (metadata.context_lens, metadata.block_tables)),
        *(x.numpy() for x in (metadata.query_start_loc, metadata.num_seqs)),
        0.5,
        window,
        kv_layout="nhb(2d)",
        bidirectional_ranges=ranges,
    )
    torch.testing.assert_close(output.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def a_config(
    *, layers: dict[str, Any] | None = None, shards: int = 1, has_images: bool = True
) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=shards, cp_kv_cache_interleave_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16),
        model_config=SimpleNamespace(is_mm_prefix_lm=has_images),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )


def a_builder(spec: Any = None, builder: Any = None, **options: Any) -> Any:
    make = builder or integration.XlaGpuMetadataBuilder
    config = a_config(**options)
    names = [*config.compilation_config.static_forward_context]
    spec = spec or specs.FullAttentionSpec(**SPEC)
    return make(spec, names, config, torch.device("cpu"))


def a_batch(**options: Any) -> Any:
    """Two sequences of 6 and 9 tokens, of which 2 and 3 are new, as vLLM describes them."""
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([0, 2, 5], [6, 9])
    )
    batch: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lengths,
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": 2,
        "num_actual_tokens": 5,
        "max_query_len": 3,
        "max_seq_len": 9,
        "block_table_tensor": torch.tensor([[1], [0]], dtype=torch.int32, device="cpu"),
        "slot_mapping": torch.arange(5, device="cpu"),
    }
    return CommonAttentionMetadata(**batch | options)


def test_other_choices_are_vllms(checkpoint: Any, serve: Any) -> None:
    engine = serve(checkpoint("llama"), attention_backend=None)
    assert {type(x.impl).__name__ for x in attention_layers(engine)} == {"CPUAttentionBackendImpl"}
