"""Continuous batching of prompts through one backend."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shared_ffi.batch import Batch
from shared_ffi.spec import value_error
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.sampling import Sampling, choose
from xla_paged_attention.engine.scheduler import Arrival, Limits, Scheduler, Step


@dataclass
class Answer:
    """What has been generated for a prompt.

    Attributes:
        tokens: so far; a stop token is the last one.
        logprobs: of each token, at temperature 1, by the weights that chose it; empty: not known.
        seconds: when each token came, since the engine was made.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, token: int, second: float) -> None:
        """Appends a token."""
        self.tokens.append(token)
        self.seconds.append(second)


@dataclass
class Generation:
    """The answers in the order of the prompts, and what they took.

    Attributes:
        answers: one for each prompt.
        seconds: from the first step to the last.
        preemptions: how often a request gave its blocks to an older one.
    """

    answers: list[Answer]
    seconds: float
    preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests per second."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds

    @property
    def time_to_first_token(self) -> float:
        """Median over the requests, in seconds. All requests arrive at the start."""
        return float(np.median([answer.seconds[0] for answer in self.answers]))


OnStep = Callable[[Sequence[Answer]], None]


def check_lengths(prompts: Sequence[Sequence[int]], sampling: Sampling, limits: Limits) -> None:
    """Raises a ValueError if a prompt is empty, or too long for a sequence."""
    for i, prompt in enumerate(prompts):
        _check_length(i, prompt, sampling, limits)


def _check_length(i: int, prompt: Sequence[int], sampling: Sampling, limits: Limits) -> None:
    if not prompt:
        remedy = "Begin it with the tokenizer's first token"
        raise value_error("Engine", f"prompts[{i}]", "have a token at least", 0, remedy)
    total = len(prompt) + sampling.max_new_tokens
    if total > limits.max_tokens_per_seq:
        rule = (
            f"fit the {limits.max_tokens_per_seq} tokens of a sequence, with "
            f"max_new_tokens={sampling.max_new_tokens}"
        )
        got = f"{len(prompt)} tokens, which make {total}"
        remedy = "Raise max_blocks_per_seq, or shorten one of the two"
        raise value_error("Engine", f"prompts[{i}]", rule, got, remedy)


def warm_up(runner: ModelRunner, limits: Limits) -> float:
    """Runs a step without tokens for each padded size, so that every program is compiled.

    Returns:
        the seconds that it took.
    """
    start = time.perf_counter()
    for bucket in limits.buckets:
        runner.step(empty_step(runner, limits, bucket))
    return time.perf_counter() - start


def empty_step(runner: ModelRunner, limits: Limits, num_tokens: int) -> Batch:
    """A step of padding only: it writes nothing, and its results mean nothing."""
    return _joined([Step([], 0, limits).batch([], num_tokens)] * runner.replicas)


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limits: Limits,
    stop_tokens: frozenset[int],
    on_step: OnStep = lambda answers: None,
) -> Generation:
    """Answers all prompts. As many as fit run at once; the others wait.

    After ``warm_up`` no program is compiled.

    Args:
        runner: runs the model.
        prompts: token ids.
        sampling: how to choose tokens.
        limits: sizes of a step and of the pool.
        stop_tokens: tokens that end an answer; they are its last token then.
        on_step: called after each step with the answers as they stand.

    Raises:
        ValueError: a prompt is empty or too long, or the model gave logits that are no numbers.
    """
    engine = Engine(runner, limits, stop_tokens)
    answers = [engine.add(prompt, sampling) for prompt in prompts]
    start = time.perf_counter()
    while not engine.is_done:
        engine.step()
        on_step(answers)
    return Generation(answers, time.perf_counter() - start, engine.preemptions)


