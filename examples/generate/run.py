"""Answers prompts through the doors, one after another, and compares what they say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from examples.generate import engine, transformers_door
from examples.generate.checkpoint import Checkpoint, Scores
from examples.generate.doors import DOORS, Door
from examples.generate.engine import Answer, Generation
from examples.generate.mesh import JaxMeshDoor
from examples.generate.sampling import Sampling
from examples.scheduler import Limits
from harness import hlo

NAMES = [*DOORS, *transformers_door.ATTENTION]
ALL = [name for name in NAMES if not name.startswith("vllm")]  # vLLM is rarely installed
TOLERANCE = 0.5
"""What rounding to 16 bits may change of a token's log-probability. SmolLM2's largest is 0.31."""

_TARGETS = ("xla_gpu_kv_cache_update", "xla_gpu_paged_attention")


@dataclass
class DoorResult:
    """What a door did."""

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
        the door tells none."""
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
    texts: list[str]  # the first door's answers
    doors: dict[str, DoorResult]
    mesh: tuple[int, int] | None = None  # copies of the model, and the devices of each

    @property
    def same_tokens(self) -> bool:
        """Whether all doors gave the same answers."""
        first, *others = [
            [answer.tokens for answer in door.generation.answers] for door in self.doors.values()
        ]
        return all(tokens == first for tokens in others)

    @property
    def same_as_transformers(self) -> bool:
        """Whether all answers are those of transformers' eager attention."""
        return all(door.equal_answers == len(self.prompts) for door in self.doors.values())

    @property
    def same_custom_calls(self) -> bool:
        """Whether all doors that have HLO hold the same custom calls, letter for letter."""
        calls = [door.custom_calls for door in self.doors.values() if door.custom_calls]
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
        found = [door.max_difference or 0.0 for door in self.doors.values()]
        if self.sampling.is_greedy:
            found += [door.max_behind for door in self.doors.values()]
        return max(found) < TOLERANCE

    @property
    def is_good(self) -> bool:
        """Whether everything is as it should be."""
        late = any(door.late_programs for door in self.doors.values())
        same = self.same_tokens and self.same_as_transformers
        calls = self.same_custom_calls and not late
        return calls and self.is_close and (same or not self.is_exact)

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        result = asdict(self)
        for name, door in self.doors.items():
            result["doors"][name] |= {
                "tokens_per_second": door.generation.tokens_per_second,
                "time_to_first_token": door.generation.time_to_first_token,
                "equal_answers": door.equal_answers,
                "max_difference": door.max_difference,
                "max_behind": door.max_behind,
            }
        return result | {
            "same_tokens": self.same_tokens,
            "same_as_transformers": self.same_as_transformers,
            "same_custom_calls": self.same_custom_calls,
        }


OnProgress = Callable[[str, Sequence[Answer]], None]  # the door's name, and the answers so far


def run(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    *,
    dtype: str,
    sampling: Sampling,
    limits: Limits,
    doors: Sequence[str],
    on_progress: OnProgress,
    mesh: tuple[int, int] | None = None,
) -> Result:
    """Answers the prompts through each door.

    Args:
        mesh: copies of the model and the devices of each, for the door jax; None: one device.

    Raises:
        ValueError: a prompt is empty or too long, or the devices do not make up the mesh.
    """
    encoded = [checkpoint.encode(prompt) for prompt in prompts]
    engine.check_lengths(encoded, sampling, limits)
    known: dict[tuple[int, ...], Scores] = {}  # of an answer, with its prompt's number before it
    results = {}
    for name in doors:
        on_progress(name, [])
        call = (name, checkpoint, encoded, sampling, limits, on_progress)
        if name in DOORS:
            open_door = DOORS[name] if mesh is None else partial(JaxMeshDoor, shape=mesh)
            results[name] = _with_our_engine(open_door, *call)
        else:
            results[name] = _with_transformers(*call)
    for result in results.values():
        for i, answer in enumerate(result.generation.answers):
            key = (i, *answer.tokens)
            if key not in known:
                known[key] = checkpoint.scores(encoded[i], answer.tokens)
            result.scores.append(known[key])
    first = results[doors[0]].generation.answers
    return Result(
        model=checkpoint.name,
        dtype=dtype,
        sampling=sampling,
        limits=limits,
        prompts=list(prompts),
        texts=[checkpoint.decode(answer.tokens) for answer in first],
        doors=results,
        mesh=mesh,
    )


def _with_our_engine(
    open_door: Callable[[Checkpoint, Limits], Door],
    name: str,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    on_progress: OnProgress,
) -> DoorResult:
    start = time.perf_counter()
    door = open_door(checkpoint, limits)
    engine.warm_up(door, limits)
    seconds, programs = time.perf_counter() - start, door.compiles()
    generation = engine.generate(
        door,
        prompts,
        sampling,
        limits,
        checkpoint.stop_tokens,
        lambda answers: on_progress(name, answers),
    )
    late_programs = door.compiles() - programs
    text = door.hlo(engine.empty_step(door, limits, limits.max_seqs))
    calls = [call for target in _TARGETS for call in hlo.custom_calls(text or "", target)]
    return DoorResult(generation, seconds, programs, late_programs, dict(Counter(calls)), [])


def _with_transformers(
    name: str,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    on_progress: OnProgress,
) -> DoorResult:
    generation = transformers_door.generate(
        name, checkpoint, prompts, sampling, limits, lambda answers: on_progress(name, answers)
    )
    return DoorResult(generation, 0.0, 0, 0, {}, [])
