"""The choice of each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared_ffi.batch import check_sizes
from shared_ffi.spec import dtype_error, value_error


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and how many.

    Args:
        max_new_tokens: tokens of the answer at most, from 1 on.
        temperature: logits are divided by it; 0: always the most probable token.
        top_p: sample from the fewest tokens whose probabilities add up to this, above 0 to 1.
        seed: of the random numbers, not negative. A token depends on it, on the number of its
            request and on its position, and on no other request.

    Raises:
        ValueError: a number is out of its range.
        TypeError: ``max_new_tokens`` is no int, or another one no number.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes("Sampling", least=1, max_new_tokens=self.max_new_tokens)
        for name in ("temperature", "top_p"):
            number = getattr(self, name)
            if not isinstance(number, int | float | np.integer | np.floating):
                raise dtype_error("Sampling", name, "type float", type(number).__name__)
        if not 0 <= self.temperature < np.inf:
            rule, remedy = "be 0 or a positive number", "0 always takes the most probable token"
            raise value_error("Sampling", "temperature", rule, self.temperature, remedy)
        if not 0 < self.top_p <= 1:
            rule, remedy = "be more than 0 and at most 1", "1 samples from all tokens"
            raise value_error("Sampling", "top_p", rule, self.top_p, remedy)
        if not hasattr(self.seed, "__index__") or self.seed < 0:
            rule, remedy = "be an integer that is not negative", "Leave it out for 0"
            raise value_error("Sampling", "seed", rule, self.seed, remedy)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature == 0


def choose(
    logits: np.ndarray, sampling: Sampling, request: int, position: int
) -> tuple[int, float]:
    """The next token and its log-probability (at temperature 1).

    The choice depends on no other request of the batch.

    Args:
        logits: ``[vocab_size]``.
        sampling: temperature, top-p and seed.
        request: number of the request.
        position: of the new token. Seed, request and position decide the random number.

    Raises:
        ValueError: a logit is NaN or infinite, or all are -inf. One that is -inf has no chance.
    """
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        normalizer = np.logaddexp.reduce(wide)
    if not np.isfinite(normalizer):
        name = f"the logits of request {request} for position {position}"
        got = (
            f"{np.isnan(wide).sum()} NaN, {np.isposinf(wide).sum()} inf and "
            f"{np.isneginf(wide).sum()} -inf of {len(wide)}"
        )
        rule, remedy = "be finite, or -inf for some tokens", "Are all weights finite?"
        raise value_error("Engine", name, rule, got, remedy)
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
