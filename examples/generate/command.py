"""What ``python -m examples.generate`` does once its options are known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from examples import processes
from examples.generate import checkpoint, report
from examples.generate import run as backends
from examples.generate.engine import Answer
from examples.generate.sampling import Sampling
from examples.scheduler import Limits

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
    console = Console(stderr=options.json)
    try:
        if options.distributed is not None and not processes.join(options.distributed):
            options.json, options.out, console.quiet = False, None, True
        result = _generate(options, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        report.to_terminal(result, console)
    if options.out:
        page = options.out / "generate.html"
        report.to_html(result, page)
        console.print(f"The page: {page.resolve()}", soft_wrap=True)
    return 0 if result.is_good else 1


def _generate(options: argparse.Namespace, console: Console) -> backends.Result:
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    limits = Limits(
        block_size=options.block_size,
        num_blocks=options.blocks,
        max_seqs=options.max_seqs,
        max_blocks_per_seq=-(-options.max_len // options.block_size),
        token_budget=options.token_budget,
    )
    with console.status("reading the checkpoint"):
        model = checkpoint.load(options.model, options.dtype)
    prompts = options.prompt or list(PROMPTS)
    names = options.backend or (["jax"] if options.mesh else ["jax", "torch_xla"])
    if options.mesh and names != ["jax"]:
        raise ValueError(f"--mesh must go with --backend jax alone; got {', '.join(names)}")
    with Live(console=console, transient=True) as live:
        stream = _Stream(live, model, prompts)
        return backends.run(
            model,
            prompts,
            dtype=options.dtype,
            sampling=sampling,
            limits=limits,
            backends=backends.ALL if "all" in names else list(dict.fromkeys(names)),
            on_progress=stream.show,
            mesh=tuple(options.mesh) if options.mesh else None,
        )


class _Stream:
    """Shows the answers as they grow: of each, the last words that fit on a line."""

    def __init__(self, live: Live, model: checkpoint.Checkpoint, prompts: Sequence[str]) -> None:
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