class Engine:
    """Continuous batching through a runner: requests join and leave between two steps.

    A step is one ragged batch of prompts' chunks and of decoding sequences, padded to one of
    `limits.buckets`, so that as many programs are compiled. A request that begins as the one before
    it shares that one's full blocks, while it runs: the answers to one prompt compute it once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        stop_tokens: frozenset[int] = frozenset(),
        recompute: bool = True,
    ) -> None:
        """
        Args:
            runner: runs the model.
            limits: sizes of a step and of the pool.
            stop_tokens: tokens that end an answer; they are its last token then.
            recompute: whether a request that runs while weights are replaced computes its tokens
                anew; if not, it keeps their keys and values, which are those of the old weights.
        """
        self._runner = runner
        self._recompute = recompute
        self._weights = _seen(runner)
        self._limits = limits
        self._stop_tokens = stop_tokens
        # Each of the runner's copies of the model has requests and a pool of its own.
        self._replicas = [_Replica({}, Scheduler([], limits)) for _ in range(runner.replicas)]
        self._count = 0
        self._start = time.perf_counter()

    @property
    def is_done(self) -> bool:
        """Whether every request has its answer."""
        return all(replica.scheduler.is_done for replica in self._replicas)

    @property
    def preemptions(self) -> int:
        """How often a request gave its blocks to an older one."""
        return sum(replica.scheduler.preemptions for replica in self._replicas)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Answer:
        """Lets a request wait for room. Returns its answer, which grows with the steps.

        Raises:
            ValueError: the prompt is empty or too long.
        """
        _check_length(self._count, prompt, sampling, self._limits)
        replica = self._replicas[self._count % len(self._replicas)]
        request = _Request(self._count, [*prompt], sampling, Answer())
        replica.add(request)
        self._count += 1
        return request.answer

    def step(self) -> None:
        """Runs the model once for all requests that have room, and chooses their next tokens.

        Raises:
            ValueError: the model gave logits that are no numbers.
        """
        if _are_replaced(self._weights, self._runner):
            for replica in self._replicas:
                if self._recompute:
                    replica.scheduler.recompute()
                else:
                    replica.scheduler.keep_apart()
        self._weights = _seen(self._runner)
        steps = [replica.next_step() for replica in self._replicas]
        bucket = max(step.bucket for step in steps)
        pairs = [*zip(self._replicas, steps, strict=True)]
        try:
            logits = self._runner.step(_joined([x.batch(step, bucket) for x, step in pairs]))
        except BaseException:  # nobody may read what has not been written
            for replica in self._replicas:
                replica.scheduler.recompute()
            raise
        seconds = time.perf_counter() - self._start
        for (replica, step), own in zip(
            pairs, logits.reshape(len(steps), self._limits.max_seqs, -1), strict=True
        ):
            replica.complete(step, own, self._stop_tokens, seconds)


_Seen = list[tuple[weakref.ref[Any], int]]


def _seen(runner: ModelRunner) -> _Seen:
    """What tells whether weights are replaced later; it keeps none in memory."""
    return [(weakref.ref(weight), writes) for weight, writes in runner.weights()]


def _are_replaced(seen: _Seen, runner: ModelRunner) -> bool:
    weights = runner.weights()
    return len(weights) != len(seen) or any(
        reference() is not weight or before != writes
        for (reference, before), (weight, writes) in zip(seen, weights, strict=True)
    )


@dataclass
class _Request:
    number: int  # among those of all replicas
    tokens: list[int]  # prompt and answer
    sampling: Sampling
    answer: Answer


class _Replica(NamedTuple):
    """The requests of one of the runner's copies of the model that have not ended, by the
    scheduler's numbers."""

    requests: dict[int, _Request]
    scheduler: Scheduler

    def add(self, request: _Request) -> None:
        """Lets a request wait. The last one that has not ended may begin as it does."""
        before, shared = next(reversed(self.requests), None), 0
        if before is not None:
            pairs = zip(request.tokens, self.requests[before].tokens, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        arrival = Arrival(0.0, len(request.tokens), request.sampling.max_new_tokens)
        self.requests[self.scheduler.add(arrival, before, shared)] = request

    def next_step(self) -> Step:
        """The next step; one without tokens if all requests are done."""
        if self.scheduler.is_done:
            return Step([], 0, self.scheduler.limits)
        step = self.scheduler.next_step(0.0)
        assert step is not None, "a request waits though the pool is free"
        return step

    def batch(self, step: Step, bucket: int) -> Batch:
        """The arguments of the model for a step, padded to `bucket` tokens."""
        tokens = [self.requests[x.request].tokens[x.start : x.end] for x in step.chunks]
        return step.batch(tokens, bucket)

    def complete(
        self, step: Step, logits: np.ndarray, stop_tokens: frozenset[int], seconds: float
    ) -> None:
        """Chooses the next token of each sequence of a step that has run."""
        stopped = set()
        for s, chunk in enumerate(step.chunks):
            request = self.requests[chunk.request]
            if chunk.end < len(request.tokens):
                continue  # a part of the prompt, or tokens that are computed anew
            token, logprob = choose(logits[s], request.sampling, request.number, chunk.end)
            request.tokens.append(token)
            request.answer.add(token, seconds)
            request.answer.logprobs.append(logprob)
            if token in stop_tokens:
                stopped.add(chunk.request)
        for ended in self.scheduler.complete(stopped):
            del self.requests[ended.number]


def _joined(batches: Sequence[Batch]) -> Batch:
    """The argument of ModelRunner.step. Several replicas make it one dimension more."""
    if len(batches) == 1:
        return batches[0]
    return Batch(*(np.stack(arrays) for arrays in zip(*batches, strict=True)))
