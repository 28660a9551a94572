"""Answers prompts through the backends, one after another, and compares what they say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from examples.generate import engine, transformers_backend
from examples.generate.checkpoint import Checkpoint, Scores
from examples.generate.backends import BACKENDS, Backend
from examples.generate.engine import Answer, Generation
from examples.generate.mesh import JaxMeshBackend
from examples.generate.sampling import Sampling
from examples.scheduler import Limits
from harness import hlo

NAMES = [*BACKENDS, *transformers_backend.ATTENTION]
ALL = [name for name in NAMES if not name.startswith("vllm")]  # vLLM is rarely installed
TOLERANCE = 0.5
"""What rounding to 16 bits may change of a token's log-probability. SmolLM2's largest is 0.25."""

_TARGETS = ("xla_gpu_kv_cache_update", "xla_gpu_paged_attention")


@dataclass
class BackendResult:
    """What a backend did."""

    generation: Generation
    seconds_to_open: float  # weights in place, and every program compiled
    programs: int
    late_programs: int  # compiled while generating
    custom_calls: dict[str, int]  # of a decoding step: how often each occurs
    scores: list[Scores]  # of each answer

    @property
    def equal_answers(self) -> int:
        """Answers that transformers' eager attention gives as well, by greedy search."""
        pairs = zip(self.generation.answers, self.scores, strict=True)
        return sum(answer.tokens == scores.best for answer, scores in pairs)

    @property
    def max_difference(self) -> float | None:
        """The largest difference of a log-probability from transformers' eager attention; None if
        the backend tells none."""
        pairs = zip(self.generation.answers, self.scores, strict=True)
        return max(
            (
                abs(ours - theirs)
                for answer, scores in pairs
                if answer.logprobs
                for ours, theirs in zip(answer.logprobs, scores.logprobs, strict=True)
            ),
            default=None,
        )

    @property
    def max_behind(self) -> float:
        """How far a token is behind the best of transformers' eager attention, at most."""
        return max((behind for scores in self.scores for behind in scores.behind), default=0.0)


@dataclass
class Result:
    """A run."""

    model: str
    dtype: str
    sampling: Sampling
    limits: Limits
    prompts: list[str]
    texts: list[str]  # the first backend's answers
    backends: dict[str, BackendResult]
    mesh: tuple[int, int] | None = None  # copies of the model, and the devices of each

    @property
    def same_tokens(self) -> bool:
        """Whether all backends gave the same answers."""
        first, *others = [
            [answer.tokens for answer in backend.generation.answers] for backend in self.backends.values()
        ]
        return all(tokens == first for tokens in others)

    @property
    def same_as_transformers(self) -> bool:
        """Whether all answers are those of transformers' eager attention."""
        return all(backend.equal_answers == len(self.prompts) for backend in self.backends.values())

    @property
    def same_custom_calls(self) -> bool:
        """Whether all backends that have HLO hold the same custom calls, letter for letter."""
        calls = [backend.custom_calls for backend in self.backends.values() if backend.custom_calls]
        return all(found == calls[0] for found in calls)

    @property
    def is_exact(self) -> bool:
        """Whether the tokens must be equal: rounding decides no token in float32, by greedy search.

        In 16 bits, PyTorch and XLA round between the operations at different places.
        """
        return self.dtype == "float32" and self.sampling.is_greedy

    @property
    def is_close(self) -> bool:
        """Whether rounding explains how log-probabilities and greedy tokens differ from those of
        transformers' eager attention."""
        found = [backend.max_difference or 0.0 for backend in self.backends.values()]
        if self.sampling.is_greedy:
            found += [backend.max_behind for backend in self.backends.values()]
        return max(found) < TOLERANCE

    @property
    def is_good(self) -> bool:
        """Whether everything is as it should be."""
        late = any(backend.late_programs for backend in self.backends.values())
        same = self.same_tokens and self.same_as_transformers
        calls = self.same_custom_calls and not late
        return calls and self.is_close and (same or not self.is_exact)

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        result = asdict(self)
        for name, backend in self.backends.items():
            result["backends"][name] |= {
                "tokens_per_second": backend.generation.tokens_per_second,
                "time_to_first_token": backend.generation.time_to_first_token,
                "equal_answers": backend.equal_answers,
                "max_difference": backend.max_difference,
                "max_behind": backend.max_behind,
            }
        return result | {
            "same_tokens": self.same_tokens,
            "same_as_transformers": self.same_as_transformers,
            "same_custom_calls": self.same_custom_calls,
        }


OnProgress = Callable[[str, Sequence[Answer]], None]  # the backend's name, and the answers so far


def run(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    *,
    dtype: str,
    sampling: Sampling,
    limits: Limits,
    backends: Sequence[str],
    on_progress: OnProgress,
    mesh: tuple[int, int] | None = None,
) -> Result:
    """Answers the prompts through each backend.

    Args:
        mesh: copies of the model and the devices of each, for the backend jax; None: one device.

    Raises:
        ValueError: a prompt is empty or too long, or the devices do not make up the mesh.
    """
    encoded = [checkpoint.encode(prompt) for prompt in prompts]
    engine.check_lengths(encoded, sampling, limits)
    known: dict[tuple[int, ...], Scores] = {}  # of an answer, with its prompt's number before it
    results = {}
    for name in backends:
        on_progress(name, [])
        call = (name, checkpoint, encoded, sampling, limits, on_progress)
        if name in BACKENDS:
            open_backend = BACKENDS[name] if mesh is None else partial(JaxMeshBackend, shape=mesh)
            results[name] = _with_our_engine(open_backend, *call)
        else:
            results[name] = _with_transformers(*call)
    for result in results.values():
        for i, answer in enumerate(result.generation.answers):
            key = (i, *answer.tokens)
            if key not in known:
                known[key] = checkpoint.scores(encoded[i], answer.tokens)
            result.scores.append(known[key])
    first = results[backends[0]].generation.answers
    return Result(
        model=checkpoint.name,
        dtype=dtype,
        sampling=sampling,
        limits=limits,
        prompts=list(prompts),
        texts=[checkpoint.decode(answer.tokens) for answer in first],
        backends=results,
        mesh=mesh,
    )


def _with_our_engine(
    open_backend: Callable[[Checkpoint, Limits], Backend],
    name: str,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    on_progress: OnProgress,
) -> BackendResult:
    start = time.perf_counter()
    backend = open_backend(checkpoint, limits)
    engine.warm_up(backend, limits)
    seconds, programs = time.perf_counter() - start, backend.compiles()
    generation = engine.generate(
        backend,
        prompts,
        sampling,
        limits,
        checkpoint.stop_tokens,
        lambda answers: on_progress(name, answers),
    )
    late_programs = backend.compiles() - programs
    text = backend.hlo(engine.empty_step(backend, limits, limits.max_seqs))
    calls = [call for target in _TARGETS for call in hlo.custom_calls(text or "", target)]
    return BackendResult(generation, seconds, programs, late_programs, dict(Counter(calls)), [])


def _with_transformers(
    name: str,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    on_progress: OnProgress,
) -> BackendResult:
    generation = transformers_backend.generate(
        name, checkpoint, prompts, sampling, limits, lambda answers: on_progress(name, answers)
    )
    return BackendResult(generation, 0.0, 0, 0, {}, [])
