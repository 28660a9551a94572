"""Continuous batching over a paged pool: which tokens of which requests make up the next step.

Each step has a budget of tokens. Running requests that generate get one token each; what is left
goes to prompts, in chunks. A request that needs a block when none is free preempts the youngest,
which gives its blocks back and computes its tokens anew later. With `Limits.reserve`, a request
waits instead until there are blocks for its last token, too, and nobody is preempted.

A request that begins as another one that runs waits until that has computed it, and shares its full
blocks. Requests decode in the order of their numbers, so the two are neighbours in a step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shared_ffi.batch import Batch, BlockPool, check_sizes, pad_batch
from shared_ffi.spec import value_error


@dataclass(frozen=True)
class Arrival:
    """When a request arrives, and how many tokens it brings and asks for."""

    seconds: float  # since the trace began
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Limits:
    """The static sizes of a step, and of the pool it works on.

    Args:
        block_size: tokens of a block.
        num_blocks: blocks of the pool.
        max_seqs: requests that run at once.
        max_blocks_per_seq: blocks of a request at most.
        token_budget: tokens of a step at most, at least ``max_seqs``.
        reserve: whether a request gets the blocks of all its tokens when it is admitted. Then
            nobody is preempted, and fewer run.

    Raises:
        ValueError: a size is less than 1, or they contradict each other.
        TypeError: a size is no int.
    """

    block_size: int = 16
    num_blocks: int = 512
    max_seqs: int = 16
    max_blocks_per_seq: int = 128
    token_budget: int = 256
    reserve: bool = False

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "reserve"}
        check_sizes("Limits", least=1, **sizes)
        if self.max_blocks_per_seq > self.num_blocks:
            rule = f"be at most num_blocks={self.num_blocks}"
            remedy = "Shorten the sequences, or enlarge the pool"
            raise value_error("Limits", "max_blocks_per_seq", rule, self.max_blocks_per_seq, remedy)
        if self.token_budget < self.max_seqs:
            rule = f"be at least max_seqs={self.max_seqs}"
            remedy = "Each sequence that runs needs a token"
            raise value_error("Limits", "token_budget", rule, self.token_budget, remedy)

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
    before: int | None = None  # the number of a request that begins as this one does
    shared_tokens: int = 0  # that both begin with
    known_tokens: int = 0  # prompt, and what has been generated so far
    computed_tokens: int = 0  # of those, in the cache
    blocks: list[int] = field(default_factory=list)
    is_stale: bool = False  # whether weights that are gone have computed some of them

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


class Chunk(NamedTuple):
    """The tokens of one request that a step computes."""

    request: int
    start: int  # position of the first
    num_tokens: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Step:
    """Which tokens of which requests one step computes."""

    chunks: Sequence[Chunk]
    num_decode_tokens: int
    limits: Limits

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def bucket(self) -> int:
        """The token count that it is padded to."""
        return next(size for size in self.limits.buckets if size >= self.num_tokens)

    def batch(self, tokens: Sequence[Sequence[int]], bucket: int | None = None) -> Batch:
        """The arrays of the step, as NumPy's.

        Args:
            tokens: the tokens of each chunk.
            bucket: the token count to pad to; None: the step's own.
        """
        return pad_batch(
            tokens,
            [chunk.end for chunk in self.chunks],
            [chunk.blocks for chunk in self.chunks],
            block_size=self.limits.block_size,
            num_tokens=self.bucket if bucket is None else bucket,
            max_seqs=self.limits.max_seqs,
            max_blocks_per_seq=self.limits.max_blocks_per_seq,
        )


class Scheduler:
    """Admits arrivals, forms steps, and keeps the pool's books.

    Args:
        arrivals: requests that come later, in the order of time; ``add`` is for one that is there.
            One that is too long for a sequence is cut.
        limits: sizes of a step and of the pool.

    Attributes:
        waiting: requests that have arrived and have no blocks, the next one first.
        running: requests that have blocks.
        preemptions: how often a request gave its blocks to an older one.
        finished: requests that have ended.
        generated_tokens: of all requests.
        truncated: requests that were cut.
    """

    def __init__(self, arrivals: Iterable[Arrival], limits: Limits) -> None:
        self.limits = limits
        self.truncated = 0
        self.preemptions = 0
        self.finished = 0
        self.generated_tokens = 0
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        np.random.default_rng(0).shuffle(self._pool.free)  # a table in order would prove little
        self._numbers = itertools.count()
        self._future = deque(map(self._request, arrivals))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def used_blocks(self) -> int:
        """Blocks of the pool that hold somebody's tokens."""
        return self.limits.num_blocks - len(self._pool.free)

    @property
    def is_done(self) -> bool:
        """Whether every request of the trace has finished."""
        return not (self._future or self.waiting or self.running)

    def add(self, arrival: Arrival, before: int | None = None, shared_tokens: int = 0) -> int:
        """Lets a request that arrives now wait. Returns its number: they count from 0.

        Args:
            arrival: how many tokens it has and asks for.
            before: the number of an earlier request, whose blocks it shares while that runs.
            shared_tokens: that both begin with.
        """
        request = self._request(arrival)
        request.before, request.shared_tokens = before, shared_tokens
        self.waiting.append(request)
        return request.number

    def next_step(self, seconds: float) -> Step | None:
        """The step to run at a time of the trace's clock; None if nobody is there."""
        while self._future and self._future[0].arrival.seconds <= seconds:
            request = self._future.popleft()
            self.waiting.append(request)
            self.truncated += request.is_truncated
        chunks = self._plan()
        return self._step(chunks) if chunks else None

    def complete(self, stopped: Collection[int] = ()) -> list[Request]:
        """Tells that the step has run. A request whose tokens are all computed has generated one.

        Args:
            stopped: numbers of the requests whose new token is their last, before their limit.

        Returns:
            the requests that have ended with it.
        """
        ended = []
        for request in list(self.running):
            if request.computed_tokens < request.known_tokens:
                continue
            self.generated_tokens += 1
            request.known_tokens += 1
            if request.known_tokens >= request.total_tokens or request.number in stopped:
                self._pool.release(request.blocks)
                self.running.remove(request)
                ended.append(request)
        self.finished += len(ended)
        return ended

    def recompute(self) -> None:
        """Lets all running requests wait for blocks, to compute their tokens anew: what the cache
        holds of them is of no use any more. It is no preemption."""
        for request in sorted(self.running, key=lambda r: r.number, reverse=True):
            self._give_back(request)

    def keep_apart(self) -> None:
        """Lets nobody share the blocks that running requests have: weights have been replaced."""
        for request in self.running:
            request.is_stale = True

    def cancel(self, number: int) -> bool:
        """Drops a request that waits or runs, between two steps. False if it is neither."""
        for requests in (self.running, self.waiting):
            for request in requests:
                if request.number == number:
                    self._pool.release(request.blocks)
                    requests.remove(request)
                    return True
        return False

    def _request(self, arrival: Arrival) -> Request:
        limit = self.limits.max_tokens_per_seq
        prompt = min(max(arrival.prompt_tokens, 1), limit - 1)
        total = min(prompt + max(arrival.generated_tokens, 1), limit)
        return Request(next(self._numbers), arrival, prompt, total)

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
            needed = request.total_tokens if self.limits.reserve else request.known_tokens
            shared = self._shared_blocks(request)
            if shared is None or self._pool.num_missing(shared, needed) > len(self._pool.free):
                break
            request.blocks = self._pool.share(shared)
            request.computed_tokens = len(shared) * self._pool.block_size
            count = min(request.known_tokens - request.computed_tokens, budget)
            end = request.computed_tokens + count
            self.running.append(self.waiting.popleft())
            self._pool.grow(request.blocks, needed if self.limits.reserve else end)
            chunks.append((request, count))
            budget -= count
        return chunks

    def _shared_blocks(self, request: Request) -> Sequence[int] | None:
        """The full blocks that a request takes of the one before. None: it computes them still."""
        for other in self.running:
            if other.number == request.before and not other.is_stale:
                # Its last token is its own, as the next one follows from it.
                shared = min(request.shared_tokens, request.prompt_tokens - 1)
                count = shared // self._pool.block_size
                computed = other.computed_tokens // self._pool.block_size
                # The rest comes with this step. Nobody waits for one that ends with it.
                ends = other.known_tokens + 1 >= other.total_tokens
                return other.blocks[: min(count, computed)] if ends or computed >= count else None
        return []

    def _make_room(self, request: Request, count: int, planned: set[int]) -> bool:
        """Gives a running request the blocks it needs, at the expense of the youngest others."""
        while not self._pool.grow(request.blocks, request.computed_tokens + count):
            others = [r for r in self.running if id(r) not in planned]
            victim = max(others, key=lambda r: r.number)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._pool.release(request.blocks)
        request.computed_tokens, request.is_stale = 0, False
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _step(self, planned: Sequence[tuple[Request, int]]) -> Step:
        chunks = []
        num_decode_tokens = sum(request.is_decoding for request, _ in planned)
        for request, count in planned:
            start = request.computed_tokens
            chunks.append(Chunk(request.number, start, count, tuple(request.blocks)))
            request.computed_tokens += count
        return Step(chunks, num_decode_tokens, self.limits)
