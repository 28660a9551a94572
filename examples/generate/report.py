"""The result of a run, and its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from examples import page
from examples.page import COLORS, Headline
from xla_paged_attention.engine.checkpoint import Scores
from xla_paged_attention.engine.engine import Generation
from xla_paged_attention.engine.sampling import Sampling
from xla_paged_attention.engine.scheduler import Limits

TOLERANCE = 0.5
"""What rounding to 16 bits may change of a token's log-probability. SmolLM2's largest is 0.25."""


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
            [answer.tokens for answer in backend.generation.answers]
            for backend in self.backends.values()
        ]
        return all(tokens == first for tokens in others)

    @property
    def same_as_transformers(self) -> bool:
        """Whether all answers are those of transformers' eager attention."""
        return all(backend.equal_answers == len(self.prompts) for backend in self.backends.values())

    @property
    def same_custom_calls(self) -> bool:
        """Whether all backends that have HLO hold the same custom calls, letter for letter."""
        found = page.same_calls([backend.custom_calls for backend in self.backends.values()])
        return found is None or found.good

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


def headlines(result: Result) -> list[Headline]:
    """What to know at a glance."""
    backends = result.backends.values()
    rates = {
        name: backend.generation.tokens_per_second for name, backend in result.backends.items()
    }
    fastest = max(rates, key=lambda name: rates[name])
    late = sum(backend.late_programs for backend in backends)
    differences = [x for backend in backends if (x := backend.max_difference) is not None]
    must = result.is_exact
    found = []
    if len(result.backends) > 1:
        value = "the same" if result.same_tokens else "different"
        found.append(Headline("tokens of the backends", value, result.same_tokens or not must))
    if result.sampling.is_greedy:
        equal = min(backend.equal_answers for backend in backends)
        answers = f"{equal} of {len(result.prompts)}"
        good = equal == len(result.prompts) or not must
        found.append(Headline("answers as with transformers' attention", answers, good))
        if behind := max(backend.max_behind for backend in backends):
            label = "log-probability of a token behind transformers' best, at most"
            found.append(Headline(label, f"{behind:.1g}", behind < TOLERANCE))
    if differences:
        largest = max(differences)
        label = "largest error of a log-probability"
        found.append(Headline(label, f"{largest:.1g}", largest < TOLERANCE))
    if same := page.same_calls([backend.custom_calls for backend in backends]):
        found.append(same)
    return [
        *found,
        Headline("programs compiled while generating", str(late), late == 0),
        Headline("tokens per second", f"{rates[fastest]:,.0f} ({fastest})", True),
    ]


_LEGEND = (
    "First token: the median over the prompts. Ready: after loading weights and compiling. "
    "Programs: how many were compiled. Error: the largest difference of a log-probability from "
    "transformers' eager attention, whose answers are compared, too."
)


def rows(result: Result) -> list[list[str]]:
    """The table of the backends, its header first."""
    header = ["backend", "tokens/s", "first token", "ready", "programs", "error"]
    table = [header]
    for name, backend in result.backends.items():
        row = [
            name,
            f"{backend.generation.tokens_per_second:,.0f}",
            f"{backend.generation.time_to_first_token:.2f} s",
            f"{backend.seconds_to_open:.1f} s",
            str(backend.programs) if backend.programs else "none",
            "" if backend.max_difference is None else f"{backend.max_difference:.1g}",
        ]
        table.append(row)
    if result.sampling.is_greedy:  # samples need not be equal
        header.append("equal answers")
        for row, backend in zip(table[1:], result.backends.values(), strict=True):
            row.append(f"{backend.equal_answers} of {len(result.prompts)}")
    return table


def report_of(result: Result) -> page.Report:
    """The report of a run."""
    return page.Report(
        title=f"{result.model} speaks through {page.through(result.backends)}",
        run=f"{result.model}, {result.dtype}",
        headlines=headlines(result),
        rows=rows(result),
        legend=_LEGEND,
        summary=_summary(result),
        calls={
            name: {call: f"{count} times:" for call, count in backend.custom_calls.items()}
            for name, backend in result.backends.items()
        },
        plots=[partial(_plot_tokens, result), partial(_plot_rates, result)],
        conversation=[*zip(result.prompts, result.texts, strict=True)],
    )


def _summary(result: Result) -> str:
    limits, sampling = result.limits, result.sampling
    first = next(iter(result.backends.values())).generation
    tokens = sum(len(answer.tokens) for answer in first.answers)
    how = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, seed {sampling.seed}"
    if sampling.is_greedy:
        how = "greedy search"
    preemptions = f", {first.preemptions} preemptions" if first.preemptions else ""
    pools, devices = "one pool", ""
    if result.mesh:
        copies, devices_per_copy = result.mesh
        pools = "a pool" if copies == 1 else f"a pool for each of {copies} copies of the model"
        devices = f" on {copies * devices_per_copy} devices, {devices_per_copy} for each copy"
    return (
        f"{len(result.prompts)} prompts, {tokens:,} new tokens, {how}{preemptions}. "
        f"At most {limits.max_seqs} prompts run at once, over {pools} of {limits.num_blocks} "
        f"blocks of {limits.block_size} tokens{devices}. Token counts are padded to "
        f"{' or '.join(map(str, limits.buckets))}, a program each, compiled before the clock runs."
    )


def _plot_tokens(result: Result, axes: Axes) -> None:
    for color, (name, backend) in zip(COLORS, result.backends.items(), strict=False):
        answers = backend.generation.answers
        seconds = np.sort([second for answer in answers for second in answer.seconds])
        axes.step(seconds, np.arange(1, len(seconds) + 1), color=color, label=name, where="post")
    axes.set_title("Tokens generated")
    axes.set_xlabel("seconds since the requests arrived")
    axes.set_ylabel("tokens")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _plot_rates(result: Result, axes: Axes) -> None:
    names = list(result.backends)
    rates = [backend.generation.tokens_per_second for backend in result.backends.values()]
    bars = axes.barh(names, rates, color=COLORS[: len(names)], height=0.6)
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set_title("Tokens per second, all requests")
    axes.set_xlim(right=1.15 * max(rates))
