"""Continuous batching of prompts through one door."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from examples.generate.batch import Batch
from examples.generate.doors import Door
from examples.generate.sampling import Sampling, choose
from examples.scheduler import Arrival, Limits, Scheduler, Step


@dataclass
class Answer:
    """What has been generated for a prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens; empty: not known
    seconds: list[float] = field(default_factory=list)  # when each token came, since the start

    def add(self, token: int, second: float) -> None:
        """Appends a token."""
        self.tokens.append(token)
        self.seconds.append(second)


@dataclass
class Generation:
    """The answers of a door, in the order of the prompts, and what they took."""

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
        if not prompt:
            raise ValueError(f"prompt {i} is empty")
        total = len(prompt) + sampling.max_new_tokens
        if total > limits.max_tokens_per_seq:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, and {sampling.max_new_tokens} new ones make "
                f"{total}; a sequence holds {limits.max_tokens_per_seq}: raise --max-len"
            )


def warm_up(door: Door, limits: Limits) -> float:
    """Runs a step without tokens for each padded size, so that every program is compiled.

    Returns:
        the seconds that it took.
    """
    start = time.perf_counter()
    for bucket in limits.buckets:
        door.step(empty_batch(limits, bucket))
    return time.perf_counter() - start


def empty_batch(limits: Limits, num_tokens: int) -> Batch:
    """A step of padding only: it writes nothing, and its results mean nothing."""
    return Batch(
        tokens=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int32),
        context_lens=np.zeros(limits.max_seqs, np.int32),
        block_tables=np.zeros((limits.max_seqs, limits.max_blocks_per_seq), np.int32),
        query_start_loc=np.zeros(limits.max_seqs + 1, np.int32),
        num_seqs=np.zeros(1, np.int32),
    )


def generate(
    door: Door,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limits: Limits,
    stop_tokens: frozenset[int],
    on_step: OnStep = lambda answers: None,
) -> Generation:
    """Answers all prompts. As many as fit run at once; the others wait.

    Args:
        door: runs the model.
        prompts: token ids.
        sampling: how to choose tokens.
        limits: sizes of a step and of the pool.
        stop_tokens: tokens that end an answer; they are its last token then.
        on_step: called after each step with the answers as they stand.

    Raises:
        ValueError: a prompt is empty or too long.
    """
    check_lengths(prompts, sampling, limits)
    arrivals = [Arrival(0.0, len(prompt), sampling.max_new_tokens) for prompt in prompts]
    scheduler = Scheduler(arrivals, limits)
    sequences = [list(prompt) for prompt in prompts]  # prompt and answer
    answers = [Answer() for _ in prompts]
    start = time.perf_counter()
    while not scheduler.is_done:
        step = scheduler.next_step(0.0)
        assert step is not None, "a request waits though the pool is free"
        logits = door.step(_batch(step, sequences))
        stopped = set()
        for s in range(int(step.num_seqs[0])):
            last = step.query_start_loc[s + 1] - 1
            request, position = int(step.request_of_token[last]), int(step.position_of_token[last])
            sequence, answer = sequences[request], answers[request]
            if position + 1 < len(sequence):
                continue  # a part of the prompt, or tokens that are computed anew
            token, logprob = choose(logits[s], sampling, request, position + 1)
            sequence.append(token)
            answer.add(token, time.perf_counter() - start)
            answer.logprobs.append(logprob)
            if token in stop_tokens:
                stopped.add(request)
        scheduler.complete(stopped)
        on_step(answers)
    return Generation(answers, time.perf_counter() - start, scheduler.preemptions)


def _batch(step: Step, sequences: Sequence[Sequence[int]]) -> Batch:
    tokens = np.zeros(len(step.slot_mapping), np.int32)
    for t in range(step.num_tokens):
        tokens[t] = sequences[step.request_of_token[t]][step.position_of_token[t]]
    return Batch(
        tokens=tokens,
        positions=step.position_of_token.astype(np.int32),
        slot_mapping=step.slot_mapping,
        context_lens=step.context_lens,
        block_tables=step.block_tables,
        query_start_loc=step.query_start_loc,
        num_seqs=step.num_seqs,
    )
