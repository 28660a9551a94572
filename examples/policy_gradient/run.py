"""Samples, scores the same tokens packed, compares, and takes a step."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from examples.policy_gradient.policies import JaxPolicy, Record, TorchPolicy
from shared_ffi.batch import Batch
from xla_paged_attention.engine import Limits, Sampling, checkpoint, generate, pack

PROMPTS = (
    "Write one sentence about the sea.",
    "Which number is larger, 9 or 12?",
    "Name three colours.",
    "What is the capital of France?",
)
LIMITS = Limits(num_blocks=256, max_seqs=4, max_blocks_per_seq=64, token_budget=64)


def run(options: argparse.Namespace) -> int:
    """Runs each framework. Returns the exit status."""
    model = checkpoint.load(options.model, "float32")
    prompts = [model.encode(prompt) for prompt in PROMPTS]
    is_equal = True
    for framework in options.framework:
        policy: Any = (JaxPolicy if framework == "jax" else TorchPolicy)(model, LIMITS)
        print(f"{framework}: {model.name}, {len(prompts)} prompts")
        for _ in range(options.iterations):
            is_equal &= _run(policy, prompts, options)
    return 0 if is_equal else 1


def _run(policy: Any, prompts: list[list[int]], options: argparse.Namespace) -> bool:
    policy.records.clear()
    sampling = Sampling(options.max_new_tokens, temperature=1.0)
    answers = generate(policy, prompts, sampling, LIMITS, frozenset()).answers
    sequences = [[*p, *a.tokens[:-1]] for p, a in zip(prompts, answers, strict=True)]
    batch = pack(sequences)
    sampled = _in_order(policy.records, sequences)
    bounds = batch.query_start_loc.tolist()
    rows = np.concatenate([
        np.arange(first + len(prompt) - 1, end)
        for first, end, prompt in zip(bounds, bounds[1:], prompts, strict=False)
    ])  # fmt: skip
    targets = np.array([token for answer in answers for token in answer.tokens])
    logprobs = np.array([x for answer in answers for x in answer.logprobs])

    for name, own in (("varlen_attention", False), ("the framework's", True)):
        equal = 0
        for (query, key, value, attended), window in zip(sampled, policy.windows, strict=True):
            again = np.asarray(policy.attend(query, key, value, batch, window, own))
            equal += np.array_equal(again, attended)
        print(f"  {name}: attention has the sampler's bits in {equal} of {len(sampled)} layers")
        logits, records = policy.score(batch, own)
        chosen = logits[rows].astype(np.float64)
        chosen = chosen[np.arange(len(rows)), targets] - np.logaddexp.reduce(chosen, -1)
        distance = np.abs(np.exp(chosen - logprobs) - 1).max()
        print(f"  {name}: largest distance of an importance ratio from 1: {distance:.2e}")
        if not own:
            is_equal = equal == len(sampled)
            same = (records[0][2] == sampled[0][2]).all((1, 2)).sum()
            print(
                "  the matrix products of other shapes: layer 0 has the sampler's values in "
                f"{same} of {bounds[-1]} tokens"
            )

    rewards = np.array([len({*answer.tokens}) / len(answer.tokens) for answer in answers])
    advantages = np.repeat(rewards - rewards.mean(), [len(answer.tokens) for answer in answers])
    given = (batch, rows, targets, logprobs.astype(np.float32), advantages.astype(np.float32))
    for step in ("the step", "and after it"):
        start = time.perf_counter()
        loss = policy.train(options.learning_rate, *given)
        print(f"  {step}: loss {loss:.3e}, {time.perf_counter() - start:.1f} s")
    return is_equal


def _in_order(records: list[tuple[Batch, Record]], sequences: list[list[int]]) -> Record:
    """What the layers made of each token, as a packed batch has it. The token's slot says where,
    as another sequence that begins alike may have computed it."""
    tokens = np.concatenate([batch.tokens for batch, _ in records])
    rows: dict[int, int] = {}  # of the tokens in the cache, by slot
    found: dict[tuple[int, ...], list[int]] = {}
    first = 0
    for batch, _ in records:
        rows |= {slot: row for row, slot in enumerate(batch.slot_mapping.tolist(), first)}
        first += len(batch.tokens)
        for s in range(int(batch.num_seqs.item())):
            at = np.arange(batch.context_lens[s])
            blocks = batch.block_tables[s, at // LIMITS.block_size]
            slots = blocks * LIMITS.block_size + at % LIMITS.block_size
            own = [rows[slot] for slot in slots.tolist()]
            found[tuple(tokens[own].tolist())] = own
    order = [row for sequence in sequences for row in found[tuple(sequence)]]
    layers = zip(*(layers for _, layers in records), strict=True)
    return [
        tuple(np.concatenate(arrays)[order] for arrays in zip(*parts, strict=True))
        for parts in layers
    ]
