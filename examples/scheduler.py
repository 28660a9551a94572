"""Continuous batching over a paged pool: which tokens of which requests make up the next step.

Each step has a budget of tokens. Running requests that generate get one token each; what is left
goes to prompts, in chunks. A request that needs a block when none is free preempts the youngest,
which gives its blocks back and computes its tokens anew later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """When a request arrives, and how many tokens it brings and asks for."""

    seconds: float  # since the trace began
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Limits:
    """The static sizes of a step, and of the pool it works on."""

    block_size: int = 16
    num_blocks: int = 512
    max_seqs: int = 16
    max_blocks_per_seq: int = 128
    token_budget: int = 256

    def __post_init__(self) -> None:
        if self.max_blocks_per_seq > self.num_blocks:
            raise ValueError("a sequence may not need more blocks than the pool has")
        if self.token_budget < self.max_seqs:
            raise ValueError("the token budget must give each running sequence a token")

    @property
    def max_tokens_per_seq(self) -> int:
        """Tokens that one sequence can hold, prompt and generated."""
        return self.max_blocks_per_seq * self.block_size

    @property
    def buckets(self) -> tuple[int, ...]:
        """The token counts that steps are padded to, one program each: one for steps that only
        decode, one for those with prompt chunks."""
        return tuple(sorted({self.max_seqs, self.token_budget}))


@dataclass
class Request:
    """A request on its way through."""

    number: int
    arrival: Arrival
    prompt_tokens: int
    total_tokens: int
    known_tokens: int = 0  # prompt, and what has been generated so far
    computed_tokens: int = 0  # of those, in the cache
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known_tokens = self.prompt_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether it is shorter than in the trace, to fit a sequence's limit."""
        return self.total_tokens < self.arrival.prompt_tokens + self.arrival.generated_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is still to be computed."""
        return self.known_tokens - self.computed_tokens == 1 and self.computed_tokens > 0


@dataclass(frozen=True)
class Step:
    """The metadata of one step, padded; rows past `num_tokens` and `num_seqs` are padding."""

    context_lens: np.ndarray  # [max_seqs]
    block_tables: np.ndarray  # [max_seqs, max_blocks_per_seq]
    query_start_loc: np.ndarray  # [max_seqs + 1]
    num_seqs: np.ndarray  # [1]
    slot_mapping: np.ndarray  # [bucket], -1 for padding
    request_of_token: np.ndarray  # [bucket], -1 for padding
    position_of_token: np.ndarray  # [bucket]
    num_tokens: int
    num_decode_tokens: int


class Batch(NamedTuple):
    """A step as a model takes it, with arrays of its framework: the tokens, those of one sequence
    after another, and the metadata of attention.

    The sizes are static: rows past the last token and sequences past ``num_seqs`` are padding.
    """

    tokens: Any  # [num_tokens] int32
    positions: Any  # [num_tokens] int32
    slot_mapping: Any  # [num_tokens] int32, -1 for padding
    context_lens: Any  # [max_seqs] int32
    block_tables: Any  # [max_seqs, max_blocks_per_seq] int32
    query_start_loc: Any  # [max_seqs + 1] int32
    num_seqs: Any  # [1] int32


class Scheduler:
    """Admits arrivals, forms steps, and keeps the pool's books."""

    def __init__(self, arrivals: Iterable[Arrival], limits: Limits) -> None:
        self.limits = limits
        self.truncated = 0
        self.preemptions = 0
        self.finished: list[Request] = []
        self.generated_tokens = 0
        self._free_blocks = list(range(limits.num_blocks))
        np.random.default_rng(0).shuffle(self._free_blocks)  # a table in order would prove little
        self._future = deque(self._request(i, arrival) for i, arrival in enumerate(arrivals))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def used_blocks(self) -> int:
        """Blocks of the pool that hold somebody's tokens."""
        return self.limits.num_blocks - len(self._free_blocks)

    @property
    def is_done(self) -> bool:
        """Whether every request of the trace has finished."""
        return not (self._future or self.waiting or self.running)

    def next_step(self, seconds: float) -> Step | None:
        """The step to run at a time of the trace's clock; None if nobody is there."""
        while self._future and self._future[0].arrival.seconds <= seconds:
            request = self._future.popleft()
            self.waiting.append(request)
            self.truncated += request.is_truncated
        chunks = self._plan()
        return self._step(chunks) if chunks else None

    def complete(self, stopped: Collection[int] = ()) -> None:
        """Tells that the step has run. A request whose tokens are all computed has generated one.

        Args:
            stopped: numbers of the requests whose new token is their last, before their limit.
        """
        for request in list(self.running):
            if request.computed_tokens < request.known_tokens:
                continue
            self.generated_tokens += 1
            request.known_tokens += 1
            if request.known_tokens >= request.total_tokens or request.number in stopped:
                self._release(request)
                self.running.remove(request)
                self.finished.append(request)

    def cancel(self, number: int) -> bool:
        """Drops a request that waits or runs, between two steps. False if it is neither."""
        for requests in (self.running, self.waiting):
            for request in requests:
                if request.number == number:
                    self._release(request)
                    requests.remove(request)
                    return True
        return False

    def _request(self, number: int, arrival: Arrival) -> Request:
        limit = self.limits.max_tokens_per_seq
        prompt = min(max(arrival.prompt_tokens, 1), limit - 1)
        total = min(prompt + max(arrival.generated_tokens, 1), limit)
        return Request(number, arrival, prompt, total)

    def _plan(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step."""
        budget = self.limits.token_budget
        chunks: list[tuple[Request, int]] = []
        # Oldest first, and those that decode before prompts: preemption hits the youngest.
        for request in sorted(self.running, key=lambda r: (not r.is_decoding, r.number)):
            if request in self.running and budget > 0:
                count = min(request.known_tokens - request.computed_tokens, budget)
                planned = {id(other) for other, _ in chunks}
                if self._make_room(request, count, planned):
                    chunks.append((request, count))
                    budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_seqs:
            request = self.waiting[0]
            # Room for all its tokens, not just this chunk: else it would soon be preempted again.
            if self._blocks_wanted(request, request.known_tokens) > len(self._free_blocks):
                break
            count = min(request.known_tokens, budget)
            self.running.append(self.waiting.popleft())
            self._allocate(request, count)
            chunks.append((request, count))
            budget -= count
        return chunks

    def _make_room(self, request: Request, count: int, planned: set[int]) -> bool:
        """Gives a running request the blocks it needs, at the expense of the youngest others."""
        while self._blocks_wanted(request, count) > len(self._free_blocks):
            others = [r for r in self.running if id(r) not in planned]
            victim = max(others, key=lambda r: r.number)
            self._preempt(victim)
            if victim is request:
                return False
        self._allocate(request, count)
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._release(request)
        request.computed_tokens = 0
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _blocks_wanted(self, request: Request, count: int) -> int:
        total = -(-(request.computed_tokens + count) // self.limits.block_size)
        return total - len(request.blocks)

    def _allocate(self, request: Request, count: int) -> None:
        for _ in range(self._blocks_wanted(request, count)):
            request.blocks.append(self._free_blocks.pop())

    def _release(self, request: Request) -> None:
        self._free_blocks.extend(reversed(request.blocks))
        request.blocks.clear()

    def _step(self, chunks: Sequence[tuple[Request, int]]) -> Step:
        limits = self.limits
        num_tokens = sum(count for _, count in chunks)
        bucket = next(size for size in limits.buckets if size >= num_tokens)
        step = Step(
            context_lens=np.zeros(limits.max_seqs, np.int32),
            block_tables=np.zeros((limits.max_seqs, limits.max_blocks_per_seq), np.int32),
            query_start_loc=np.full(limits.max_seqs + 1, num_tokens, np.int32),
            num_seqs=np.array([len(chunks)], np.int32),
            slot_mapping=np.full(bucket, -1, np.int32),
            request_of_token=np.full(bucket, -1, np.int64),
            position_of_token=np.zeros(bucket, np.int64),
            num_tokens=num_tokens,
            num_decode_tokens=sum(request.is_decoding for request, _ in chunks),
        )
        start = 0
        for s, (request, count) in enumerate(chunks):
            rows = slice(start, start + count)
            positions = request.computed_tokens + np.arange(count)
            blocks = np.array(request.blocks, np.int32)
            step.query_start_loc[s] = start
            step.context_lens[s] = request.computed_tokens + count
            step.block_tables[s, : len(blocks)] = blocks
            step.slot_mapping[rows] = (
                blocks[positions // limits.block_size] * limits.block_size
                + positions % limits.block_size
            )
            step.request_of_token[rows] = request.number
            step.position_of_token[rows] = positions
            request.computed_tokens += count
            start += count
        return step
