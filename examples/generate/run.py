"""What ``python -m examples.generate`` does once its options are known: answers prompts through the
backends, one after another, and compares what they say."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from examples import commands
from examples.generate import report, transformers_backend
from examples.generate.report import BackendResult, Result
from examples.generate.runners import RUNNERS
from harness import hlo
from xla_paged_attention.engine import checkpoint as checkpoints
from xla_paged_attention.engine import engine
from xla_paged_attention.engine.checkpoint import Checkpoint, Scores
from xla_paged_attention.engine.engine import Answer
from xla_paged_attention.engine.jax_runner import JaxMeshRunner
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.sampling import Sampling
from xla_paged_attention.engine.scheduler import Limits

NAMES = [*RUNNERS, *transformers_backend.ATTENTION]
ALL = [name for name in NAMES if not name.startswith("vllm")]  # vLLM is rarely installed
PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "Give me three tips for sleeping well.",
    "What does a librarian do?",
    "How do plants make food?",
    "Describe the taste of an apple.",
    "Write a short letter to a friend who is moving away.",
)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    return commands.run(options, _generate, report.report_of, "generate.html")


def _generate(options: argparse.Namespace, console: Console) -> Result:
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    limits = Limits(
        block_size=options.block_size,
        num_blocks=options.blocks,
        max_seqs=options.max_seqs,
        max_blocks_per_seq=-(-options.max_len // options.block_size),
        token_budget=options.token_budget,
    )
    with console.status("reading the checkpoint"):
        model = checkpoints.load(options.model, options.dtype)
    prompts = options.prompt or list(PROMPTS)
    names = options.backend or (["jax"] if options.mesh else ["jax", "torch_xla"])
    if options.mesh and names != ["jax"]:
        raise ValueError(f"--mesh must go with --backend jax alone; got {', '.join(names)}")
    with Live(console=console, transient=True) as live:
        stream = _Stream(live, model, prompts)
        return answer_prompts(
            model,
            prompts,
            dtype=options.dtype,
            sampling=sampling,
            limits=limits,
            backends=ALL if "all" in names else list(dict.fromkeys(names)),
            on_progress=stream.show,
            mesh=tuple(options.mesh) if options.mesh else None,
        )


OnProgress = Callable[[str, Sequence[Answer]], None]  # the backend's name, and the answers so far


def answer_prompts(
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
        if name in RUNNERS:
            open_runner = RUNNERS[name] if mesh is None else partial(JaxMeshRunner, shape=mesh)
            results[name] = _with_our_engine(open_runner, *call)
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
    open_runner: Callable[[Checkpoint, Limits], ModelRunner],
    name: str,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    on_progress: OnProgress,
) -> BackendResult:
    start = time.perf_counter()
    runner = open_runner(checkpoint, limits)
    engine.warm_up(runner, limits)
    seconds, programs = time.perf_counter() - start, runner.compiles()
    generation = engine.generate(
        runner,
        prompts,
        sampling,
        limits,
        checkpoint.stop_tokens,
        lambda answers: on_progress(name, answers),
    )
    late_programs = runner.compiles() - programs
    text = runner.hlo(engine.empty_step(runner, limits, limits.max_seqs))
    calls = hlo.custom_calls(text or "", *hlo.STEP)
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


class _Stream:
    """Shows the answers as they grow: of each, the last words that fit on a line."""

    def __init__(self, live: Live, model: Checkpoint, prompts: Sequence[str]) -> None:
        self._live, self._model, self._prompts = live, model, prompts

    def show(self, backend: str, answers: Sequence[Answer]) -> None:
        """Shows a backend's answers; none while it is being opened."""
        if not self._live.console.is_terminal:
            if not answers:
                self._live.console.print(f"{backend} ...")
            return
        count = sum(len(answer.tokens) for answer in answers)
        if not count:
            self._live.update(Text(f"{backend}: loading and compiling", style="bold"))
            return
        seconds = max(answer.seconds[-1] for answer in answers if answer.seconds)
        head = f"{backend}: {count} tokens, {count / seconds:.0f} tokens/s" if seconds else backend
        width = max(self._live.console.width - 26, 10)
        lines = [Text(head, style="bold")]
        for prompt, answer in zip(self._prompts, answers, strict=True):
            text = " ".join(self._model.decode(answer.tokens).split())
            lines.append(Text(f"{prompt[:23]:<24}", style="cyan").append(text[-width:], "default"))
        self._live.update(Group(*lines))
