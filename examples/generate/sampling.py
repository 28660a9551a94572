"""Chooses the next token from the logits. The choice depends on no other request of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and how many."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities add up to this
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be 0 or a positive number; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1; got {self.top_p}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative; got {self.seed}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature == 0


def choose(
    logits: np.ndarray, sampling: Sampling, request: int, position: int
) -> tuple[int, float]:
    """The next token and its log-probability (at temperature 1).

    Args:
        logits: ``[vocab_size]``.
        sampling: temperature, top-p and seed.
        request: number of the request.
        position: of the new token. Seed, request and position decide the random number.
    """
    wide = logits.astype(np.float64)
    normalizer = np.logaddexp.reduce(wide)
    if sampling.is_greedy:
        token = int(wide.argmax())
    else:
        token = _draw(wide, sampling, np.random.default_rng([sampling.seed, request, position]))
    return token, float(wide[token] - normalizer)


def _draw(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-probabilities, kind="stable")
    cumulative = probabilities[order].cumsum()
    count = int(np.searchsorted(cumulative, sampling.top_p)) + 1
    kept = order[:count]
    return int(random.choice(kept, p=probabilities[kept] / probabilities[kept].sum()))
