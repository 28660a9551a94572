"""Prompts for a language model."""

from __future__ import annotations

_SUBJECTS = (
    *("the sea", "a train", "bread", "the moon", "a library", "rain", "a violin", "chess"),
    *("winter", "a bridge", "coffee", "a garden", "the desert", "a clock", "glass", "a market"),
)
_TASKS = (
    *("Describe {} in one sentence.", "Write a short poem about {}.", "What is {} good for?"),
    *("Explain {} to a child, with an example from daily life.",),
)
PROMPTS = tuple(task.format(subject) for task in _TASKS for subject in _SUBJECTS)
"""64 short prompts for a language model, each of its own."""
