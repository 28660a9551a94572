"""Continuous batching of a Llama over a paged cache, in JAX or PyTorch.

``JaxRunner``, ``JaxMeshRunner`` and ``TorchRunner`` are in modules of their own, ``jax_runner`` and
``torch_runner``, so that one framework suffices. ``checkpoint`` reads models by transformers.
"""

from xla_paged_attention.engine.engine import (
    Answer,
    Engine,
    Generation,
    generate,
    warm_up,
)
from xla_paged_attention.engine.model import Config, Model
from xla_paged_attention.engine.packing import pack
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.sampling import Sampling
from xla_paged_attention.engine.scheduler import Limits, Scheduler

__all__ = [
    "Answer",
    "Config",
    "Engine",
    "Generation",
    "Limits",
    "Model",
    "ModelRunner",
    "Sampling",
    "Scheduler",
    "generate",
    "pack",
    "warm_up",
]
