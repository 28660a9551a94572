"""transformers' own model and continuous batching, with our attention or its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import transformers

from torch_frontend.integrations.transformers import NAME
from xla_paged_attention.engine.checkpoint import Checkpoint
from xla_paged_attention.engine.engine import Answer, Generation, OnStep, check_lengths
from xla_paged_attention.engine.sampling import Sampling
from xla_paged_attention.engine.scheduler import Limits

ATTENTION = {"transformers": NAME, "transformers-sdpa": "sdpa"}
"""By the backend's name, the attention that transformers runs. ``sdpa`` is its own."""


def generate(
    backend: str,
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limits: Limits,
    on_step: OnStep = lambda answers: None,
) -> Generation:
    """As ``engine.generate``, through a backend of ATTENTION. With a temperature, the random
    numbers are transformers' own.

    Raises:
        RuntimeError: transformers gave up on a request.
    """
    check_lengths(prompts, sampling, limits)
    model = checkpoint.model
    model.set_attn_implementation(ATTENTION[backend])
    answers = [Answer() for _ in prompts]
    with model.continuous_batching_context_manager(
        generation_config=_generation_config(checkpoint, sampling),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_batch_tokens=limits.token_budget,
            max_requests_per_batch=limits.max_seqs,
            return_logprobs=True,
            seed=sampling.seed,
        ),
    ) as manager:
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            manager.add_request(
                list(prompt),
                request_id=str(i),
                max_new_tokens=sampling.max_new_tokens,
                streaming=True,
            )
        running = len(prompts)
        while running:
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("transformers ended before its requests")
                continue
            if output.error is not None:
                raise RuntimeError(f"prompt {output.request_id}: {output.error}")
            answer = answers[int(output.request_id)]
            now = time.perf_counter() - start
            for token in output.generated_tokens[len(answer.tokens) :]:
                answer.add(token, now)
            if sampling.is_greedy:  # else they are those after temperature and top-p
                answer.logprobs = list(output.logprobs)
            running -= output.is_finished()
            on_step(answers)
        return Generation(answers, time.perf_counter() - start)


def _generation_config(checkpoint: Checkpoint, sampling: Sampling) -> Any:
    stop = sorted(checkpoint.stop_tokens)
    options: dict[str, Any] = {"do_sample": False}
    if not sampling.is_greedy:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
        }
    return transformers.GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
        **options,
    )
